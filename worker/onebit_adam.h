// 1-bit Adam (arXiv:2102.02888, Algorithm 1): one worker's optimizer state, and the arithmetic
// around an exchange. Steps count from 0. Steps before freeze_step are the warm-up: gradients
// travel densely and Adam runs on their mean. From freeze_step on the variance is frozen and the
// momentum travels in one bit. Plain Adam is 1-bit Adam that never freezes.
//
// Invariant: after every step momentum, variance and parameters are byte-identical on all workers,
// and sum over workers of error / n + aggregator's error + momentum loses nothing that was put in.

#ifndef SIGNPOST_WORKER_ONEBIT_ADAM_H_
#define SIGNPOST_WORKER_ONEBIT_ADAM_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/onebit.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/optimizer.h"

namespace signpost {

struct OptimizerOptions {
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  bool bias_correction = true;  // false: as DeepSpeed does
  // Steps of warm-up; kNever is plain Adam. At least 1: there is no variance to freeze before.
  uint64_t freeze_step = kNever;
  Codec warm_up_codec = FLOAT32;  // or BFLOAT16
  // At the freeze the variance is raised to at least this fraction of its tensor's mean.
  double variance_floor = 0.01;
};

// INVALID_ARGUMENT that names the option.
absl::Status CheckOptions(const OptimizerOptions& options);

// "1-bit adam beta1=0.9 ...": equal exactly if the options are; JobOptions.optimizer.
std::string DescribeOptions(const OptimizerOptions& options);

// One tensor that is trained, in memory that outlives the session.
struct Parameter {
  std::string name;
  std::vector<uint64_t> shape;
  absl::Span<float> values;  // product of shape elements, row-major
  uint32_t group = 0;        // which entry of the step's group rates applies
};

// What may change from step to step, per parameter group.
struct GroupRates {
  double learning_rate = 1e-3;
  double weight_decay = 0;  // decoupled
};
static_assert(sizeof(GroupRates) == 2 * sizeof(double));  // no padding: ranks compare its bytes

// As they travel.
StepRates MessageOf(absl::Span<const GroupRates> rates);
std::vector<GroupRates> RatesOf(const StepRates& message);

// All that an optimizer remembers between two steps, parameters apart. Vectors are in layout order.
struct OptimizerState {
  uint64_t step = 0;  // the next one
  double beta1_power = 1, beta2_power = 1;
  std::vector<float> error;     // this worker's; the rest is the same on all workers
  std::vector<float> momentum;  // dense
  std::vector<float> variance;  // once frozen, the inverse denominators
};

// Not thread-safe. Borrows layout and parameters.
class OneBitAdam final : public Optimizer {
 public:
  OneBitAdam(const Layout& layout, const OptimizerOptions& options,
             std::vector<Parameter> parameters);

  // Goes on from a saved state, whose vectors have the layout's size, to the bit: its
  // BeginStep(step) comes next. Before anything else.
  void Restore(OptimizerState state);

  // As if the steps before had been taken, but for the vectors: BeginStep(step) comes next.
  void Seek(uint64_t step) override;

  // The chunk's parameters, momentum and variance, a float each per element, one after the other:
  // STATE's payload. Sign and payload of every number stay what they are.
  Payload State(uint32_t chunk) const override;
  // Takes them over. `state` has the size of the chunk's State.
  void SetState(uint32_t chunk, absl::Span<const uint8_t> state) override;

  // Starts step `step`, the one after the last; at the freeze step this freezes the variance.
  // `rates` has an entry for each group.
  void BeginStep(uint64_t step, absl::Span<const GroupRates> rates) override;

  bool has_frozen() const override { return has_frozen_; }  // the variance, in a step of its own
  uint32_t groups() const override;  // entries that the parameters need of a step's rates

  Codec codec() const override { return codec_; }              // how this step's frames are encoded
  float error_scale() const override { return error_scale_; }  // for this step's FrameHeader

  // Writes the chunk's contribution to `payload` (Layout::PayloadBytes) and its compression error
  // to this worker's error. gradients[i] belongs to tensor i. Returns the number of blocks packed:
  // the chunk's, unless the input of a block was not finite; that block and all behind it are then
  // untouched.
  uint32_t Compress(uint32_t chunk, absl::Span<const absl::Span<const float>> gradients,
                    uint8_t* payload) override;

  // Updates momentum and parameters of the chunk with a round's answer, in this step's codec.
  void Apply(uint32_t chunk, Answer answer) override;

  // The round did not count: what Compress packed goes back into the error, momentum and parameters
  // stay.
  void TakeBack(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) override;

  // The round counted, but without what Compress packed (the worker was late): its whole input, the
  // momentum's share included, goes into the error. Before Apply of the answer.
  void KeepInput(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) override;

  absl::Span<const float> error() const { return error_; }        // in layout order
  absl::Span<const float> variance() const { return variance_; }  // OptimizerState::variance
  double beta1_power() const { return beta1_power_; }
  double beta2_power() const { return beta2_power_; }
  // The chunk's momentum, dense, whatever form it is stored in, with the signs of its zeros. For
  // tests and checkpoints.
  std::vector<float> Momentum(uint32_t chunk) const;

 private:
  void MultiplyPowers();
  void FreezeVariance();
  enum class MomentumShare { kStays, kGoesBack };
  void PutBack(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed, MomentumShare share);
  // Blocks packed of one segment, as the kernels return it.
  size_t CompressSegment(uint32_t chunk, const Segment& segment, absl::Span<const float> gradient,
                         uint8_t* payload);
  void ApplyOneBit(const Chunk& chunk, const Segment& segment, const uint8_t* payload);
  void ApplyDense(uint32_t chunk, const Segment& segment, const uint8_t* payload);
  // accumulator = accumulator + factor * momentum, over the segment's first elements.
  void AddMomentum(uint32_t chunk, const Segment& segment, float factor,
                   absl::Span<float> accumulator) const;
  // The part of a vector in layout order that belongs to the segment.
  static absl::Span<float> SegmentOf(std::vector<float>& values, const Chunk& chunk,
                                     const Segment& segment);

  const Layout& layout_;
  const OptimizerOptions options_;
  const kernels::BlockRule rule_;
  const std::vector<Parameter> parameters_;

  Codec codec_;
  bool has_frozen_ = false;
  float error_scale_ = 1;
  std::vector<GroupRates> rates_;
  // beta^power_, by repeated multiplication; power_ is the steps of the warm-up that were taken.
  uint64_t power_ = 0;
  double beta1_power_ = 1, beta2_power_ = 1;

  std::vector<float> error_;     // layout order
  std::vector<float> variance_;  // layout order; once frozen, the inverse denominators
  // Per chunk: dense until its first one-bit answer, then that answer's payload as it came (1/32 of
  // the memory).
  std::vector<std::vector<float>> dense_momentum_;
  std::vector<Payload> signed_momentum_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ONEBIT_ADAM_H_
