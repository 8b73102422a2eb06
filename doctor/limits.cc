#include "doctor/limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace signpost::doctor {
namespace {

// Beside connections: libraries, gRPC's own, snapshots.
constexpr uint64_t kOwnDescriptors = 128;
constexpr uint64_t kEnoughDescriptors = 65536;

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // not there, or "max"
}

uint64_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    uint64_t kibibytes = 0;
    if (absl::StartsWith(line, "MemAvailable:") &&
        std::istringstream(line.substr(sizeof "MemAvailable:" - 1)) >> kibibytes) {
      return kibibytes << 10;
    }
  }
  return 0;
}

// The control groups that this process's memory counts in: version 2's, version 1's, and what a
// container sees as the root of either.
struct Group {
  std::string limit, usage, path;
};

std::vector<Group> MemoryGroups() {
  std::vector<Group> groups;
  const auto add = [&groups](std::string path, const char* limit, const char* usage) {
    while (path.size() > 1 && absl::EndsWith(path, "/")) path.pop_back();
    groups.push_back({absl::StrCat(path, "/", limit), absl::StrCat(path, "/", usage), path});
  };
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[1].empty()) {
      add("/sys/fs/cgroup" + parts[2], "memory.max", "memory.current");
    } else if (parts[1] == "memory") {
      add("/sys/fs/cgroup/memory" + parts[2], "memory.limit_in_bytes", "memory.usage_in_bytes");
    }
  }
  add("/sys/fs/cgroup", "memory.max", "memory.current");
  add("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
  return groups;
}

void BoundMemory(uint64_t bytes, const std::string& by, Limits& limits) {
  if (bytes >= limits.free_memory_bytes) return;
  limits.free_memory_bytes = bytes;
  limits.memory_bound = by;
}

std::string Gibibytes(uint64_t bytes) {
  return absl::StrFormat("%.3g GiB", static_cast<double>(bytes) / (1 << 30));
}

void CheckOpenFiles(const Limits& limits, const Job& job, Reporter& to) {
  const uint64_t wanted = kOwnDescriptors + std::max<uint64_t>(job.workers, 128);
  if (limits.open_files >= wanted) {
    to.Fine("open files", absl::StrCat(limits.open_files, " may be open, ", wanted, " are needed"));
    return;
  }
  const uint64_t possible = std::min(kEnoughDescriptors, limits.most_open_files);
  to.Fault(
      "open files",
      absl::StrCat(limits.open_files, " files may be open, ", wanted,
                   " are needed: an aggregator then turns workers away"),
      absl::StrCat("ulimit -n ", std::max(possible, wanted), possible < wanted ? " (as root)" : "",
                   "; of a service: LimitNOFILE=65536 in its unit"));
}

void CheckMemory(const Limits& limits, const Job& job, Reporter& to) {
  const std::string there =
      absl::StrCat(Gibibytes(limits.free_memory_bytes), " are free, by ", limits.memory_bound);
  if (job.parameters == 0) {
    to.Fine("memory", absl::StrCat(there, "; with --parameters it is compared with the job"));
    return;
  }
  const absl::StatusOr<Needs> needs = NeedsOf(job);
  if (!needs.ok()) {
    to.Fault("memory", absl::StrCat("there is no such job: ", needs.status().message()),
             "--workers, --parameters, --codec and the number of aggregators as the job has them");
    return;
  }
  const uint64_t workers = job.local_workers * needs->worker_bytes;
  const uint64_t aggregator = job.shard ? needs->aggregator_bytes : 0;
  const std::string needed =
      absl::StrCat(Gibibytes(workers + aggregator), " are needed (", job.local_workers,
                   job.local_workers == 1 ? " worker " : " workers ", Gibibytes(workers),
                   job.shard ? absl::StrCat(", the aggregator ", Gibibytes(aggregator)) : "", ")");
  if (workers + aggregator <= limits.free_memory_bytes) {
    to.Fine("memory", absl::StrCat(there, "; ", needed));
    return;
  }
  to.Fault(
      "memory", absl::StrCat(there, ", and ", needed, ": the kernel would end a process"),
      limits.memory_bound == "this machine"
          ? "fewer workers on this host, more shards, or gradients in bf16 "
            "(warm_up_codec, variance_codec; signpost doctor --codec bf16 tells what they need)"
          : absl::StrCat(
                "raise the limit of ", limits.memory_bound,
                "; of a pod: resources.limits.memory: ", ((workers + aggregator) >> 30) + 1, "Gi"));
}

}  // namespace

Limits FindLimits() {
  Limits limits = {};
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    limits.open_files = files.rlim_cur;
    limits.most_open_files = files.rlim_max;
  }
  limits.free_memory_bytes = AvailableBytes();
  limits.memory_bound = "this machine";
  for (const Group& group : MemoryGroups()) {
    const std::optional<uint64_t> most = ReadNumber(group.limit);
    if (!most) continue;
    const uint64_t used = ReadNumber(group.usage).value_or(0);
    BoundMemory(*most - std::min(*most, used), absl::StrCat("control group ", group.path), limits);
  }
  rlimit space = {};
  if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    BoundMemory(space.rlim_cur, "`ulimit -v`", limits);
  }
  return limits;
}

void CheckLimits(const Limits& limits, const Job& job, Reporter& to) {
  CheckOpenFiles(limits, job, to);
  CheckMemory(limits, job, to);
}

}  // namespace signpost::doctor
