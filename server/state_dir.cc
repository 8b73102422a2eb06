#include "server/state_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "failpoint/failpoint.h"

namespace signpost {
namespace {

constexpr char kIdentity[] = "identity";
constexpr char kIdentityFormat[] =
    "signpost state 1\nshard %" SCNu32 " of %" SCNu32 "\ngeneration %" SCNu64 "\n";
constexpr size_t kMostIdentityBytes = 128;
constexpr size_t kGenerations = 2;

constexpr char kEpochs[] = "epochs";
constexpr absl::string_view kEpochsFormat = "signpost epochs 1\n";
constexpr size_t kMostKnown = 1024;
constexpr size_t kMostEpochsBytes = kEpochsFormat.size() + 17 * kMostKnown;

struct SnapshotName {
  uint64_t epoch = 0;
  uint64_t sequence = 0;
};

std::string NameOf(const SnapshotName& name) {
  return absl::StrFormat("%016x-%016x.snapshot", name.epoch, name.sequence);
}

std::string LateRoundsName(uint64_t epoch) { return absl::StrFormat("%016x.late", epoch); }

std::optional<SnapshotName> ParseName(const std::string& text) {
  SnapshotName name;
  if (std::sscanf(text.c_str(), "%" SCNx64 "-%" SCNx64 ".snapshot", &name.epoch, &name.sequence) !=
          2 ||
      NameOf(name) != text) {
    return std::nullopt;
  }
  return name;
}

// Ascending.
bool AreRanks(absl::Span<const uint32_t> ranks, size_t world_size) {
  return !ranks.empty() && ranks.back() < world_size &&
         std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
}

std::string TextOf(const std::deque<uint64_t>& epochs) {
  std::string text(kEpochsFormat);
  for (const uint64_t epoch : epochs) absl::StrAppendFormat(&text, "%016x\n", epoch);
  return text;
}

// Of what TextOf returns.
std::optional<std::deque<uint64_t>> ParseEpochs(const std::string& text) {
  std::deque<uint64_t> epochs;
  for (size_t i = kEpochsFormat.size(); i < text.size(); i += 17) {
    uint64_t epoch = 0;
    if (std::sscanf(text.c_str() + i, "%16" SCNx64, &epoch) != 1) return std::nullopt;
    epochs.push_back(epoch);
  }
  if (TextOf(epochs) != text) return std::nullopt;
  return epochs;
}

std::string IdentityOf(ShardId shard, uint64_t generation) {
  return absl::StrFormat("signpost state 1\nshard %d of %d\ngeneration %d\n", shard.shard,
                         shard.shard_count, generation);
}

absl::Status ServedError(const std::string& directory, const std::string& lock) {
  return absl::UnavailableError(absl::StrCat("another process serves the state directory ",
                                             directory, " (`fuser ", lock,
                                             "` names it): two cannot serve one shard"));
}

// A descriptor that holds the lock.
absl::StatusOr<int> Lock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/lock");
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot open ", path, ": ", std::strerror(errno)));
  }
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    close(fd);
    return absl::FailedPreconditionError(absl::StrCat(path, " is no regular file"));
  }
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    close(fd);
    if (error == EWOULDBLOCK) return ServedError(directory, path);
    return absl::FailedPreconditionError(
        absl::StrCat("cannot lock ", path, ": ", std::strerror(error),
                     "; a state directory must be on a file system that has locks (flock)"));
  }
  return fd;
}

// Of the process that serves it, or has. NOT_FOUND: never; FAILED_PRECONDITION: not by that
// shard.
absl::StatusOr<uint64_t> GenerationOf(Disk& disk, ShardId shard) {
  const absl::StatusOr<std::string> identity = disk.Read(kIdentity, kMostIdentityBytes);
  if (absl::IsDataLoss(identity.status())) {
    return absl::FailedPreconditionError(identity.status().message());
  }
  if (!identity.ok()) return identity.status();
  ShardId found;
  uint64_t generation = 0;
  if (std::sscanf(identity->c_str(), kIdentityFormat, &found.shard, &found.shard_count,
                  &generation) != 3 ||
      IdentityOf(found, generation) != *identity ||
      generation == std::numeric_limits<uint64_t>::max()) {
    return absl::FailedPreconditionError(
        "it belongs to another version of signpost, or is none of its directories: its file "
        "'identity' is not understood");
  }
  if (found.shard != shard.shard || found.shard_count != shard.shard_count) {
    return absl::FailedPreconditionError(
        absl::StrFormat("it belongs to shard %d of %d, and this aggregator is shard %d of %d. "
                        "For another number of shards give an empty directory, and start the job "
                        "again from its newest checkpoint",
                        found.shard, found.shard_count, shard.shard, shard.shard_count));
  }
  return generation;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateDir>> StateDir::Open(const std::string& path, ShardId shard) {
  if (absl::Status status = MakeDirectory(path); !status.ok()) return status;
  absl::StatusOr<int> lock = Lock(path);
  if (!lock.ok()) return lock.status();
  // What is said of it can then be told from other words.
  const std::string absolute = std::filesystem::absolute(path).lexically_normal();
  std::unique_ptr<Disk> disk = OpenDirectory(absolute);
  std::unique_ptr<StateDir> state_dir(new StateDir(*disk));
  state_dir->owned_disk_ = std::move(disk);
  state_dir->path_ = absolute;
  state_dir->lock_fd_ = *lock;
  if (absl::Status status = state_dir->BeginGeneration(shard); !status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("state directory ", path, ": ", status.message()));
  }
  return state_dir;
}

