#include "server/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace signpost {
namespace {

std::string ReadFile(const char* path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// proc(5)'s fields from the third on: the second, in brackets, is a name that may have spaces.
std::vector<std::string> ReadStat() {
  const std::string text = ReadFile("/proc/self/stat");
  const size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(text.substr(name_end + 2), ' ');
}

double NumberAt(const std::vector<std::string>& fields, size_t number) {
  double value = 0;
  const size_t index = number - 3;
  if (index >= fields.size() || !absl::SimpleAtod(fields[index], &value)) return 0;
  return value;
}

absl::Time BootTime() {
  double seconds = 0;
  for (const absl::string_view line : absl::StrSplit(ReadFile("/proc/stat"), '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() == 2 && words[0] == "btime" && absl::SimpleAtod(words[1], &seconds)) break;
  }
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

uint64_t CountOpenFds() {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  uint64_t count = 0;
  while (const dirent* const entry = readdir(directory)) count += entry->d_name[0] != '.';
  closedir(directory);
  return count - 1;  // that of the directory
}

}  // namespace

ProcessMetrics ReadProcessMetrics() {
  const double ticks = sysconf(_SC_CLK_TCK);
  const std::vector<std::string> stat = ReadStat();
  ProcessMetrics metrics;
  metrics.cpu_seconds = (NumberAt(stat, 14) + NumberAt(stat, 15)) / ticks;
  metrics.threads = NumberAt(stat, 20);
  metrics.started = BootTime() + absl::Seconds(NumberAt(stat, 22) / ticks);
  metrics.virtual_bytes = NumberAt(stat, 23);
  metrics.resident_bytes = NumberAt(stat, 24) * sysconf(_SC_PAGESIZE);
  metrics.open_fds = CountOpenFds();
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) metrics.max_fds = limit.rlim_cur;
  return metrics;
}

}  // namespace signpost
