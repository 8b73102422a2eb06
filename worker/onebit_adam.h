// 1-bit Adam (arXiv:2102.02888, Algorithm 1): one worker's optimizer state, and the arithmetic
// around an exchange. Steps count from 0. Steps before the freeze step are the warm-up: gradients
// travel densely, or in warm_up_codec, and Adam runs on their mean. From the freeze step on the
// variance is frozen and the momentum travels in one bit, but for every
// variance_refresh_interval-th step, in which gradients travel in variance_codec and refresh it.
// Plain Adam is 1-bit Adam that never freezes.
//
// 1-bit LAMB (onebit_lamb.h) is the same but for what answers do to the parameters. 0/1 Adam
// (zero_one_adam.h) has another warm-up, and local steps after it.
//
// Invariant: after every step momentum, variance and parameters are byte-identical on all workers,
// and sum over workers of error / n + aggregator's error + momentum loses nothing that was put in.

#ifndef SIGNPOST_WORKER_ONEBIT_ADAM_H_
#define SIGNPOST_WORKER_ONEBIT_ADAM_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/gpu.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/adam_state.h"
#include "worker/lamb_options.h"
#include "worker/optimizer.h"
#include "worker/optimizer_state.h"
#include "worker/page_vector.h"
#include "worker/parameter.h"
#include "worker/power.h"
#include "worker/variance_plan.h"
#include "worker/zero_one_options.h"

namespace signpost {

struct OptimizerOptions {
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
  // A freeze_step of kAuto: the variance is frozen at the first look but one (LookInterval of the
  // first group's beta2) at which it fits the gradients (VarianceFits) and no learning rate has
  // risen for 1 / (1 - beta1) steps. A variance_refresh_interval of kAuto: the variance follows
  // (VariancePlan).
  static constexpr uint64_t kAuto = kNever - 1;

  bool bias_correction = true;
  // Steps of warm-up; kNever is plain Adam. At least 1: there is no variance to freeze before. A
  // variance that follows is frozen at the first look from then on at which it fits the gradients.
  uint64_t freeze_step = kNever;
  // How gradients travel in the warm-up, and the momentum after it: any that CheckCodecOption
  // (proto/codec.h) takes. 0/1 Adam's gradients travel as its momentum.
  Codec warm_up_codec = FLOAT32;
  Codec codec = ONE_BIT;
  // How gradients travel that refresh the variance, or in 0/1 Adam update it. They are apart from
  // the error feedback, but what they lose goes into the errors.
  Codec variance_codec = FLOAT32;
  // At the freeze the variance is raised to at least this fraction of its tensor's mean.
  double variance_floor = 0.01;
  // Every so many steps after the freeze step gradients travel in variance_codec, and the variance
  // is estimated anew: with K steps since the last estimate v = beta2^K v + (1 - beta2^K) g^2,
  // corrected for its start. At least 2; 0: never. kAuto: when it is due, or no longer fits.
  uint64_t variance_refresh_interval = 0;
  // Neither: 1-bit Adam, or Adam. Otherwise 1-bit LAMB, or LAMB; or 0/1 Adam.
  std::optional<LambOptions> lamb = std::nullopt;
  std::optional<ZeroOneOptions> zero_one = std::nullopt;
  // As DeepSpeed's optimizers of that name, to compare with: the first step changes nothing, and
  // 0/1 Adam has their schedule (ZeroOneSchedule), moves its variance by 1 - beta2 in each update,
  // whatever the interval, and begins with errors of zero at the freeze. Requires that there is
  // neither bias_correction nor variance_floor. Blocks as long as tensors, and a gamma of 1, which
  // DeepSpeed has too, are WorkerOptions'.
  bool as_deepspeed = false;

