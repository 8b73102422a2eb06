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
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace signpost::bench {
namespace {

// Other containers may have the same directories, and other processes of these numbers.
std::string NamesOfThisNamespace() {
  struct stat status = {};
  stat("/proc/self/ns/pid", &status);
  return absl::StrCat("signpost-bench-", status.st_ino, "-");
}

// The number of one that lives may have been another's before; then what is left stays.
bool IsOfOneThatIsGone(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, NamesOfThisNamespace())) return false;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(name, absl::MaxSplits('-', 1));
  pid_t pid = 0;
  if (parts.second.empty() || !absl::SimpleAtoi(parts.first, &pid) || pid <= 0) return false;
  return kill(pid, 0) != 0 && errno == ESRCH;
}

}  // namespace

std::string NamePrefix(pid_t pid) { return absl::StrCat(NamesOfThisNamespace(), pid); }

std::string NamePrefix() { return NamePrefix(getpid()); }

std::vector<std::string> LeftIn(const std::string& directory) {
  std::vector<std::string> left;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    struct stat status;
    const std::string& path = entry->path();
    if (IsOfOneThatIsGone(entry->path().filename().string()) && lstat(path.c_str(), &status) == 0 &&
        status.st_uid == geteuid()) {
      left.push_back(path);
    }
  }
  return left;
}

}  // namespace signpost::bench