absl::StatusOr<std::unique_ptr<StateDir>> StateDir::Open(Disk& disk, ShardId shard) {
  std::unique_ptr<StateDir> state_dir(new StateDir(disk));
  if (absl::Status status = state_dir->BeginGeneration(shard); !status.ok()) return status;
  return state_dir;
}

StateDir::~StateDir() {
  if (lock_fd_ >= 0) close(lock_fd_);
}

absl::Status StateDir::CheckShard(const std::string& path, ShardId shard) {
  const std::unique_ptr<Disk> disk = OpenDirectory(path);
  const absl::Status status = GenerationOf(*disk, shard).status();
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::Status StateDir::BeginGeneration(ShardId shard) {
  const absl::StatusOr<uint64_t> generation = GenerationOf(disk_, shard);
  if (generation.ok()) {
    generation_ = *generation;
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  // A directory may be an older copy of itself, of which the same generations have come before.
  const uint64_t now = std::max<int64_t>(absl::ToUnixMillis(absl::Now()), 0);
  generation_ = std::max(generation_ + 1, now);
  return Replace(disk_, kIdentity, {IdentityOf(shard, generation_)});
}

std::string StateDir::WithoutPath(absl::string_view message) const {
  if (path_.empty()) return std::string(message);
  return absl::StrReplaceAll(message, {{path_ + "/", ""}, {path_, "the state directory"}});
}

absl::StatusOr<StateDir::Recovered> StateDir::Recover(bool allow_error_reset) {
  absl::StatusOr<std::vector<std::string>> names = disk_.List();
  if (!names.ok()) return names.status();
  Recovered recovered;
  if (absl::Status status = RecoverEpochs(recovered.warnings); !status.ok()) return status;
  std::map<uint64_t, std::vector<uint64_t>> found;  // sequences by epoch, ascending as the names
  for (const std::string& name : *names) {
    if (absl::EndsWith(name, ".tmp")) disk_.Remove(name).IgnoreError();  // of a write cut short
    if (const std::optional<SnapshotName> parsed = ParseName(name)) {
      found[parsed->epoch].push_back(parsed->sequence);
    }
  }
  for (auto& [epoch, sequences] : found) {
    last_sequence_[epoch] = sequences.back();
    std::string damage;
    while (!sequences.empty()) {
      const std::string name = NameOf({epoch, sequences.back()});
      absl::StatusOr<JobState> state = ReadSnapshot(disk_, name);
      if (state.ok() && state->id.epoch != epoch) {
        state = absl::DataLossError(
            absl::StrFormat("%s is damaged: it is of epoch %d", name, state->id.epoch));
      }
      if (state.ok()) {
        recovered.jobs.push_back(*std::move(state));
        break;
      }
      // The disk may be at fault for the moment only: then nothing may be given up.
      if (!absl::IsDataLoss(state.status())) return state.status();
      damage = std::string(state.status().message());
      recovered.warnings.push_back(damage);
      sequences.pop_back();
      if (!sequences.empty() || allow_error_reset) {
        if (absl::Status status = SetAside(name); !status.ok()) return status;
      }
    }
    if (!sequences.empty()) {
      sequences_[epoch] = sequences;
      absl::Status status = RecoverLateRounds(recovered.jobs.back());
      if (absl::IsDataLoss(status)) {
        // The ranks that have had those rounds' answers tell it again.
        recovered.warnings.push_back(std::string(status.message()));
        status = SetAside(LateRoundsName(epoch));
      }
      if (!status.ok()) return status;
      continue;
    }
    if (!allow_error_reset) {
      return absl::DataLossError(absl::StrCat(
          "no snapshot of a job can be gone on from: ", damage,
          ". Its workers wait for this aggregator. If the file cannot be brought back, start with "
          "--allow-error-reset: the job then ends, and can be started again, from its newest "
          "checkpoint if it has one"));
    }
    recovered.given_up.push_back(epoch);
    if (std::erase(known_, epoch) > 0) {
      absl::Status status = Replace(disk_, kEpochs, {TextOf(known_)});
      if (!status.ok()) return status;
    }
    recovered.warnings.push_back(absl::StrFormat(
        "the job of epoch %d is given up: its workers end with an error. Start it again, from its "
        "newest checkpoint if it has one",
        epoch));
  }
  for (const std::string& name : *names) {
    uint64_t epoch;
    const bool is_late_rounds =
        std::sscanf(name.c_str(), "%" SCNx64 ".late", &epoch) == 1 && name == LateRoundsName(epoch);
    if (is_late_rounds && !sequences_.count(epoch)) disk_.Remove(name).IgnoreError();
  }
  recovered.known.assign(known_.begin(), known_.end());
  return recovered;
}

absl::Status StateDir::RecoverLateRounds(JobState& state) {
  absl::StatusOr<LateRounds> rounds = ReadLateRounds(disk_, LateRoundsName(state.id.epoch));
  if (!rounds.ok()) return rounds.status();
  for (const auto& [chunk, late_ranks] : *rounds) {
    for (const auto& [step, ranks] : late_ranks) {
      if (!AreRanks(ranks, state.incarnations.size())) {
        return absl::DataLossError(absl::StrFormat(
            "step %d of chunk %d cannot have been closed without such ranks", step, chunk));
      }
    }
  }
  for (ChunkState& chunk : state.chunks) chunk.late_ranks = std::move((*rounds)[chunk.chunk]);
  return absl::OkStatus();
}

absl::Status StateDir::RecoverEpochs(std::vector<std::string>& warnings) {
  const absl::StatusOr<std::string> text = disk_.Read(kEpochs, kMostEpochsBytes);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  if (!text.ok() && !absl::IsDataLoss(text.status())) return text.status();
  std::optional<std::deque<uint64_t>> epochs;
  if (text.ok()) epochs = ParseEpochs(*text);
  if (epochs) {
    known_ = *std::move(epochs);
    return absl::OkStatus();
  }
  warnings.push_back(absl::StrCat(kEpochs,
                                  " is damaged: what is still there of jobs that were forgotten is "
                                  "told that they were lost"));
  return SetAside(kEpochs);
}

absl::Status StateDir::SetKnown(uint64_t epoch) {
  if (absl::c_linear_search(known_, epoch)) return absl::OkStatus();
  std::deque<uint64_t> known = known_;
  known.push_back(epoch);
  while (known.size() > kMostKnown) known.pop_front();
  absl::Status status = Replace(disk_, kEpochs, {TextOf(known)});
  if (status.ok()) known_ = std::move(known);
  return status;
}

absl::Status StateDir::SetAside(const std::string& name) {
  const absl::Status status = disk_.Rename(name, absl::StrCat(name, ".damaged"));
  // Or it could be back after the one before it is gone, and then nothing would be whole.
  return status.ok() ? disk_.SyncDirectory() : status;
}

absl::Status StateDir::Save(const JobState& job, const ChunkSource& source) {
  const uint64_t epoch = job.id.epoch;
  const uint64_t sequence = ++last_sequence_[epoch];
  Reach(Failpoint::kSnapshotBegun);
  const std::string name = NameOf({epoch, sequence});
  absl::Status status = SetKnown(epoch);
  if (!status.ok()) return status;
  status = WriteSnapshot(disk_, name, job, source, scratch_);
  if (!status.ok()) {
    // Its name may be there, and nobody would remove it later: it could bring the job back.
    disk_.Remove(name).IgnoreError();
    return status;
  }
  Reach(Failpoint::kSnapshotSaved);
  std::vector<uint64_t>& sequences = sequences_[epoch];
  sequences.push_back(sequence);
  while (sequences.size() > kGenerations) {
    if (status = disk_.Remove(NameOf({epoch, sequences.front()})); !status.ok()) return status;
    sequences.erase(sequences.begin());
  }
  Reach(Failpoint::kSnapshotPruned);
  return absl::OkStatus();
}

absl::Status StateDir::SaveLateRounds(uint64_t epoch, const LateRounds& rounds) {
  return WriteLateRounds(disk_, LateRoundsName(epoch), rounds);
}

absl::Status StateDir::Forget(uint64_t epoch) {
  const auto remove = [&](const std::string& name) {
    const absl::Status status = disk_.Remove(name);
    return status.ok() || absl::IsNotFound(status) ? disk_.SyncDirectory() : status;
  };
  absl::Status status = remove(LateRoundsName(epoch));
  if (!status.ok()) return status;
  // The newest goes when all others have: only it knows who has left.
  for (const uint64_t sequence : sequences_[epoch]) {
    if (status = remove(NameOf({epoch, sequence})); !status.ok()) return status;
    Reach(Failpoint::kJobHalfForgotten);
  }
  sequences_.erase(epoch);
  last_sequence_.erase(epoch);
  return absl::OkStatus();
}

}  // namespace signpost
