// What one file of a checkpoint holds. Both kinds are files in sections (storage/section_file.h)
// and begin with "signpost checkpoint 2\n"; numbers are fp32.
//
//   rank-<r>   = CheckpointPart, the worker's error in layout order, then for each chunk that the
//                CheckpointPart names the error of its aggregator, and then, if the CheckpointPart
//                is_local, the worker's values, momentum and sum in layout order
//   parameters = CheckpointPart, the values of each tensor, then the momentum of each chunk unless
//                the CheckpointPart is_local, then the variance of each chunk
//                (OptimizerState::variance), and then, if the CheckpointPart says so, the fresh
//                variance of each chunk
//
// What a rank saves of itself, without a directory, is in sections too:
//
//   state      = "signpost rank state 1\n", the CheckpointManifest, of no files, then what is in
//                rank-<r> and in parameters
//
// An error of which all bits are 0 is a section without bytes.

#ifndef SIGNPOST_WORKER_CHECKPOINT_FILE_H_
#define SIGNPOST_WORKER_CHECKPOINT_FILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/layout.h"
#include "storage/section_file.h"

namespace signpost {

inline constexpr absl::string_view kCheckpointFirstLine = "signpost checkpoint 2\n";
inline constexpr absl::string_view kRankStateFirstLine = "signpost rank state 1\n";

// Aggregators' errors by chunk, one number for each of its elements; empty: all of it is zero.
using ChunkErrors = std::map<uint32_t, std::vector<float>>;

// The file "rank-<rank>".
struct RankPart {
  uint64_t step = 0;
  uint32_t rank = 0;
  absl::Span<const float> error;  // the worker's, in layout order
  const ChunkErrors& aggregator_errors;
  // Between 0/1 Adam's synchronisations, otherwise empty: in layout order.
  absl::Span<const float> values, momentum, local_sum;
};
// What is added must outlive the writer.
void AddRankPart(const RankPart& part, SectionWriter& writer);

struct SavedRank {
  uint32_t rank = 0;
  std::vector<float> error;
  ChunkErrors aggregator_errors;
  std::vector<float> values, momentum, local_sum;  // or empty
};
// What AddRankPart added. DATA_LOSS, saying what is wrong, if it is not that of a rank of this
// layout.
absl::StatusOr<SavedRank> ReadRankPart(SectionReader& reader, const Layout& layout);
// The same for the whole file, which must be that rank's.
absl::StatusOr<SavedRank> DecodeRankPart(absl::string_view file, uint32_t rank,
                                         const Layout& layout);

// The file "parameters". `momentum` is in layout order.
struct ParametersPart {
  uint64_t step = 0;
  absl::Span<const absl::Span<const float>> values;  // by tensor
  absl::Span<const float> momentum;                  // or empty
  absl::Span<const float> variance;
  absl::Span<const float> fresh_variance;  // or empty
};
void AddParametersPart(const ParametersPart& part, const Layout& layout, SectionWriter& writer);

struct SavedParameters {
  std::vector<float> values;    // in layout order, as the others
  std::vector<float> momentum;  // or empty
  std::vector<float> variance;
  std::vector<float> fresh_variance;  // or empty
};
absl::StatusOr<SavedParameters> ReadParametersPart(SectionReader& reader, const Layout& layout);
absl::StatusOr<SavedParameters> DecodeParametersPart(absl::string_view file, const Layout& layout);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHECKPOINT_FILE_H_
