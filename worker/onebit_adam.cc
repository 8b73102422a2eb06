#include "worker/onebit_adam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "kernels/adam.h"
#include "proto/codec.h"
#include "worker/gpu_adam_state.h"
#include "worker/host_adam_state.h"

namespace signpost {
namespace {

// The arithmetic is in fp32, where a number just below 1 is 1.
bool IsFraction(double value) { return value >= 0 && static_cast<float>(value) < 1; }

absl::Status OptionError(absl::string_view option, double got, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrFormat("optimizer option %s is %g, wanted %s", option, got, wanted));
}

kernels::MomentumRates MomentumRatesOf(const GroupRates& rates) {
  return {static_cast<float>(rates.beta1), static_cast<float>(1 - rates.beta1)};
}

std::unique_ptr<AdamState> NewState(const Layout& layout, const OptimizerOptions& options,
                                    absl::Span<const Parameter> parameters, uint32_t threads,
                                    kernels::cuda::Gpu* gpu) {
  std::vector<absl::Span<float>> values;
  for (const Parameter& parameter : parameters) values.push_back(parameter.values);
  if (gpu == nullptr) return std::make_unique<HostAdamState>(layout, std::move(values), threads);
  const GpuAdamState::Codecs codecs = {options.zero_one ? options.codec : options.warm_up_codec,
                                       options.codec, options.variance_codec,
                                       options.VarianceFollows()};
  return std::make_unique<GpuAdamState>(layout, std::move(values), codecs, threads, *gpu);
}

absl::Status CheckZeroOne(const OptimizerOptions& options) {
  const auto error = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("0/1 Adam ", what));
  };
  if (options.lamb) return error("and 1-bit LAMB are different optimizers");
  if (options.variance_refresh_interval != 0) {
    return error("updates its variance by var_update_scaler, without variance_refresh_interval");
  }
  if (options.warm_up_codec != FLOAT32) {
    return error(absl::StrCat("has codec and variance_codec in its warm-up; warm_up_codec is ",
                              CodecName(options.warm_up_codec)));
  }
  return CheckZeroOneOptions(*options.zero_one, options.freeze_step);
}

// The largest update of an element, in learning rates. Adam's own are a few at most. One bit makes
// larger ones of them where the variance is at its floor (docs/algorithms.md has measurements).
constexpr float kMostUpdate = 10;
// A momentum of fewer epsilons moves parameters by less than a thousandth of a learning rate.
constexpr double kLeastMomentum = 1e-3;
// Training has diverged when a tensor's momentum has been kFarBeyond times its gradients for
// kMostStepsBeyond steps in a row: kMostUpdate bounds the update of practically every element then.
// Error feedback alone reaches 65 times where gradients never change (docs/algorithms.md).
constexpr double kFarBeyond = 100;
constexpr uint64_t kMostStepsBeyond = 100;

absl::string_view NameOf(const OptimizerOptions& options) {
  if (options.zero_one) return "0/1 adam";
  return options.lamb ? "1-bit lamb" : "1-bit adam";
}

// Returns the sum of squares of elements of one magnitude.
double SumOfSquares(double magnitude, size_t elements) { return magnitude * magnitude * elements; }

// A block that came in one bit has the same sum as from its scale, to the bit.
double SumOfSquares(absl::Span<const float> block) {
  const float magnitude = std::abs(block[0]);
  const auto is_as_large = [magnitude](float m) { return std::abs(m) == magnitude; };
  if (absl::c_all_of(block, is_as_large)) return SumOfSquares(magnitude, block.size());
  double sum = 0;
  for (const double m : block) sum += m * m;
  return sum;
}

// What all workers have alike, in the order of STATE's payload.
constexpr AdamState::Field kFieldsOfState[] = {
    AdamState::Field::kParameters, AdamState::Field::kMomentum, AdamState::Field::kVariance};

}  // namespace

