// A rank's saved state (Worker::SaveState) tensor by tensor, as PyTorch's optimizers show theirs.
//
// A saved state is one piece of bytes of one rank. Here it comes apart into a description, which all
// ranks have alike, and fields of each tensor, of which some are the rank's own. MakeState puts the
// same bytes together again, or those of a rank of which less is known.

#ifndef SIGNPOST_WORKER_SAVED_STATE_H_
#define SIGNPOST_WORKER_SAVED_STATE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "worker/resume_state.h"

namespace signpost {

// Fields of a tensor in a saved state, in fp32.
enum class StateField {
  kValue = 0,     // the parameter
  kExpAvg = 1,    // the momentum
  kExpAvgSq = 2,  // the variance, also where a step has inverse denominators in its place
  kError = 3,     // the rank's own
  // The elements of the aggregators' errors that this rank saves. MakeState also takes all elements of
  // a tensor, and ignores the ones that other ranks save.
  kAggregatorError = 4,
  kFreshExpAvgSq = 5,  // 1-bit LAMB's second variance; zeros before its freeze step
  kAnchor = 6,         // 0/1 Adam's value after the last synchronisation
  kLocalSum = 7,       // 0/1 Adam's, the rank's own; zeros in a step that synchronises
  // Only read: kError, plus world_size times the elements of kAggregatorError. The mean of these
  // over all ranks is all that compression has left out. A job with other tensors goes on from it:
  // its aggregators begin without errors.
  kWholeError = 8,
  // Only read: kAggregatorError at its places in the tensor, and zeros elsewhere.
  kPlacedAggregatorError = 9,
};
inline constexpr size_t kStateFields = 8;  // that MakeState takes

// One tensor's numbers, by StateField. Empty: zeros, or for kAnchor the values.
using TensorFields = std::array<absl::Span<const float>, kStateFields>;

class SavedState {
 public:
  // DATA_LOSS if these bytes are not what Worker::SaveState returned.
  static absl::StatusOr<SavedState> Read(absl::string_view state);

  uint64_t step() const { return state_.manifest.step(); }

  // JSON of one line: options, schedule and all else that MakeState wants beside the numbers. Equal
  // on all ranks that have saved after the same step.
  std::string Description() const;

  // `tensor` is in [0, tensors()). kAggregatorError may have any number of elements, also none. The
  // others have the tensor's.
  std::vector<float> Field(size_t tensor, StateField field) const;
  size_t FieldElements(size_t tensor, StateField field) const;
  size_t tensors() const { return state_.layout.tensors().size(); }

 private:
  explicit SavedState(RankState state);

  // Adds world_size times the aggregators' errors that this rank saves to the tensor's error.
  void AddAggregatorErrors(size_t tensor, absl::Span<float> error) const;
  // The numbers of kAggregatorError, one after the other or at their places.
  std::vector<float> AggregatorErrors(size_t tensor, bool is_placed) const;

  RankState state_;
  std::vector<uint64_t> first_element_;  // by tensor, in layout order
};

// The rank for which MakeState makes a state.
struct StateOwner {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  absl::Span<const Tensor> tensors;
};

// The bytes that `owner` resumes from (SessionOptions::resume_state). `numbers` has an element for
// each tensor. Names of tensors are the owner's. With the description and the fields of a SavedState
// the optimizer goes on with the same bits. With an epsilon far below 1e-12, the least that is
// tested, a frozen variance may be the nearest instead.
//   INVALID_ARGUMENT     the rank is not below world_size, the description is none or has
//                        frozen_epsilons of another number of tensors, or a field has another number
//                        of elements than its tensor, which is named
//   FAILED_PRECONDITION  the description is of another number of ranks
absl::StatusOr<std::string> MakeState(absl::string_view description, const StateOwner& owner,
                                      absl::Span<const TensorFields> numbers);

// A variance v for which 1 / (sqrt(v) + epsilon) is this inverse denominator in fp32, or the nearest
// to that. 0 for 0, which stands for a variance of zero.
float VarianceOfInverse(float inverse_denominator, float epsilon);
float InverseOfVariance(float variance, float epsilon);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_SAVED_STATE_H_
