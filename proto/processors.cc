#include "proto/processors.h"

#include <sched.h>

#include <cerrno>
#include <cstddef>
#include <vector>

namespace signpost {

uint32_t ProcessorCount() {
  // One has room for 1,024 processors, and the kernel refuses what has less than it has been built
  // for.
  constexpr size_t kMostSets = 1024;
  for (std::vector<cpu_set_t> sets(1); sets.size() <= kMostSets; sets.resize(2 * sets.size())) {
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) == 0) return CPU_COUNT_S(bytes, sets.data());
    if (errno != EINVAL) break;
  }
  return 0;
}

}  // namespace signpost
