// 0/1 Adam (arXiv:2202.06009, Algorithm 1): Adam with few rounds, most of them in one bit.
//
// Before the freeze step every step has a round. Those that update the variance are dense, or in
// variance_codec, and come ever less often (ZeroOneSchedule); the others bring gradients in one
// bit, with error feedback. Once there have been such, variances count as at least variance_floor
// of their tensor's mean; and so does a variance of zero, if variance_codec may have taken all that
// it is made of for zero.
//
// The freeze is 1-bit Adam's. After it workers take steps of their own, and a round every so many:
// the mean of an interval's momenta, weighted by learning rates, travels in one bit, and is the
// momentum that all go on with. The parameters of all are then those that all had before, stepped
// along it by the sum of the learning rates. An interval of one step is 1-bit Adam's step, to the
// bit. docs/algorithms.md has the equations, and what the paper does otherwise.
//
// A block whose gradient is not finite is left alone by that worker's local step. A round that does
// not count ends an interval with the parameters where they were, but for their weight decay: each
// worker's mean is in its error, and the momentum zero. A round of one step is as 1-bit Adam's.

#ifndef SIGNPOST_WORKER_ZERO_ONE_ADAM_H_
#define SIGNPOST_WORKER_ZERO_ONE_ADAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "kernels/zero_one.h"
#include "worker/onebit_adam.h"
#include "worker/zero_one_options.h"
#include "worker/zero_one_state.h"

namespace signpost {

// As OneBitAdam. The steps of Optimizer's functions are rounds.
class ZeroOneAdam final : public OneBitAdam {
 public:
  // Requires options.zero_one.
  ZeroOneAdam(const Layout& layout, const OptimizerOptions& options,
              std::vector<Parameter> parameters, uint32_t threads = 1,
              kernels::cuda::Gpu* gpu = nullptr);

  void Restore(OptimizerState state) override;

  void BeginStep(uint64_t round, absl::Span<const GroupRates> rates) override;
  void BeginMissedStep(uint64_t round, const StepRates& rates) override;
  void FollowStep(uint64_t round, const StepRates& rates) override;
  // Its local steps are none of this worker's.
  void SetSchedule(Schedule schedule) override;
  uint64_t StepsBefore(uint64_t round) const override { return steps_.StepsOf(round).first_step; }

  Codec codec() const override;
  float loss_unit() const override;
  std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                   uint8_t* payload, Later later) override;
  void Apply(uint32_t chunk, Answer answer) override;
  void TakeBack(uint32_t chunk, const uint8_t* payload) override;
  void KeepInput(uint32_t chunk, const uint8_t* payload) override;

  bool IsLocal() const override { return kind_ == Kind::kLocal; }
  void StepLocally(uint32_t chunk, absl::Span<const Gradient> gradients) override;
  std::vector<BlockLeftAlone> TakeBlocksLeftAlone() override;

  bool HasLocalSteps(uint32_t chunk) const override { return has_local_steps_[chunk]; }
  void SetState(uint32_t chunk, absl::Span<const uint8_t> state) override;
  // The floors of the chunk's tensors.
  TensorScales ScalesOf(uint32_t chunk) const override;

  HostFloats anchor() const override;
  HostFloats local_sum() const override;

 protected:
  uint64_t StepsOfVariance() const override;
  float ErrorScaleOf(const GroupRates& rates) const override;
  bool LiftsZeros() const override;

 private:
  // What a step is. The first two are those before the freeze step: of a gradient that updates the
  // variance, or of one in one bit. Then 1-bit Adam's, and in longer intervals local
  // ones, with a mean of momenta at the end.
  enum class Kind { kUpdate, kGradient, kMomentum, kLocal, kMean };

  void SetKind(uint64_t round);
  bool HasFloor() const;  // in this step
  void UpdateFloors();
  void AddToLocalSums();
  const LocalSums& SumsOf(uint32_t tensor) const;
  // The parameters are those that all workers have.
  void EndInterval(uint32_t chunk);
  kernels::AdaptiveRates AdaptiveRatesOf(uint32_t tensor) const;
  kernels::LocalRates LocalRatesOf(uint32_t tensor) const;

  const ZeroOneSchedule steps_;
  const std::unique_ptr<ZeroOneState> local_;
  Kind kind_ = Kind::kUpdate;          // of the step that has begun
  bool is_missed_ = false;             // its round, and all local steps before
  std::vector<double> floors_;         // by tensor: of variances without their bias correction
  std::optional<uint64_t> floors_of_;  // the update of the variance that they are of
  std::vector<bool> has_local_steps_;  // by chunk
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ZERO_ONE_ADAM_H_