absl::Status CheckOptions(const OptimizerOptions& options) {
  if (options.freeze_step == 0) {
    return OptionError("freeze_step", 0, "at least 1: the warm-up estimates the variance");
  }
  absl::Status status = CheckCodecOption("optimizer option warm_up_codec", options.warm_up_codec);
  status.Update(CheckCodecOption("optimizer option codec", options.codec));
  status.Update(CheckCodecOption("optimizer option variance_codec", options.variance_codec));
  if (!status.ok()) return status;
  if (!IsFraction(options.variance_floor)) {
    return OptionError("variance_floor", options.variance_floor, "[0, 1)");
  }
  const bool has_variance_codec = options.zero_one || options.variance_refresh_interval > 0;
  if (options.variance_codec != FLOAT32 && !has_variance_codec) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer option variance_codec is ", CodecName(options.variance_codec),
                     ", but without variance_refresh_interval nothing travels in it"));
  }
  if (!options.bias_correction && options.VarianceFollows()) {
    return absl::InvalidArgumentError(
        "without bias_correction variance_refresh_interval is a number, or 0: a variance that "
        "follows the gradients (auto) is one that is corrected for its start");
  }
  if (options.variance_refresh_interval == 1) {
    return OptionError("variance_refresh_interval", 1, "at least 2, or 0 for never");
  }
  if (options.as_deepspeed && options.freeze_step == 1) {
    return OptionError("freeze_step", 1,
                       "at least 2: as DeepSpeed, the first step changes nothing");
  }
  if (options.as_deepspeed && (options.bias_correction || options.variance_floor != 0)) {
    return absl::InvalidArgumentError(
        "as DeepSpeed, an optimizer has neither bias_correction nor variance_floor");
  }
  if (options.zero_one) return CheckZeroOne(options);
  return options.lamb ? CheckLambOptions(*options.lamb) : absl::OkStatus();
}

absl::Status CheckRates(const OptimizerOptions& options, absl::Span<const GroupRates> rates) {
  for (size_t g = 0; g < rates.size(); ++g) {
    const GroupRates& group = rates[g];
    const auto error = [g](absl::string_view rate, double got, absl::string_view wanted) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s of parameter group %d is %g, wanted %s", rate, g, got, wanted));
    };
    // They are fp32's numbers where they are applied.
    const auto is_float = [](double rate) { return std::isfinite(static_cast<float>(rate)); };
    if (!is_float(group.learning_rate) || group.learning_rate < 0) {
      return error("learning_rate", group.learning_rate, "a finite number, 0 or more");
    }
    if (!is_float(group.weight_decay) || group.weight_decay < 0) {
      return error("weight_decay", group.weight_decay, "a finite number, 0 or more");
    }
    if (!IsFraction(group.beta1)) return error("beta1", group.beta1, "[0, 1)");
    if (!IsFraction(group.beta2)) return error("beta2", group.beta2, "[0, 1)");
    if (!(static_cast<float>(group.epsilon) >= std::numeric_limits<float>::min() &&
          group.epsilon < 1)) {
      return error("epsilon", group.epsilon, "a number between 1.2e-38 and 1");
    }
    // At the freeze, and in a refresh, what an aggregator has lost changes unit, for all of a
    // chunk.
    const Codec before = options.zero_one ? options.codec : options.warm_up_codec;
    for (const Codec codec : {before, options.variance_codec}) {
      if (!Loses(codec) || group.beta1 == rates[0].beta1) continue;
      return error("beta1", group.beta1,
                   absl::StrFormat("%g as in group 0: with gradients in %s it is the same in all",
                                   rates[0].beta1, CodecName(codec)));
    }
  }
  return absl::OkStatus();
}

std::string DescribeOptions(const OptimizerOptions& options) {
  std::string freeze = absl::StrFormat("%d", options.freeze_step);
  if (options.freeze_step == OptimizerOptions::kNever) freeze = "never";
  if (options.freeze_step == OptimizerOptions::kAuto) freeze = "auto";
  std::string description = absl::StrFormat(
      "%s bias_correction=%d freeze_step=%s warm_up_codec=%s variance_floor=%.17g "
      "variance_refresh_interval=%s",
      NameOf(options), options.bias_correction, freeze, CodecName(options.warm_up_codec),
      options.variance_floor,
      options.variance_refresh_interval == OptimizerOptions::kAuto
          ? "auto"
          : absl::StrCat(options.variance_refresh_interval));
  // Not in checkpoints from before there was a choice; CheckSameJob names what is left out.
  if (options.codec != ONE_BIT) absl::StrAppend(&description, " codec=", CodecName(options.codec));
  if (options.variance_codec != FLOAT32) {
    absl::StrAppend(&description, " variance_codec=", CodecName(options.variance_codec));
  }
  if (options.lamb) absl::StrAppend(&description, " ", DescribeLambOptions(*options.lamb));
  if (options.zero_one) {
    absl::StrAppend(&description, " ", DescribeZeroOneOptions(*options.zero_one));
  }
  if (options.as_deepspeed) absl::StrAppend(&description, " compat=deepspeed");
  return description;
}

uint32_t StateNumbers(const OptimizerOptions& options) {
  return options.lamb ? 4 : 0;  // 0 as in jobs from before there was a choice
}

