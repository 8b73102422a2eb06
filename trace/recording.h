// The file of one process's events, as it lies on the disk: a header, and a ring of slots.

#ifndef SIGNPOST_TRACE_RECORDING_H_
#define SIGNPOST_TRACE_RECORDING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "trace/event.h"

namespace signpost::trace {

// Numbers are little-endian, as on every machine that this runs on. Texts end with a zero byte.
inline constexpr char kRecordingMagic[8] = {'S', 'P', 'T', 'R', 'A', 'C', 'E', '2'};
inline constexpr uint32_t kMostLabels = 1024;
inline constexpr uint32_t kMostEvents = 1 << 24;
inline constexpr size_t kTextBytes = 128;
inline constexpr size_t kLabelBytes = 264;  // a job's name has 256 at most
inline constexpr absl::string_view kRecordingSuffix = ".signpost-trace";

struct RecordingHeader {
  char magic[8];
  uint32_t events;      // slots
  uint32_t labels;      // that are in use; that of 0 is none
  uint64_t tickets;     // events recorded so far
  int64_t wall_offset;  // the system's clock minus the steady one when it began, in nanoseconds
  uint64_t pid;
  char process[kTextBytes];
  char host[kTextBytes];
  char clock[kTextBytes];  // what processes of one steady clock have in common
  char label[kMostLabels][kLabelBytes];
  uint64_t refused_labels;  // how often there was no room for one
  char unused[16];
};

// Event number n, from 1 on, is in slot (n - 1) mod events.
struct RecordingSlot {
  uint64_t number;  // written last; 0: nothing, or about to be written
  int64_t begin;
  int64_t end;
  uint64_t epoch;
  uint64_t step;
  uint64_t chunk_and_rank;  // chunk in the upper half
  uint64_t bytes;
  uint64_t kind_and_labels;  // kind, 16 bits; job, 16; codec, 16; 0, 16
};
static_assert(sizeof(RecordingSlot) == 64 && sizeof(RecordingHeader) % 64 == 0);

inline uint64_t RecordingBytes(uint32_t events) {
  return sizeof(RecordingHeader) + uint64_t{events} * sizeof(RecordingSlot);
}

// One process's part of a trace.
struct Recording {
  std::string process;  // "rank 3"
  std::string host;
  std::string clock;
  uint64_t pid = 0;
  int64_t wall_offset = 0;
  uint64_t dropped = 0;  // overwritten, or half written when the process died
  uint64_t refused_labels = 0;
  std::vector<std::string> labels = {""};
  std::vector<Event> events;  // as they were recorded, so by their ends

  absl::string_view Label(uint16_t label) const { return labels[label]; }
};

// Also of a file that is being written to, or whose process was killed. INVALID_ARGUMENT when
// `bytes` are no such file; `name` is what messages call it. `later` is what the file had once
// `bytes` had been read: an event that was overwritten in between is dropped, as it may be of two.
absl::StatusOr<Recording> ParseRecording(absl::string_view bytes, absl::string_view name,
                                         absl::string_view later);
absl::StatusOr<Recording> ParseRecording(absl::string_view bytes, absl::string_view name);
// NOT_FOUND, or as ParseRecording.
absl::StatusOr<Recording> ReadRecording(const std::string& path);

// By its name or, whatever it is called, by its first bytes.
bool IsRecording(const std::string& path);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_RECORDING_H_
