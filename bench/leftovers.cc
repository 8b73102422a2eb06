#include "bench/leftovers.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace signpost::bench {
namespace {

constexpr absl::string_view kName = "signpost-bench-";

// The number of one that lives may have been another's before; then what is left stays.
bool IsOfOneThatIsGone(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kName)) return false;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(name, absl::MaxSplits('-', 1));
  pid_t pid = 0;
  if (parts.second.empty() || !absl::SimpleAtoi(parts.first, &pid) || pid <= 0) return false;
  return kill(pid, 0) != 0 && errno == ESRCH;
}

}  // namespace

std::string NamePrefix() { return absl::StrCat(kName, getpid()); }

std::vector<std::string> LeftIn(const std::string& directory) {
  std::vector<std::string> left;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    struct stat status;
    const std::string& path = entry.path();
    if (IsOfOneThatIsGone(entry.path().filename().string()) && lstat(path.c_str(), &status) == 0 &&
        status.st_uid == geteuid()) {
      left.push_back(path);
    }
  }
  return left;
}

}  // namespace signpost::bench