StepRates MessageOf(absl::Span<const GroupRates> rates, const Schedule& schedule) {
  StepRates message;
  for (const GroupRates& group : rates) {
    Rates& to = *message.add_groups();
    to.set_learning_rate(group.learning_rate);
    to.set_weight_decay(group.weight_decay);
    to.set_beta1(group.beta1);
    to.set_beta2(group.beta2);
    to.set_epsilon(group.epsilon);
  }
  *message.mutable_schedule() = schedule;
  return message;
}

std::vector<GroupRates> RatesOf(const StepRates& message) {
  std::vector<GroupRates> rates;
  for (const Rates& group : message.groups()) {
    rates.push_back({group.learning_rate(), group.weight_decay(), group.beta1(), group.beta2(),
                     group.epsilon()});
  }
  return rates;
}

OneBitAdam::OneBitAdam(const Layout& layout, const OptimizerOptions& options,
                       std::vector<Parameter> parameters, uint32_t threads, kernels::cuda::Gpu* gpu)
    : layout_(layout),
      options_(options),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      parameters_(std::move(parameters)),
      has_error_(layout.chunks().size()),
      scales_(layout.tensors().size()),
      squares_(layout.chunks().size()),
      steps_beyond_(layout.tensors().size()),
      state_(NewState(layout, options, parameters_, threads, gpu)) {
  const bool finds_freeze = options.freeze_step == OptimizerOptions::kAuto || Follows();
  if (!finds_freeze || options.freeze_step == OptimizerOptions::kNever) {
    schedule_.set_freeze_step(options.freeze_step);
  }
  for (uint32_t tensor = 0; tensor < scales_.size(); ++tensor) scales_[tensor].set_tensor(tensor);
}

void OneBitAdam::Restore(OptimizerState state) {
  schedule_ = std::move(state.schedule);
  SetScales(state.scales);
  means_ = Follows() ? Means::kNear : Means::kUnknown;
  const bool is_frozen = schedule_.epsilons_size() > 0 && !state.variance.empty();
  if (!Follows() && is_frozen) SetMeanVariances(state.variance);
  for (std::vector<double>& squares : squares_) squares.clear();
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const size_t first = layout_.chunks()[c].first_element;
    state_->Set(AdamState::Field::kVariance, c, state.variance.data() + first);
  }
  std::vector<float>().swap(state.variance);  // not to have it twice
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    state_->Set(AdamState::Field::kMomentum, c, state.momentum.data() + chunk.first_element);
    const auto error =
        absl::MakeConstSpan(state.error).subspan(chunk.first_element, chunk.elements);
    // Zeros need no memory, where there is none yet.
    has_error_[c] =
        has_error_[c] || absl::c_any_of(error, [](float e) { return e != 0 || std::signbit(e); });
    if (has_error_[c]) state_->Set(AdamState::Field::kError, c, error.data());
  }
}

void OneBitAdam::SetValues(absl::Span<const float> values) {
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const size_t first = layout_.chunks()[c].first_element;
    state_->Set(AdamState::Field::kParameters, c, values.data() + first);
  }
}

Payload OneBitAdam::State(uint32_t chunk) const {
  Payload state(layout_.PayloadBytes(STATE, chunk));
  auto* numbers = reinterpret_cast<float*>(state.data());
  for (const AdamState::Field field : kFieldsOfState) {
    state_->Get(field, chunk, numbers);
    numbers += layout_.chunks()[chunk].elements;
  }
  return state;
}

void OneBitAdam::SetState(uint32_t chunk, absl::Span<const uint8_t> state) {
  const auto* numbers = reinterpret_cast<const float*>(state.data());
  squares_[chunk].clear();
  for (const AdamState::Field field : kFieldsOfState) {
    state_->Set(field, chunk, numbers);
    numbers += layout_.chunks()[chunk].elements;
  }
}

absl::Status OneBitAdam::CheckRates(absl::Span<const GroupRates> rates) const {
  return signpost::CheckRates(options_, rates);
}

uint32_t OneBitAdam::groups() const {
  uint32_t groups = 0;
  for (const Parameter& parameter : parameters_) groups = std::max(groups, parameter.group + 1);
  return groups;
}

