// What a worker reads of a checkpoint, or of its own saved state, in order to go on from it.

#ifndef SIGNPOST_WORKER_RESUME_STATE_H_
#define SIGNPOST_WORKER_RESUME_STATE_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/checkpoint.pb.h"
#include "proto/layout.h"
#include "storage/disk.h"
#include "worker/checkpoint_file.h"
#include "worker/optimizer_state.h"

namespace signpost {

// What a job goes on from: at most one of these. None: it starts anew.
struct ResumeFrom {
  Disk* checkpoints = nullptr;             // a directory that all workers see
  std::optional<absl::string_view> state;  // what Worker::SaveState gave this rank

  bool is_anything() const { return checkpoints != nullptr || state.has_value(); }
};

// Who resumes, and with what.
struct ResumingWorker {
  absl::Span<const Tensor> tensors;
  // As of a job that starts anew. With chunk_elements 0 it takes those of what it resumes from.
  JobOptions options;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  bool allow_other_world_size = false;
};

struct ResumeState {
  std::string checkpoint;             // its subdirectory; empty with a rank's own state
  std::vector<std::string> warnings;  // of newer checkpoints, which are damaged, for a person
  std::set<std::string> damaged;      // their names

  uint64_t step = 0;             // steps that were done
  std::vector<uint32_t> groups;  // by tensor; of local steps, otherwise empty
  OptimizerState optimizer;
  std::vector<float> values;      // of the parameters, in layout order
  ChunkErrors aggregator_errors;  // that this rank is to give back
  uint32_t chunk_elements = 0;
  // Over values, momentum and variances: JobOptions.parameters_crc32c.
  uint32_t parameters_crc32c = 0;
};

// From the newest committed checkpoint of which all files are what was written: all ranks come to
// the same one. With the world size that it was taken of, each rank has its own error again. With
// another, if that is allowed, each has the mean of all errors in it (summed in rank order and
// divided, in fp32), so that their mean over the workers, which is what training sees, stays what
// it was.
//   NOT_FOUND            there is no committed checkpoint
//   DATA_LOSS            all are damaged; each is named
//   FAILED_PRECONDITION  another tensor, option, or world size, named
absl::StatusOr<ResumeState> LoadNewestCheckpoint(Disk& disk, const ResumingWorker& worker);

// The steps that are in the newest of a directory whose manifest is readable, of which no other
// file is looked at. NOT_FOUND and DATA_LOSS as above.
absl::StatusOr<uint64_t> NewestCheckpointStep(Disk& disk);

// The parts of what Worker::SaveState returned.
struct RankState {
  CheckpointManifest manifest;
  Layout layout;
  SavedRank rank;
  SavedParameters parameters;
};
// DATA_LOSS if it is damaged, or of another version. `check` may refuse what it says it is of, before
// memory is taken for that.
absl::StatusOr<RankState> ReadRankState(
    absl::string_view state,
    absl::FunctionRef<absl::Status(const CheckpointManifest&, const Layout&)> check);
std::string WriteRankState(const CheckpointManifest& manifest, const Layout& layout,
                           const RankPart& rank, const ParametersPart& parameters);

// From what this rank has saved of itself.
//   DATA_LOSS            it is damaged, or of another version
//   FAILED_PRECONDITION  it is another rank's, or of another tensor, option, or world size, named
absl::StatusOr<ResumeState> LoadRankState(absl::string_view state, const ResumingWorker& worker);

// By the one of the two that `from` asks for.
absl::StatusOr<ResumeState> LoadResumeState(const ResumeFrom& from, const ResumingWorker& worker);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_RESUME_STATE_H_
