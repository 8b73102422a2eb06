// Writes down what a process does, as it does it.

#ifndef SIGNPOST_TRACE_RECORDER_H_
#define SIGNPOST_TRACE_RECORDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "trace/event.h"

namespace signpost::trace {

struct RecordingHeader;

// A file of fixed size that is mapped into memory, as a ring of the newest events: what a process
// has recorded is in it even if the process is killed, and the kernel writes it to disk in its own
// time. What is overwritten is counted. Thread-safe, and no thread waits for another but in
// LabelOf.
class Recorder {
 public:
  // 64 bytes each: 16 MiB for each process, in memory and on disk.
  static constexpr uint32_t kEvents = 256 * 1024;

  // Creates the file, which has that name once it is whole, with all of its space taken: a full
  // disk is an error here and not later. `process` is what this one is called in pictures: "rank
  // 3". ALREADY_EXISTS when there is such a file, otherwise the system's error.
  static absl::StatusOr<std::unique_ptr<Recorder>> Create(const std::string& path,
                                                          absl::string_view process,
                                                          uint32_t events = kEvents);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void Record(const Event& event);

  // A number for a job's or codec's name, the same for the same text. 0 when there are too many
  // (kMostLabels), which is counted, or for the empty text.
  uint16_t LabelOf(absl::string_view text) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Recorder(RecordingHeader* header, uint64_t bytes, uint32_t events);

  RecordingHeader* const header_;  // at the start of the mapped file
  const uint64_t bytes_;
  const uint32_t events_;

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, uint16_t> labels_ ABSL_GUARDED_BY(mutex_);
};

// This process's, which is off until it is started, and then on until its end.

namespace trace_internal {
inline std::atomic<Recorder*> recorder = nullptr;
}  // namespace trace_internal

// A load and a branch.
inline bool IsOn() { return trace_internal::recorder.load(std::memory_order_relaxed) != nullptr; }

// From now on events are recorded in a file of their own in `directory`, which is made if need be
// and may be that of other processes, on other hosts too. Does nothing if it was started before.
// Errors as Recorder::Create's.
absl::Status Start(const std::string& directory, absl::string_view process);

// Nothing while it is off.
void Record(const Event& event);
uint16_t LabelOf(absl::string_view text);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_RECORDER_H_