  // Returns whether the variance follows the gradients.
  bool VarianceFollows() const { return variance_refresh_interval == kAuto; }
};

// INVALID_ARGUMENT that names the option.
absl::Status CheckOptions(const OptimizerOptions& options);

// "1-bit adam beta1=0.9 ...": equal exactly if the options are; JobOptions.optimizer.
std::string DescribeOptions(const OptimizerOptions& options);

// JobOptions.state_numbers.
uint32_t StateNumbers(const OptimizerOptions& options);

// What may change from step to step, per parameter group. Bias corrections are those of the step's
// betas, as PyTorch has them. While the variance is frozen a new epsilon waits for the next freeze.
struct GroupRates {
  double learning_rate = 1e-3;
  double weight_decay = 0;  // decoupled
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};
static_assert(sizeof(GroupRates) == 5 * sizeof(double));  // no padding: ranks compare its bytes

// INVALID_ARGUMENT that names the group and the rate.
absl::Status CheckRates(const OptimizerOptions& options, absl::Span<const GroupRates> rates);

// As they travel, with the schedule that the step has made.
StepRates MessageOf(absl::Span<const GroupRates> rates, const Schedule& schedule);
std::vector<GroupRates> RatesOf(const StepRates& message);

// Not thread-safe. Borrows layout, parameters and `gpu`, which has them; without it they are the
// host's, and `threads` threads compress and apply each chunk, the caller's included. Not a bit
// depends on either.
class OneBitAdam : public Optimizer {
 public:
  OneBitAdam(const Layout& layout, const OptimizerOptions& options,
             std::vector<Parameter> parameters, uint32_t threads = 1,
             kernels::cuda::Gpu* gpu = nullptr);

  // Goes on from a saved state, whose vectors have the layout's size, to the bit: BeginStep of the
  // schedule's begun_steps comes next. Before anything else.
  virtual void Restore(OptimizerState state);
  void SetValues(absl::Span<const float> values);  // of all parameters, in layout order

  // Before anything else: WorkerOptions::sum_over_shards.
  void SetSumOverShards(std::function<absl::Status(absl::Span<double>)> sum) {
    sum_over_shards_ = std::move(sum);
  }

  // OUT_OF_RANGE, which names step and tensor, once the training has diverged.
  absl::Status Check() const override {
    if (!sum_failed_.ok()) return sum_failed_;
    return diverged_.ok() ? state_->Check() : diverged_;
  }
  // The error of sum_over_shards.
  absl::Status CheckBegun() const override { return sum_failed_; }
  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return state_->SetStream(stream);
  }

  const Schedule& schedule() const override { return schedule_; }
  void SetSchedule(Schedule schedule) override { schedule_ = std::move(schedule); }

  // The chunk's parameters, momentum and variance, a float each per element, one after the other.
  Payload State(uint32_t chunk) const override;
  void SetState(uint32_t chunk, absl::Span<const uint8_t> state) override;

  // Where FreezesBefore says so it begins with that.
  void BeginStep(uint64_t step, absl::Span<const GroupRates> rates) override;
  void BeginMissedStep(uint64_t step, const StepRates& rates) override {
    BeginStep(step, signpost::RatesOf(rates));
  }
  void FollowStep(uint64_t step, const StepRates& rates) override;

  // All variances become inverse denominators as the step begins: it is the freeze step, or the one
  // after a refresh. A tensor's mean goes into that.
  bool FreezesBefore(uint64_t step) const override;
  bool HasFrozenFor(uint64_t step) const override { return frozen_for_ == step; }

  // Scales are empty unless options.lamb, the variance follows, or tensors have joined late.
  TensorScales ScalesOf(uint32_t chunk) const override;
  TensorScales Scales() const override;
  void SetScales(const TensorScales& scales) override;

  absl::Status CheckRates(absl::Span<const GroupRates> rates) const override;
  uint32_t groups() const override;

  Codec codec() const override;
  float error_scale() const override { return error_scale_; }
  float loss_unit() const override;

  absl::Status CheckGradient(const Gradient& gradient) const override {
    return state_->CheckGradient(gradient);
  }
  bool CanCompress() const override { return state_->CanCompress(); }