OneBitAdam::Stage OneBitAdam::StageOf(uint64_t step) const {
  const uint64_t freeze_step = schedule_.freeze_step();
  if (freeze_step == 0 || step < freeze_step) return Stage::kWarmUp;
  if (Follows()) {
    switch (VariancePlan::KindOf(schedule_, step)) {
      case VariancePlan::Kind::kOneBit:
        return Stage::kOneBit;
      case VariancePlan::Kind::kSettle:
        return Stage::kSettle;
      case VariancePlan::Kind::kRefresh:
        return Stage::kRefresh;
    }
  }
  const uint64_t interval = options_.variance_refresh_interval;
  const bool refreshes = interval > 0 && step > freeze_step && (step - freeze_step) % interval == 0;
  return refreshes ? Stage::kRefresh : Stage::kOneBit;
}

bool OneBitAdam::FreezesBefore(uint64_t step) const {
  return step > 0 && (step == schedule_.freeze_step() || StageOf(step - 1) == Stage::kRefresh);
}

void OneBitAdam::SetStage(uint64_t step) {
  step_ = step;
  error_scale_ = 1;
  stage_ = StageOf(step);
}

Codec OneBitAdam::codec() const {
  switch (stage_) {
    case Stage::kOneBit:
      return options_.codec;
    case Stage::kSettle:
    case Stage::kRefresh:
      return options_.variance_codec;
    case Stage::kWarmUp:
      break;
  }
  return options_.warm_up_codec;
}

void OneBitAdam::BeginStep(uint64_t step, absl::Span<const GroupRates> rates) {
  rates_.assign(rates.begin(), rates.end());
  const bool is_new = schedule_.begun_steps() == step;
  if (is_new && schedule_.freeze_step() == 0) LookAtVariance(step);
  SetStage(step);
  FreezeIfDue(step);
  // The plan asks for the variances that have just been frozen.
  if (is_new) PlanRefreshes(step);
  stage_ = StageOf(step);
  FindFirstGradients();
  if (is_new) Count(step);
}

void OneBitAdam::FreezeIfDue(uint64_t step) {
  if (!FreezesBefore(step)) return;
  FreezeVariance(/*is_first=*/step == schedule_.freeze_step());
  frozen_for_ = step;
}

void OneBitAdam::FollowStep(uint64_t step, const StepRates& rates) {
  SetRates(signpost::RatesOf(rates));
  schedule_ = rates.schedule();
  SetScales(rates.scales());
  SetStage(step);
}

void OneBitAdam::Count(uint64_t step) {
  schedule_.set_begun_steps(step + 1);
  if (schedule_.freeze_step() != 0) return;
  const int groups_before = schedule_.learning_rates_size();
  for (int g = 0; g < groups_before && g < static_cast<int>(rates_.size()); ++g) {
    if (rates_[g].learning_rate > schedule_.learning_rates(g)) schedule_.set_risen_step(step);
  }
  schedule_.clear_learning_rates();
  for (uint32_t g = 0; g < groups(); ++g) schedule_.add_learning_rates(rates_[g].learning_rate);
}

void OneBitAdam::LookAtVariance(uint64_t step) {
  const bool is_auto = options_.freeze_step == OptimizerOptions::kAuto;
  const uint64_t interval = LookInterval(rates_[0].beta2);
  // Where the freeze step is given one of the looks is there.
  const uint64_t first = is_auto ? 2 * interval : options_.freeze_step;
  if (step == 0 || step % interval != first % interval) return;
  double sum = 0, corrected = 0;
  const std::vector<double> sums = SumsOfVariance();
  for (uint32_t tensor = 0; tensor < sums.size(); ++tensor) {
    sum += sums[tensor];
    const uint64_t steps = step - FirstStep(tensor);
    if (steps > 0) corrected += sums[tensor] / (1 - Power(rates_[0].beta2, steps));
  }
  const double before = schedule_.variance_sum();
  schedule_.set_variance_sum(sum);
  const auto memory = static_cast<uint64_t>(std::llround(1 / (1 - rates_[0].beta1)));
  const bool rose = schedule_.risen_step() > 0 && schedule_.risen_step() + memory > step;
  // Tensors that have joined late want as many steps.
  if (step < YoungestStep() + first || (is_auto && rose)) return;
  if (!VarianceFits(sum, before, corrected, rates_[0].beta2, std::min(step, interval))) return;
  schedule_.set_freeze_step(step);
  if (Follows()) VariancePlan(schedule_).Freeze(step, YoungestStep());
}

