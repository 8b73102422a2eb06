// The directory in which a job keeps its checkpoints, and which all of its workers see:
//
//   step-<steps done>-<attempt>/
//     rank-<r>         from each rank: what only it has (checkpoint_file.h)
//     rank-<r>.sum     the CheckpointFile of rank-<r>, for the manifest; gone once there is one
//     rank-<r>.failed  from a rank that could not do its share: why; gone likewise
//     parameters       from rank 0: what all ranks have (checkpoint_file.h)
//     manifest         from rank 0, last: a CheckpointManifest. With it the checkpoint is committed
//
// All ranks know the attempt without talking, and no two runs share one, so what a run that died
// has left is never taken for a part of a later checkpoint. Ranks talk through this directory only:
// each writes its part and waits for the others', so no crash of an aggregator can stand in the
// way; and one that cannot tells them so, or they would wait for nothing.

#ifndef SIGNPOST_WORKER_CHECKPOINT_DIR_H_
#define SIGNPOST_WORKER_CHECKPOINT_DIR_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint.pb.h"
#include "storage/disk.h"
#include "storage/section_file.h"

namespace signpost {

// What all ranks of a run agree on.
struct CheckpointId {
  uint64_t step = 0;
  uint64_t attempt = 0;

  std::string name() const;  // of its subdirectory
};
// The same for all ranks: a hash of the job's epoch at each of its shards.
uint64_t AttemptOf(const std::vector<uint64_t>& epochs);

std::string RankFileName(uint32_t rank);  // "rank-3"
inline constexpr char kParametersFile[] = "parameters";

// A committed checkpoint.
struct CheckpointEntry {
  std::string name;
  absl::StatusOr<CheckpointManifest> manifest;  // DATA_LOSS when it is damaged
};

// Borrows the disk. As thread-safe as that; each rank has one of its own.
class CheckpointDir {
 public:
  explicit CheckpointDir(Disk& disk) : disk_(disk) {}

  // The committed checkpoints, the newest first; those whose manifest is damaged come last, and of
  // later steps than the newest those that have lost it. Other errors are the disk's.
  absl::StatusOr<std::vector<CheckpointEntry>> List() const;

  // Writing. Each replaces its file as a whole.

  // `parameters_crc32c` is of what all ranks have alike, as this one has it.
  absl::Status WriteRank(const CheckpointId& id, uint32_t rank, const SectionWriter& part,
                         uint32_t parameters_crc32c);
  // The entry for the manifest.
  absl::StatusOr<CheckpointFile> WriteParameters(const CheckpointId& id, const SectionWriter& part);
  // Of [0, world_size): whose part is not there yet.
  absl::StatusOr<std::vector<uint32_t>> MissingRanks(const CheckpointId& id,
                                                     uint32_t world_size) const;
  absl::StatusOr<bool> IsCommitted(const CheckpointId& id) const;
  // Tells the others why this rank's part does not come. `call` counts the calls that all ranks
  // make after the same step.
  absl::Status WriteFailure(const CheckpointId& id, uint32_t rank, uint32_t call,
                            const absl::Status& why);
  // The first rank's failure, with its code (ABORTED if it passes when its process is started
  // again), unless it was in an earlier call. Else OK, or the disk's error.
  absl::Status CheckNobodyFailed(const CheckpointId& id, uint32_t world_size, uint32_t call) const;
  // FAILED_PRECONDITION, with TryAgain's mark, unless what was committed has these parameters.
  // NOT_FOUND if nothing was.
  absl::Status CheckHasParameters(const CheckpointId& id, uint32_t parameters_crc32c) const;
  // Before a rank writes one: removes what was not committed up to its step, by runs that died and
  // by those that failed. Rank 0 removes all of it; another its own files where rank 0 has none, as
  // in a directory that rank 0 does not see, and where so nobody can commit them any more.
  absl::Status RemoveUncommitted(const CheckpointId& but, uint32_t rank);
  // FAILED_PRECONDITION that names the ranks whose parameters are not rank 0's. Requires all parts;
  // NOT_FOUND once it is committed.
  absl::Status CheckSameParameters(const CheckpointId& id, uint32_t world_size) const;
  // Commits. Sets the manifest's sequence and, from the ranks' parts, which must all be there, its
  // files; `parameters` is WriteParameters's.
  absl::Status Commit(const CheckpointId& id, CheckpointManifest manifest,
                      const CheckpointFile& parameters);
  // After a Commit: removes all committed checkpoints but the newest two, where those in `damaged`
  // do not count, and what was not committed up to this step.
  absl::Status Prune(const CheckpointId& newest, const std::set<std::string>& damaged);

  // Reading.

  // A file of a checkpoint. DATA_LOSS, naming the checkpoint, the file, and the section if one can
  // be blamed, when it is missing or not what was written.
  absl::StatusOr<std::string> Read(const std::string& checkpoint, const CheckpointFile& file) const;
  // Reads all files of the checkpoint; the first such error.
  absl::Status Verify(const std::string& checkpoint, const CheckpointManifest& manifest) const;

 private:
  absl::StatusOr<CheckpointManifest> ReadManifest(const std::string& checkpoint) const;
  absl::StatusOr<CheckpointFile> ReadSum(const CheckpointId& id, uint32_t rank) const;
  absl::StatusOr<uint64_t> LastSequence() const;
  absl::Status RemoveCheckpoint(const std::string& checkpoint,
                                const std::vector<std::string>& files);

  Disk& disk_;
};

// The entry of a file in the manifest, of the name without its directory. For "rank-1", say.
absl::StatusOr<CheckpointFile> FindFile(const CheckpointManifest& manifest,
                                        const std::string& name);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHECKPOINT_DIR_H_
