// How much memory this process may have.

#ifndef SIGNPOST_STORAGE_MEMORY_LIMIT_H_
#define SIGNPOST_STORAGE_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace signpost {

// Where the system tells of control groups.
struct ControlGroups {
  std::string own = "/proc/self/cgroup";
  std::string root = "/sys/fs/cgroup";
};

// In bytes: the machine's, or the least memory.max of the process's control group and those above
// it, as far as they are seen from here. Groups of version 1 are not looked at.
uint64_t MemoryLimit(const ControlGroups& groups = {});

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_MEMORY_LIMIT_H_