void OneBitAdam::PlanRefreshes(uint64_t step) {
  if (schedule_.freeze_step() == 0 || step <= schedule_.freeze_step()) return;
  const Stage last = StageOf(step - 1);
  const bool fits = last != Stage::kOneBit || CheckMomentum(/*steps=*/1);
  if (!Follows()) return;
  VariancePlan plan(schedule_);
  uint64_t youngest = 0;
  for (const TensorScale& scale : scales_) {
    if (!(scale.mean_variance() > 0)) continue;
    youngest = std::max(youngest, scale.first_step());
    const bool is_new = last == Stage::kRefresh && scale.first_step() >= schedule_.refresh_step();
    if (is_new) plan.Extend(scale.first_step());
  }
  plan.BeginStep(step, fits, youngest);
}

bool OneBitAdam::CheckMomentum(uint64_t steps) {
  if (options_.codec != ONE_BIT || means_ == Means::kUnknown) return true;
  std::vector<double> squares(scales_.size());
  for (uint32_t c = 0; c < squares_.size(); ++c) {
    if (squares_[c].empty()) SetSquares(c);
    for (size_t s = 0; s < squares_[c].size(); ++s) {
      squares[layout_.chunks()[c].segments[s].tensor] += squares_[c][s];
    }
  }
  SumOverShards(absl::MakeSpan(squares));
  bool fits = true;
  for (uint32_t tensor = 0; tensor < squares.size(); ++tensor) {
    const double momentum = squares[tensor] / WholeElements(tensor);
    uint64_t& steps_beyond = steps_beyond_[tensor];
    // Beside epsilon it moves nothing.
    if (momentum <= std::pow(kLeastMomentum * RatesOfTensor(tensor).epsilon, 2)) {
      steps_beyond = 0;
      continue;
    }
    const double variance = scales_[tensor].mean_variance();
    fits = fits && momentum <= std::pow(VariancePlan::kMostMomentum, 2) * variance;
    const bool is_beyond = momentum > kFarBeyond * kFarBeyond * variance;
    steps_beyond = is_beyond ? steps_beyond + steps : 0;
    const bool has_diverged = steps_beyond >= kMostStepsBeyond && options_.bias_correction;
    if (has_diverged && diverged_.ok()) SetDiverged(tensor);
  }
  return fits;
}

void OneBitAdam::SetDiverged(uint32_t tensor) {
  const std::string name = DescribeTensor(layout_.tensors()[tensor]);
  const uint64_t step = StepsBefore(schedule_.begun_steps());
  if (scales_[tensor].mean_variance() > 0) {
    diverged_ = absl::OutOfRangeError(absl::StrFormat(
        "the training has diverged at step %d: for %d steps the momentum of tensor %s has been "
        "over %g times the gradients of its frozen variance. Take a lower learning rate, or clip "
        "gradients%s",
        step, kMostStepsBeyond, name, kFarBeyond,
        Follows() ? ""
                  : "; or use 1-bit Adam with variance_refresh_interval auto, whose variance "
                    "follows"));
    return;
  }
  diverged_ = absl::OutOfRangeError(absl::StrFormat(
      "tensor %s had no gradient before its variance was frozen at step %d, has had some for %d "
      "steps up to step %d, and cannot move. Freeze it later, or use 1-bit Adam with "
      "variance_refresh_interval auto, whose variance follows",
      name, schedule_.freeze_step(), kMostStepsBeyond, step));
}

void OneBitAdam::SetMeanVariances(absl::Span<const float> inverse_denominators) {
  means_ = Means::kNear;
  size_t first = 0;
  std::vector<double> sums(scales_.size());
  for (uint32_t tensor = 0; tensor < sums.size(); ++tensor) {
    const size_t elements = parameters_[tensor].values.size();
    const float epsilon = FrozenEpsilon(tensor);
    for (const float d : inverse_denominators.subspan(first, elements)) {
      if (d > 0) sums[tensor] += std::pow(1.0 / d - epsilon, 2);
    }
    first += elements;
  }
  SumOverShards(absl::MakeSpan(sums));
  for (uint32_t tensor = 0; tensor < sums.size(); ++tensor) {
    scales_[tensor].set_mean_variance(sums[tensor] / WholeElements(tensor));
  }
}

std::vector<double> OneBitAdam::SumsOfVariance() {
  std::vector<double> sums;
  for (uint32_t tensor = 0; tensor < parameters_.size(); ++tensor) {
    sums.push_back(state_->SumOfVariance(tensor));
  }
  SumOverShards(absl::MakeSpan(sums));
  return sums;
}

void OneBitAdam::SumOverShards(absl::Span<double> numbers) {
  if (sum_over_shards_ != nullptr && sum_failed_.ok()) sum_failed_ = sum_over_shards_(numbers);
}

