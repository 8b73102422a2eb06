#include "storage/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace signpost {

uint64_t MemoryLimit(const ControlGroups& groups) {
  uint64_t least = uint64_t{1} * sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
  std::ifstream own(groups.own);
  std::string path;
  for (std::string line; std::getline(own, line);) {
    absl::string_view group = line;  // "0::/system.slice/signpost.service" of version 2
    if (absl::ConsumePrefix(&group, "0::")) path = std::string(group);
  }
  while (true) {
    uint64_t limit = 0;
    // "max" is no number.
    if (std::ifstream(groups.root + path + "/memory.max") >> limit && limit > 0) {
      least = std::min(least, limit);
    }
    if (path.empty()) return least;
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

}  // namespace signpost
