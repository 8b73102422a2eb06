// Where the memory of payloads, and of what is as large, comes from and goes back to. One round is
// like the next: it takes what the one before gave, and the system, which would clear it page by
// page, is not asked.

#ifndef SIGNPOST_PROTO_PAYLOAD_POOL_H_
#define SIGNPOST_PROTO_PAYLOAD_POOL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace signpost {

// Thread-safe. What it keeps is never more than twice what was in use at once lately, so that
// nobody can fill it with sizes of their own.
class PayloadPool {
 public:
  // What is smaller is malloc's.
  static constexpr size_t kLeastBytes = size_t{64} << 10;
  // After so many calls it looks at what they were: memory of sizes that nobody took goes back to
  // the system, as when a job's rounds have another codec.
  static constexpr uint32_t kCallsBetweenLooks = 1024;

  static PayloadPool& Global();  // lives as long as the process

  // What so many bytes take, from here or from malloc.
  static uint64_t Footprint(size_t bytes);

  PayloadPool() = default;
  ~PayloadPool();  // requires that all has been given back
  PayloadPool(const PayloadPool&) = delete;
  PayloadPool& operator=(const PayloadPool&) = delete;

  // `bytes` at a page's boundary, and at a large page's if they are that many; uninitialised.
  // Throws std::bad_alloc.
  void* Take(size_t bytes);
  // What Take(bytes) gave.
  void Give(void* memory, size_t bytes);

  // Idle memory goes back to the system rather than that it and what is in use are more than this.
  void KeepWithin(uint64_t bytes);

  uint64_t used_bytes() const;
  uint64_t idle_bytes() const;
  // From the system so far: it does not grow while rounds are like one another.
  uint64_t mapped_bytes() const;

 private:
  // Stands in memory that nobody has: giving it takes none.
  struct Idle {
    Idle* next;
    size_t bytes;
  };
  struct Size {
    Idle* idle = nullptr;
    bool was_taken = false;  // since the last look
  };

  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Retire(Idle* idle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RetireIdle(uint64_t most_idle_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::map<size_t, Size> sizes_ ABSL_GUARDED_BY(mutex_);  // by bytes
  Idle* retired_ ABSL_GUARDED_BY(mutex_) = nullptr;       // on their way back to the system
  uint32_t calls_ ABSL_GUARDED_BY(mutex_) = 0;            // since the last look
  uint64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;       // of sizes_
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // The most that was in use at once since the last look, and between the one before and that.
  uint64_t most_used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t most_used_before_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t most_bytes_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<uint64_t>::max();
};

}  // namespace signpost

#endif  // SIGNPOST_PROTO_PAYLOAD_POOL_H_