void OneBitAdam::NoteMomentum(uint32_t chunk, const Payload& answer) {
  const Chunk& at = layout_.chunks()[chunk];
  squares_[chunk].clear();
  if (codec() != ONE_BIT) return;
  for (const Segment& segment : at.segments) {
    const float* scale = OneBitPart(at, segment, answer.data()).scales;
    double& sum = squares_[chunk].emplace_back();
    ForEachBlock(segment, rule_.block_elements,
                 [&](const Segment& block) { sum += SumOfSquares(*scale++, block.elements); });
  }
}

void OneBitAdam::SetSquares(uint32_t chunk) {
  const PageVector<float> momentum = Momentum(chunk);
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    double& sum = squares_[chunk].emplace_back();
    ForEachBlock(segment, rule_.block_elements, [&](const Segment& block) {
      sum += SumOfSquares({momentum.data() + block.chunk_offset, block.elements});
    });
  }
}

uint64_t OneBitAdam::YoungestStep() const {
  uint64_t youngest = 0;
  for (const TensorScale& scale : scales_) youngest = std::max(youngest, scale.first_step());
  return youngest;
}

void OneBitAdam::FindFirstGradients() {
  if (!Follows() || stage_ != Stage::kRefresh) return;
  for (TensorScale& scale : scales_) {
    if (scale.mean_variance() == 0) scale.set_first_step(step_);
  }
}

float OneBitAdam::MostUpdate() const {
  return options_.bias_correction ? kMostUpdate : std::numeric_limits<float>::infinity();
}

float OneBitAdam::MostInverseDenominator(uint32_t tensor) const {
  const float floor = FloorOf(scales_[tensor].mean_variance());
  if (means_ != Means::kExact || !(floor > 0)) return std::numeric_limits<float>::infinity();
  return 1 / (std::sqrt(floor) + FrozenEpsilon(tensor));
}

kernels::UpdateRates OneBitAdam::UpdateRatesOf(uint32_t tensor, double learning_rate,
                                               double weight_decay) const {
  return {.learning_rate = static_cast<float>(learning_rate),
          .weight_decay = static_cast<float>(weight_decay),
          .most_update = MostUpdate(),
          .most_inverse_denominator = MostInverseDenominator(tensor)};
}

void OneBitAdam::FreezeVariance(bool is_first) {
  means_ = Means::kExact;
  const std::vector<double> sums = SumsOfVariance();
  std::vector<kernels::FreezeRates> by_tensor;
  for (uint32_t tensor = 0; tensor < parameters_.size(); ++tensor) {
    const Parameter& parameter = parameters_[tensor];
    kernels::FreezeRates& rates = by_tensor.emplace_back();
    const GroupRates& group = rates_[parameter.group];
    const uint64_t first_step = FirstStep(tensor);
    const bool corrects = is_first && options_.bias_correction && step_ > first_step;
    const double momentum_correction =
        corrects ? 1 / (1 - Power(group.beta1, step_ - first_step)) : 1;
    const double variance_correction =
        corrects ? 1 / (1 - Power(group.beta2, StepsOfVariance() - first_step)) : 1;
    rates.momentum_correction = static_cast<float>(momentum_correction);
    rates.variance_correction = static_cast<float>(variance_correction);
    rates.epsilon = static_cast<float>(group.epsilon);
    const double mean = sums[tensor] / parameter.WholeElements() * variance_correction;
    rates.floor = FloorOf(mean);
    scales_[tensor].set_mean_variance(mean);
    rates.lifts_zeros = LiftsZeros();
  }
  schedule_.clear_epsilons();
  for (uint32_t g = 0; g < groups(); ++g) schedule_.add_epsilons(rates_[g].epsilon);
  if (is_first) error_scale_ = ErrorScaleOf(rates_[0]);
  BeforeFreeze([&](uint32_t tensor) { return by_tensor[tensor]; });
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    state_->Freeze(c, [&](uint32_t tensor) { return by_tensor[tensor]; });
    // Errors were in units of the gradient, and are in units of the momentum from here on.
    if (!is_first || !has_error_[c]) continue;
    state_->Scale(AdamState::Field::kError, c,
                  [&](uint32_t tensor) { return ErrorScaleOf(RatesOfTensor(tensor)); });
  }
}

