// Where the memory of payloads, and of what is as large, comes from and goes back to. One round is
// like the next: it takes what the one before gave, and the system, which would clear it page by
// page, is not asked.

#ifndef SIGNPOST_PROTO_PAYLOAD_POOL_H_
#define SIGNPOST_PROTO_PAYLOAD_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace signpost {

// Thread-safe.
class PayloadPool {
 public:
  // What is smaller is malloc's.
  static constexpr size_t kLeastBytes = size_t{64} << 10;
  // After so many calls, memory of sizes that nobody took since goes back to the system: a job's
  // rounds have another codec, or a job has ended.
  static constexpr uint32_t kCallsBetweenLooks = 1024;

  static PayloadPool& Global();  // lives as long as the process

  // `bytes` at a page's boundary, and at a large page's if they are that many; uninitialised.
  // Throws std::bad_alloc.
  void* Take(size_t bytes);
  // What Take(bytes) gave.
  void Give(void* memory, size_t bytes);

  // From the system so far: it does not grow while rounds are like one another.
  uint64_t bytes_mapped() const;

 private:
  struct Size {
    std::vector<void*> free;
    bool was_taken = false;  // since the last look
  };
  // What is to go back to the system.
  struct Unused {
    std::vector<void*> memory;
    size_t bytes = 0;  // each
  };

  std::vector<Unused> Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::map<size_t, Size> sizes_ ABSL_GUARDED_BY(mutex_);  // by bytes
  uint32_t calls_ ABSL_GUARDED_BY(mutex_) = 0;            // since the last look
  uint64_t bytes_mapped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_PROTO_PAYLOAD_POOL_H_