  std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                   uint8_t* payload, Later later) override;
  // Updates the chunk's momentum and parameters, and in a dense step its variance.
  void Apply(uint32_t chunk, Answer answer) override;
  // Momentum and parameters stay.
  void TakeBack(uint32_t chunk, const uint8_t* payload) override;
  // The momentum's share of the input included, even where the gradient's was not finite.
  void KeepInput(uint32_t chunk, const uint8_t* payload) override;

  HostFloats error() const { return state_->Errors(); }  // in layout order
  // In layout order; from a freeze to the next refresh the inverse denominators, 1 / (sqrt(v) +
  // epsilon).
  HostFloats variance() const { return state_->Variances(); }
  // By tensor, the epsilon in these inverse denominators; empty while there are variances.
  std::vector<float> FrozenEpsilons() const;
  HostFloats values(uint32_t tensor) const { return state_->ValuesOf(tensor); }
  // As OptimizerState's.
  virtual HostFloats fresh_variance() const { return HostFloats(absl::Span<const float>()); }
  virtual HostFloats anchor() const { return HostFloats(absl::Span<const float>()); }
  virtual HostFloats local_sum() const { return HostFloats(absl::Span<const float>()); }
  // The chunk's momentum, dense, whatever form it is stored in, with the signs of its zeros. For
  // tests and checkpoints.
  PageVector<float> Momentum(uint32_t chunk) const;

 protected:
  // kSettle: the momentum travels as in kOneBit, but in variance_codec; see VariancePlan.
  enum class Stage { kWarmUp, kOneBit, kSettle, kRefresh };

  // How 1-bit LAMB differs: what a step's answer does in each of the first two stages, by what a
  // tensor's learning rate is multiplied in a refresh, and what comes before the variance is
  // inverted.
  virtual void ApplyGradient(uint32_t chunk, Payload answer);
  virtual void ApplyMomentum(uint32_t chunk, Payload answer);
  virtual double ScaleOf(uint32_t tensor) const { return 1; }
  virtual void BeforeFreeze(AdamState::RatesOf<kernels::FreezeRates> rates) {}
  // How 0/1 Adam does: the steps that the variance is an average over, when it is frozen, and what
  // errors are multiplied by then.
  virtual uint64_t StepsOfVariance() const { return step_; }
  // Returns how many steps the job had taken before the tensor joined it, or before the tensor's first
  // gradient where that came after the freeze.
  uint64_t FirstStep(uint32_t tensor) const { return scales_[tensor].first_step(); }
  virtual float ErrorScaleOf(const GroupRates& rates) const;
  // And whether a variance of zero may be that of gradients which a codec has taken for zero.
  virtual bool LiftsZeros() const { return false; }

  void SetStage(uint64_t step);
  void SetRates(std::vector<GroupRates> rates) { rates_ = std::move(rates); }
  Stage stage() const { return stage_; }  // of this step
  uint64_t step() const { return step_; }
  uint32_t GroupOf(uint32_t tensor) const { return parameters_[tensor].group; }
  const GroupRates& RatesOfGroup(uint32_t group) const { return rates_[group]; }
  const GroupRates& RatesOfTensor(uint32_t tensor) const { return rates_[GroupOf(tensor)]; }
  // 1 - beta^steps, or 1 without bias correction.
  double Correction(double beta, uint64_t steps) const;
  float FrozenEpsilon(uint32_t tensor) const;
  const Layout& layout() const { return layout_; }
  const OptimizerOptions& options() const { return options_; }
  AdamState& state() { return *state_; }
  // Sums of the variance, by tensor: of the whole one, where this is a shard of it.
  std::vector<double> SumsOfVariance();
  uint64_t WholeElements(uint32_t tensor) const { return parameters_[tensor].WholeElements(); }
  Schedule& mutable_schedule() { return schedule_; }
  // The largest update of an element, in learning rates. Without bias correction the first ones
  // are larger: then there is none.
  float MostUpdate() const;
  // The rates of a step along the momentum.
  kernels::UpdateRates UpdateRatesOf(uint32_t tensor, double learning_rate,
                                     double weight_decay) const;
  // Sets squares_ of the chunk from the answer that is its new momentum.
  void NoteMomentum(uint32_t chunk, const Payload& answer);
  // The chunk's momentum has changed otherwise.
  void ForgetMomentum(uint32_t chunk) { squares_[chunk].clear(); }
  // Returns whether no tensor's momentum is too large for its variance, after a round that has
  // ended `steps` steps. Sets diverged_ where it has been far too large for long.
  bool CheckMomentum(uint64_t steps);
  TensorScale& scale(uint32_t tensor) { return scales_[tensor]; }
  const TensorScale& scale(uint32_t tensor) const { return scales_[tensor]; }
  // If FreezesBefore(step).
  void FreezeIfDue(uint64_t step);
  void SetHasError(uint32_t chunk) { has_error_[chunk] = true; }
  // What becomes of the momentum's share of an input that goes back: there is none of it, the
  // momentum stays, or it goes, too.
  enum class MomentumShare { kNone, kStays, kGoesBack };
  void PutBack(uint32_t chunk, const uint8_t* payload, MomentumShare share);

 private:
  Stage StageOf(uint64_t step) const;
  // Returns whether the momentum travels, and inverse denominators are in the variance's place.
  static bool IsOfMomentum(Stage stage) {
    return stage == Stage::kOneBit || stage == Stage::kSettle;
  }
  bool Follows() const { return options_.VarianceFollows(); }
  bool HasScales() const { return options_.lamb || Follows() || has_late_tensors_; }
  // Returns the largest FirstStep.
  uint64_t YoungestStep() const;
  // Where the job finds the freeze step itself: takes a look if it is time for one, and sets
  // freeze_step to `step` if the variance fits.
  void LookAtVariance(uint64_t step);
  // At the begin of `step`: looks at the last step's momentum, and where the variance follows plans
  // refreshes.
  void PlanRefreshes(uint64_t step);
  // At the begin of a step that refreshes: notes tensors whose first gradient may be in it.
  void FindFirstGradients();
  void SetDiverged(uint32_t tensor);
  // Adds up over all shards of the model, where this is one. Sets sum_failed_ if that fails.
  void SumOverShards(absl::Span<double> numbers);
  // Sets squares_ of the chunk from its momentum.
  void SetSquares(uint32_t chunk);
  // The least variance at a freeze, of a tensor with that mean.
  float FloorOf(double mean_variance) const {
    return static_cast<float>(options_.variance_floor * mean_variance);
  }
  // No inverse denominator of the tensor is larger.
  float MostInverseDenominator(uint32_t tensor) const;
  // The means of variances whose inverse denominators, in layout order, were saved.
  void SetMeanVariances(absl::Span<const float> inverse_denominators);
  // Takes account of a step and its learning rates.
  void Count(uint64_t step);
  void FreezeVariance(bool is_first);
  // The chunk's part of a refresh, where no gradient came: to the form that it has after one.
  void ThawChunk(uint32_t chunk);
  // What turns a gradient, in a refresh, into an error.
  float LossUnitOf(const GroupRates& rates) const;
  kernels::AdamRates AdamRatesOf(uint32_t tensor) const;
  kernels::RefreshRates RefreshRatesOf(uint32_t tensor) const;
  RefreshWeights RefreshWeightsOf(uint32_t tensor) const;

  const Layout& layout_;
  const OptimizerOptions options_;
  const kernels::BlockRule rule_;
  const std::vector<Parameter> parameters_;

  uint64_t step_ = 0;
  Stage stage_ = Stage::kWarmUp;  // of step_
  float error_scale_ = 1;
  std::vector<GroupRates> rates_;
  Schedule schedule_;
  std::optional<uint64_t> frozen_for_;  // the last step before which the variance was frozen

  std::vector<bool> has_error_;  // by chunk; false: all zero
  std::vector<TensorScale> scales_;
  bool has_late_tensors_ = false;  // some have joined after the job's first step
  // By chunk and segment, the sum of squares of the momentum. Empty where it has to be computed.
  std::vector<std::vector<double>> squares_;
  // The means in scales_ are those of the frozen variances (kExact: this worker has frozen them;
  // kNear: they were saved, or follow from what was saved) or of no use.
  enum class Means { kUnknown, kNear, kExact } means_ = Means::kUnknown;
  // By tensor, the steps in a row whose momentum CheckMomentum found far too large.
  std::vector<uint64_t> steps_beyond_;
  std::function<absl::Status(absl::Span<double>)> sum_over_shards_;
  absl::Status sum_failed_;
  absl::Status diverged_;
  const std::unique_ptr<AdamState> state_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ONEBIT_ADAM_H_
