#include "doctor/state_disk.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/steady_time.h"
#include "server/state_dir.h"

namespace signpost::doctor {
namespace {

constexpr int kSyncs = 9;
constexpr size_t kSyncedBytes = 4096;
constexpr size_t kPartBytes = 1 << 20;
constexpr int kParts = 8;
// A snapshot has some tens of syncs, and is due every few rounds.
constexpr double kSlowSyncSeconds = 0.1;

absl::Status WriteError(const std::string& path) {
  const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
  switch (errno) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// INVALID_ARGUMENT when what is there is no directory, or cannot be looked at.
absl::StatusOr<std::string> NearestDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::path place = std::filesystem::absolute(path, error);
  if (place.empty()) place = path;  // the working directory is gone
  while (!std::filesystem::exists(place, error) && !error && place.has_parent_path() &&
         place.has_relative_path()) {
    place = place.parent_path();
  }
  if (std::filesystem::is_directory(place, error)) return place.string();
  return absl::InvalidArgumentError(
      absl::StrCat(place.string(), ": ", error ? error.message() : std::strerror(ENOTDIR)));
}

absl::Status WriteAndSync(int fd, const std::string& bytes, const std::string& path) {
  const ssize_t written = write(fd, bytes.data(), bytes.size());
  if (written >= 0 && static_cast<size_t>(written) < bytes.size()) errno = ENOSPC;
  if (written != static_cast<ssize_t>(bytes.size()) || fsync(fd) != 0) return WriteError(path);
  return absl::OkStatus();
}

// The median of several, and then the rate of many bytes.
absl::Status Measure(int fd, const std::string& path, StateDisk& disk) {
  std::vector<double> syncs;
  for (int i = 0; i < kSyncs; ++i) {
    const absl::Time start = SteadyNow();
    absl::Status status = WriteAndSync(fd, std::string(kSyncedBytes, 'd'), path);
    if (!status.ok()) return status;
    syncs.push_back(absl::ToDoubleSeconds(SteadyNow() - start));
  }
  std::nth_element(syncs.begin(), syncs.begin() + kSyncs / 2, syncs.end());
  disk.fsync_s = syncs[kSyncs / 2];
  const std::string part(kPartBytes, 'd');
  const absl::Time start = SteadyNow();
  for (int i = 0; i < kParts; ++i) {
    if (absl::Status status = WriteAndSync(fd, part, path); !status.ok()) return status;
  }
  disk.bytes_per_s = kParts * kPartBytes / absl::ToDoubleSeconds(SteadyNow() - start);
  return absl::OkStatus();
}

std::string Gibibytes(uint64_t bytes) {
  return absl::StrFormat("%.3g GiB", static_cast<double>(bytes) / (1 << 30));
}

std::string Mebibytes(double bytes) { return absl::StrFormat("%.4g MiB", bytes / (1 << 20)); }

}  // namespace

StateDisk TryStateDisk(const std::string& state_dir, const ShardId& shard) {
  const absl::StatusOr<std::string> directory = NearestDirectory(state_dir);
  if (!directory.ok()) return {.status = directory.status()};
  StateDisk disk = {.path = *directory};
  std::error_code error;
  if (std::filesystem::exists(state_dir, error)) {
    disk.shard = StateDir::CheckShard(state_dir, shard);
  }
  struct statvfs space = {};
  if (statvfs(disk.path.c_str(), &space) == 0) {
    disk.free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
  }
  const std::string path = absl::StrCat(disk.path, "/.signpost-doctor-", getpid());
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    disk.status = WriteError(path);
    return disk;
  }
  const absl::Cleanup closer = [&] {
    close(fd);
    unlink(path.c_str());
  };
  disk.status = Measure(fd, path, disk);
  return disk;
}

void CheckStateDisk(const StateDisk& disk, const Job& job, Reporter& to) {
  if (!disk.shard.ok()) {
    to.Fault("state", absl::StrCat(job.state_dir, ": ", disk.shard.message()),
             absl::StrCat(
                 "give each aggregator a --state-dir of its own; is --shard ",
                 job.shard ? absl::StrCat(job.shard->shard, "/", job.shard->shard_count) : "I/N",
                 " right here?"));
  }
  if (absl::IsInvalidArgument(disk.status)) {
    to.Fault("disk", absl::StrCat("the state directory cannot be one: ", disk.status.message()),
             "a --state-dir that is a directory which this user can reach, or can make");
    return;
  }
  if (absl::IsResourceExhausted(disk.status)) {
    to.Fault("disk", absl::StrCat("the state directory's disk is full: ", disk.status.message()),
             absl::StrCat("df -h ", disk.path,
                          "; remove what is not needed there, or another --state-dir"));
    return;
  }
  if (!disk.status.ok()) {
    to.Fault("disk", absl::StrCat("the state directory cannot be written: ", disk.status.message()),
             absl::StrCat("chown $(id -u) ", disk.path,
                          "; if it is mounted read-only: mount -o remount,rw ", disk.path));
    return;
  }
  const std::string speed =
      absl::StrFormat("fsync takes %.2g ms, %s/s, %s free", 1e3 * disk.fsync_s,
                      Mebibytes(disk.bytes_per_s), Gibibytes(disk.free_bytes));
  // A job that cannot be is the memory's finding.
  const absl::StatusOr<Needs> needs = job.parameters == 0 ? Needs{} : NeedsOf(job);
  if (needs.ok() && needs->state_bytes > disk.free_bytes) {
    to.Fault("disk",
             absl::StrCat(speed, ", and ", Gibibytes(needs->state_bytes),
                          " are needed for three snapshots"),
             absl::StrCat("df -h ", disk.path, "; a larger disk, or more shards"));
  } else if (disk.fsync_s > kSlowSyncSeconds) {
    to.Warn("disk", absl::StrCat(speed, ": rounds will wait for snapshots"),
            "a --state-dir on a local SSD; iostat -x 1 shows who else uses this disk");
  } else {
    to.Fine("disk", absl::StrCat(disk.path, ": ", speed));
  }
}

}  // namespace signpost::doctor