std::optional<uint32_t> OneBitAdam::Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                             uint8_t* payload, Later later) {
  if (Loses(codec())) has_error_[chunk] = true;
  if (stage_ == Stage::kRefresh) {
    return state_->CompressApart(
        chunk, codec(), [this](uint32_t tensor) { return LossUnitOf(RatesOfTensor(tensor)); },
        gradients, payload, std::move(later));
  }
  if (stage_ == Stage::kSettle) state_->MakeMomentumDense(chunk);
  if (IsOfMomentum(stage_)) {
    return state_->CompressMomentum(
        chunk, codec(), [this](uint32_t tensor) { return MomentumRatesOf(RatesOfTensor(tensor)); },
        gradients, payload, std::move(later));
  }
  // Where there is no error, the codec loses nothing.
  return state_->CompressGradient(chunk, codec(), has_error_[chunk], gradients, payload,
                                  std::move(later));
}

float OneBitAdam::LossUnitOf(const GroupRates& rates) const {
  return MomentumRatesOf(rates).one_minus_beta1;
}

float OneBitAdam::loss_unit() const {
  return stage_ == Stage::kRefresh ? LossUnitOf(rates_[0]) : 0;
}

float OneBitAdam::ErrorScaleOf(const GroupRates& rates) const {
  return MomentumRatesOf(rates).one_minus_beta1;
}

void OneBitAdam::Apply(uint32_t chunk, Answer answer) {
  if (options_.as_deepspeed && step_ == 0) return;
  squares_[chunk].clear();
  switch (stage_) {
    case Stage::kWarmUp:
      return ApplyGradient(chunk, std::move(answer.payload));
    case Stage::kOneBit:
      NoteMomentum(chunk, answer.payload);
      return ApplyMomentum(chunk, std::move(answer.payload));
    case Stage::kSettle:
      state_->MakeMomentumDense(chunk);  // where this worker did not compress it
      return ApplyMomentum(chunk, std::move(answer.payload));
    case Stage::kRefresh:
      state_->MakeMomentumDense(chunk);
      return state_->RefreshStep(
          chunk, codec(), [this](uint32_t tensor) { return RefreshRatesOf(tensor); },
          std::move(answer.payload));
  }
}

void OneBitAdam::ApplyGradient(uint32_t chunk, Payload answer) {
  state_->AdamStep(
      chunk, codec(), [this](uint32_t tensor) { return AdamRatesOf(tensor); }, std::move(answer));
}

void OneBitAdam::ApplyMomentum(uint32_t chunk, Payload answer) {
  state_->ApplyMomentum(
      chunk, codec(),
      [this](uint32_t tensor) {
        const GroupRates& rates = RatesOfTensor(tensor);
        return UpdateRatesOf(tensor, rates.learning_rate, rates.weight_decay);
      },
      std::move(answer));
}

double OneBitAdam::Correction(double beta, uint64_t steps) const {
  return options_.bias_correction ? 1 - Power(beta, steps) : 1;
}

kernels::AdamRates OneBitAdam::AdamRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  const uint64_t steps = step_ + 1 - FirstStep(tensor);
  return {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .beta2 = static_cast<float>(group.beta2),
      .one_minus_beta2 = static_cast<float>(1 - group.beta2),
      .step_size = static_cast<float>(group.learning_rate / Correction(group.beta1, steps)),
      .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(Correction(group.beta2, steps))),
      .epsilon = static_cast<float>(group.epsilon),
      .decay = static_cast<float>(group.learning_rate * group.weight_decay),
  };
}

kernels::RefreshRates OneBitAdam::RefreshRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  const RefreshWeights weights = RefreshWeightsOf(tensor);
  const double learning_rate = group.learning_rate * ScaleOf(tensor);
  const uint64_t first_step = FirstStep(tensor);
  const bool is_still = first_step > 0 && step_ < first_step + VariancePlan::kStillSteps;
  return {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .kept_variance = static_cast<float>(weights.kept),
      .one_minus_kept_variance = static_cast<float>(weights.added),
      .learning_rate = is_still ? 0 : static_cast<float>(learning_rate),
      .epsilon = FrozenEpsilon(tensor),
      .decay = static_cast<float>(learning_rate * group.weight_decay),
      .most_update = MostUpdate(),
  };
}

RefreshWeights OneBitAdam::RefreshWeightsOf(uint32_t tensor) const {
  const double beta2 = RatesOfTensor(tensor).beta2;
  if (Follows()) {
    const uint64_t first_step = FirstStep(tensor);
    return WeightsOfRefresh(beta2, VariancePlan::StepsBefore(schedule_, step_, first_step),
                            VariancePlan::StepsOf(schedule_, step_, first_step));
  }
  const uint64_t interval = options_.variance_refresh_interval;
  const uint64_t before = step_ - interval;
  if (options_.bias_correction) {
    return WeightsOfRefresh(beta2, before - std::min(before, FirstStep(tensor)), interval);
  }
  const double kept = Power(beta2, interval);
  return {kept, 1 - kept};
}

