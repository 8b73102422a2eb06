// For tests of what takes memory.

#ifndef SIGNPOST_WORKER_RESIDENT_BYTES_H_
#define SIGNPOST_WORKER_RESIDENT_BYTES_H_

#include <unistd.h>

#include <cstddef>
#include <fstream>

#include "absl/base/config.h"

namespace signpost {

// Sanitizers take memory of their own.
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
inline constexpr bool kMemoryIsTheProgramsOwn = false;
#else
inline constexpr bool kMemoryIsTheProgramsOwn = true;
#endif

// What this process has of the machine's memory.
inline size_t ResidentBytes() {
  size_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;  // in pages
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_RESIDENT_BYTES_H_