float OneBitAdam::FrozenEpsilon(uint32_t tensor) const {
  const uint32_t group = parameters_[tensor].group;
  if (group < static_cast<uint32_t>(schedule_.epsilons_size())) {
    return static_cast<float>(schedule_.epsilons(group));
  }
  // A schedule that came from outside may lack it, also before the first step.
  return static_cast<float>(group < rates_.size() ? rates_[group].epsilon : GroupRates().epsilon);
}

std::vector<float> OneBitAdam::FrozenEpsilons() const {
  std::vector<float> epsilons;
  // In a local step of 0/1 Adam the step that begun_steps counts has begun, and is not over.
  const uint64_t begun = schedule_.begun_steps() + (schedule_.local_steps() > 0 ? 1 : 0);
  if (begun == 0 || !IsOfMomentum(StageOf(begun - 1))) return epsilons;
  for (uint32_t tensor = 0; tensor < parameters_.size(); ++tensor) {
    epsilons.push_back(FrozenEpsilon(tensor));
  }
  return epsilons;
}

void OneBitAdam::ThawChunk(uint32_t chunk) {
  state_->MakeMomentumDense(chunk);
  state_->Thaw(chunk, [this](uint32_t tensor) { return FrozenEpsilon(tensor); });
}

void OneBitAdam::TakeBack(uint32_t chunk, const uint8_t* payload) {
  const bool has_share = IsOfMomentum(stage_);
  if (payload != nullptr) {
    PutBack(chunk, payload, has_share ? MomentumShare::kStays : MomentumShare::kNone);
  }
  if (stage_ == Stage::kRefresh) ThawChunk(chunk);
}

void OneBitAdam::KeepInput(uint32_t chunk, const uint8_t* payload) {
  const bool has_share = IsOfMomentum(stage_);
  PutBack(chunk, payload, has_share ? MomentumShare::kGoesBack : MomentumShare::kNone);
}

void OneBitAdam::PutBack(uint32_t chunk_index, const uint8_t* payload, MomentumShare share) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  has_error_[chunk_index] = true;
  std::vector<Addition> of_payload, of_momentum;
  const NumberCodec& number_codec = NumberCodecOf(codec(), layout_);
  ForEachBlock(chunk, rule_.block_elements, [&](const Segment& block) {
    const GroupRates& group = RatesOfTensor(block.tensor);
    const kernels::MomentumRates rates = MomentumRatesOf(group);
    const bool is_packed = number_codec.IsPacked(chunk, block, payload);
    // After the freeze errors are in units of the momentum.
    const float unit = stage_ == Stage::kRefresh ? LossUnitOf(group) : 1;
    if (is_packed) of_payload.push_back({block, unit});
    // What was packed has a share of the momentum, which must not be in the error while the
    // momentum stays where it is; and must be, in any case, when it goes.
    if (is_packed && share == MomentumShare::kStays) {
      of_momentum.push_back({block, -rates.beta1});
    } else if (!is_packed && share == MomentumShare::kGoesBack) {
      of_momentum.push_back({block, rates.beta1});
    }
  });
  state_->AddToError(chunk_index, codec(), payload, of_payload, of_momentum);
}

TensorScales OneBitAdam::ScalesOf(uint32_t chunk) const {
  TensorScales scales;
  if (!HasScales()) return scales;
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    *scales.Add() = scales_[segment.tensor];
  }
  return scales;
}

TensorScales OneBitAdam::Scales() const {
  return HasScales() ? TensorScales{scales_.begin(), scales_.end()} : TensorScales();
}

void OneBitAdam::SetScales(const TensorScales& scales) {
  const auto is_late = [](const TensorScale& scale) { return scale.first_step() > 0; };
  has_late_tensors_ = has_late_tensors_ || absl::c_any_of(scales, is_late);
  if (!HasScales()) return;
  means_ = Follows() ? Means::kNear : Means::kUnknown;
  for (const TensorScale& scale : scales) {
    if (scale.tensor() < scales_.size()) scales_[scale.tensor()] = scale;
  }
}

PageVector<float> OneBitAdam::Momentum(uint32_t chunk) const {
  PageVector<float> momentum(layout_.chunks()[chunk].elements);
  state_->Get(AdamState::Field::kMomentum, chunk, momentum.data());
  return momentum;
}

}  // namespace signpost
