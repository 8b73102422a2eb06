#include "worker/onebit_adam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "kernels/adam.h"
#include "kernels/dense.h"
#include "kernels/sum.h"

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

// base^exponent by multiplications alone, which are the same on every machine.
double Power(double base, uint64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) power *= base;
  }
  return power;
}

// How far two looks at the variance may be apart: 1-bit Adam, section 7.1.
constexpr double kSettled = 0.96;

}  // namespace

absl::Status CheckOptions(const OptimizerOptions& options) {
  if (options.freeze_step == 0) {
    return OptionError("freeze_step", 0, "at least 1: the warm-up estimates the variance");
  }
  if (options.warm_up_codec != FLOAT32 && options.warm_up_codec != BFLOAT16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("optimizer option warm_up_codec is %s, wanted fp32 or bf16",
                        CodecName(options.warm_up_codec)));
  }
  if (!IsFraction(options.variance_floor)) {
    return OptionError("variance_floor", options.variance_floor, "[0, 1)");
  }
  if (options.variance_refresh_interval == 1) {
    return OptionError("variance_refresh_interval", 1, "at least 2, or 0 for never");
  }
  return absl::OkStatus();
}

absl::Status CheckRates(const OptimizerOptions& options, absl::Span<const GroupRates> rates) {
  for (size_t g = 0; g < rates.size(); ++g) {
    const GroupRates& group = rates[g];
    const auto error = [g](absl::string_view rate, double got, absl::string_view wanted) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s of parameter group %d is %g, wanted %s", rate, g, got, wanted));
    };
    if (!std::isfinite(group.learning_rate)) {
      return error("learning_rate", group.learning_rate, "a finite number");
    }
    if (!std::isfinite(group.weight_decay)) {
      return error("weight_decay", group.weight_decay, "a finite number");
    }
    if (!IsFraction(group.beta1)) return error("beta1", group.beta1, "[0, 1)");
    if (!IsFraction(group.beta2)) return error("beta2", group.beta2, "[0, 1)");
    if (!(static_cast<float>(group.epsilon) >= std::numeric_limits<float>::min() &&
          group.epsilon < 1)) {
      return error("epsilon", group.epsilon, "a number between 1.2e-38 and 1");
    }
    // At the freeze an aggregator's errors change unit, for all of a chunk.
    if (options.warm_up_codec != FLOAT32 && group.beta1 != rates[0].beta1) {
      return error("beta1", group.beta1,
                   absl::StrFormat("%g as in group 0: with a bf16 warm-up it is the same in all",
                                   rates[0].beta1));
    }
  }
  return absl::OkStatus();
}

std::string DescribeOptions(const OptimizerOptions& options) {
  std::string freeze = absl::StrFormat("%d", options.freeze_step);
  if (options.freeze_step == OptimizerOptions::kNever) freeze = "never";
  if (options.freeze_step == OptimizerOptions::kAuto) freeze = "auto";
  return absl::StrFormat(
      "1-bit adam bias_correction=%d freeze_step=%s warm_up_codec=%s variance_floor=%.17g "
      "variance_refresh_interval=%d",
      options.bias_correction, freeze, CodecName(options.warm_up_codec), options.variance_floor,
      options.variance_refresh_interval);
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
                       std::vector<Parameter> parameters, uint32_t threads)
    : layout_(layout),
      options_(options),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      parameters_(std::move(parameters)),
      error_(layout.elements()),
      variance_(layout.elements()),
      has_error_(layout.chunks().size()),
      signed_momentum_(layout.chunks().size()),
      crew_(layout, threads) {
  for (const Chunk& chunk : layout.chunks()) dense_momentum_.emplace_back(chunk.elements);
  if (options.freeze_step != OptimizerOptions::kAuto) {
    schedule_.set_freeze_step(options.freeze_step);
  }
}

void OneBitAdam::Restore(OptimizerState state) {
  schedule_ = std::move(state.schedule);
  std::copy(state.variance.begin(), state.variance.end(), variance_.begin());
  std::vector<float>().swap(state.variance);  // not to have it twice
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    const float* momentum = state.momentum.data() + chunk.first_element;
    dense_momentum_[c].assign(momentum, momentum + chunk.elements);
    signed_momentum_[c] = Payload();
    const auto error =
        absl::MakeConstSpan(state.error).subspan(chunk.first_element, chunk.elements);
    // Zeros need no memory, where there is none yet.
    has_error_[c] =
        has_error_[c] || absl::c_any_of(error, [](float e) { return e != 0 || std::signbit(e); });
    if (has_error_[c]) std::copy(error.begin(), error.end(), error_.data() + chunk.first_element);
  }
}

Payload OneBitAdam::State(uint32_t chunk_index) const {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  Payload state(layout_.PayloadBytes(STATE, chunk_index));
  auto* parameters = reinterpret_cast<float*>(state.data());
  for (const Segment& segment : chunk.segments) {
    const float* values = parameters_[segment.tensor].values.data() + segment.tensor_offset;
    std::copy_n(values, segment.elements, parameters + segment.chunk_offset);
  }
  const PageVector<float> momentum = Momentum(chunk_index);
  float* const after = std::copy(momentum.begin(), momentum.end(), parameters + chunk.elements);
  std::copy_n(variance_.data() + chunk.first_element, chunk.elements, after);
  return state;
}

void OneBitAdam::SetState(uint32_t chunk_index, absl::Span<const uint8_t> state) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const auto* parameters = reinterpret_cast<const float*>(state.data());
  for (const Segment& segment : chunk.segments) {
    std::copy_n(parameters + segment.chunk_offset, segment.elements,
                parameters_[segment.tensor].values.data() + segment.tensor_offset);
  }
  const float* momentum = parameters + chunk.elements;
  dense_momentum_[chunk_index].assign(momentum, momentum + chunk.elements);
  signed_momentum_[chunk_index] = Payload();
  std::copy_n(momentum + chunk.elements, chunk.elements, variance_.data() + chunk.first_element);
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
      return ONE_BIT;
    case Stage::kRefresh:
      return PLAIN_FLOAT32;
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
  if (FreezesBefore(step)) {
    FreezeVariance(/*is_first=*/step == schedule_.freeze_step());
    frozen_for_ = step;
  }
  if (is_new) Count(step);
}

void OneBitAdam::FollowStep(uint64_t step, const StepRates& rates) {
  rates_ = RatesOf(rates);
  schedule_ = rates.schedule();
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
  const auto interval = static_cast<uint64_t>(std::lround(1 / (1 - rates_[0].beta2)));
  if (step == 0 || step % interval != 0) return;
  const double correction = options_.bias_correction ? 1 / (1 - Power(rates_[0].beta2, step)) : 1;
  const double norm = kernels::Sum(variance_) * correction;
  const double before = schedule_.variance_norm();
  schedule_.set_variance_norm(norm);
  const bool is_steady = before > 0 && norm >= kSettled * before && kSettled * norm <= before;
  if (is_steady && schedule_.risen_step() + interval <= step) schedule_.set_freeze_step(step);
}

void OneBitAdam::FreezeVariance(bool is_first) {
  std::vector<kernels::FreezeRates> by_tensor;
  size_t first = 0;
  for (const Parameter& parameter : parameters_) {
    kernels::FreezeRates& rates = by_tensor.emplace_back();
    const bool corrects = is_first && options_.bias_correction;
    const GroupRates& group = rates_[parameter.group];
    const double momentum_correction = corrects ? 1 / (1 - Power(group.beta1, step_)) : 1;
    const double variance_correction = corrects ? 1 / (1 - Power(group.beta2, step_)) : 1;
    rates.momentum_correction = static_cast<float>(momentum_correction);
    rates.variance_correction = static_cast<float>(variance_correction);
    rates.epsilon = static_cast<float>(group.epsilon);
    const size_t elements = parameter.values.size();
    const double mean = kernels::Sum(absl::MakeSpan(variance_).subspan(first, elements)) / elements;
    rates.floor = static_cast<float>(options_.variance_floor * mean * variance_correction);
    first += elements;
  }
  schedule_.clear_epsilons();
  for (uint32_t g = 0; g < groups(); ++g) schedule_.add_epsilons(rates_[g].epsilon);
  if (is_first) error_scale_ = MomentumRatesOf(rates_[0]).one_minus_beta1;
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    for (const Segment& segment : chunk.segments) {
      kernels::Freeze(
          by_tensor[segment.tensor],
          absl::MakeSpan(dense_momentum_[c]).subspan(segment.chunk_offset, segment.elements),
          SegmentOf(variance_, chunk, segment));
      // Errors were in units of the gradient, and are in units of the momentum from here on.
      if (!is_first || !has_error_[c]) continue;
      kernels::Scale(MomentumRatesOf(RatesOfTensor(segment.tensor)).one_minus_beta1,
                     SegmentOf(error_, chunk, segment));
    }
  }
}

uint32_t OneBitAdam::Compress(uint32_t chunk, absl::Span<const absl::Span<const float>> gradients,
                              uint8_t* payload) {
  if (codec() != FLOAT32 && stage_ != Stage::kRefresh) has_error_[chunk] = true;
  return crew_.Compress(chunk, [&](const Segment& part) {
    return CompressPart(chunk, part,
                        gradients[part.tensor].subspan(part.tensor_offset, part.elements), payload);
  });
}

size_t OneBitAdam::CompressPart(uint32_t chunk_index, const Segment& part,
                                absl::Span<const float> gradient, uint8_t* payload) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const bool adds_error = has_error_[chunk_index] && stage_ != Stage::kRefresh;
  // Where there is none, the codec loses nothing.
  const absl::Span<float> error = adds_error ? SegmentOf(error_, chunk, part) : absl::Span<float>();
  if (stage_ != Stage::kOneBit) {
    const kernels::DenseType type = DenseTypeOf(codec());
    return kernels::CompressDense(rule_, type, gradient, error,
                                  payload + kernels::DenseBytes(type, part.chunk_offset));
  }
  const kernels::MomentumRates rates = MomentumRatesOf(RatesOfTensor(part.tensor));
  const kernels::OneBitSpan out = OneBitPart(chunk, part, payload);
  const Payload& momentum = signed_momentum_[chunk_index];
  if (momentum.size() == 0) {
    return kernels::CompressMomentum(rule_, rates, gradient,
                                     dense_momentum_[chunk_index].data() + part.chunk_offset, error,
                                     out);
  }
  return kernels::CompressMomentum(rule_, rates, gradient, OneBitPart(chunk, part, momentum.data()),
                                   error, out);
}

void OneBitAdam::Apply(uint32_t chunk_index, Answer answer) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  if (stage_ == Stage::kRefresh) MakeMomentumDense(chunk_index);
  crew_.ForEachPart(chunk_index, [&](const Segment& part) {
    switch (stage_) {
      case Stage::kWarmUp:
        return ApplyDense(chunk_index, part, answer.payload.data());
      case Stage::kOneBit:
        return ApplyOneBit(chunk, part, answer.payload.data());
      case Stage::kRefresh:
        return ApplyRefresh(chunk_index, part, answer.payload.data());
    }
  });
  if (stage_ != Stage::kOneBit) return;
  signed_momentum_[chunk_index] = std::move(answer.payload);
  dense_momentum_[chunk_index] = PageVector<float>();  // {} would keep its memory
}

void OneBitAdam::ApplyOneBit(const Chunk& chunk, const Segment& segment, const uint8_t* payload) {
  const Parameter& parameter = parameters_[segment.tensor];
  const GroupRates& rates = rates_[parameter.group];
  kernels::ApplyMomentum(
      rule_, OneBitPart(chunk, segment, payload), static_cast<float>(rates.learning_rate),
      static_cast<float>(rates.weight_decay), SegmentOf(variance_, chunk, segment),
      parameter.values.subspan(segment.tensor_offset, segment.elements));
}

void OneBitAdam::ApplyDense(uint32_t chunk_index, const Segment& segment, const uint8_t* payload) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const Parameter& parameter = parameters_[segment.tensor];
  const GroupRates& group = rates_[parameter.group];
  const double correction1 = options_.bias_correction ? 1 - Power(group.beta1, step_ + 1) : 1;
  const double correction2 = options_.bias_correction ? 1 - Power(group.beta2, step_ + 1) : 1;
  const kernels::AdamRates rates = {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .beta2 = static_cast<float>(group.beta2),
      .one_minus_beta2 = static_cast<float>(1 - group.beta2),
      .step_size = static_cast<float>(group.learning_rate / correction1),
      .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2)),
      .epsilon = static_cast<float>(group.epsilon),
      .decay = static_cast<float>(group.learning_rate * group.weight_decay),
  };
  const kernels::DenseType type = DenseTypeOf(codec());
  kernels::AdamStep(
      rates, type, payload + kernels::DenseBytes(type, segment.chunk_offset),
      absl::MakeSpan(dense_momentum_[chunk_index]).subspan(segment.chunk_offset, segment.elements),
      SegmentOf(variance_, chunk, segment),
      parameter.values.subspan(segment.tensor_offset, segment.elements));
}

void OneBitAdam::ApplyRefresh(uint32_t chunk_index, const Segment& segment,
                              const uint8_t* payload) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const Parameter& parameter = parameters_[segment.tensor];
  const GroupRates& group = rates_[parameter.group];
  const double kept_variance = Power(group.beta2, options_.variance_refresh_interval);
  const kernels::RefreshRates rates = {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .kept_variance = static_cast<float>(kept_variance),
      .one_minus_kept_variance = static_cast<float>(1 - kept_variance),
      .learning_rate = static_cast<float>(group.learning_rate),
      .epsilon = FrozenEpsilon(parameter.group),
      .decay = static_cast<float>(group.learning_rate * group.weight_decay),
  };
  kernels::RefreshStep(
      rates, payload + kernels::DenseBytes(kernels::DenseType::kFloat32, segment.chunk_offset),
      absl::MakeSpan(dense_momentum_[chunk_index]).subspan(segment.chunk_offset, segment.elements),
      SegmentOf(variance_, chunk, segment),
      parameter.values.subspan(segment.tensor_offset, segment.elements));
}

float OneBitAdam::FrozenEpsilon(uint32_t group) const {
  // A schedule that came from outside may lack it.
  const bool is_known = group < static_cast<uint32_t>(schedule_.epsilons_size());
  return static_cast<float>(is_known ? schedule_.epsilons(group) : rates_[group].epsilon);
}

void OneBitAdam::ThawChunk(uint32_t chunk_index) {
  MakeMomentumDense(chunk_index);
  const Chunk& chunk = layout_.chunks()[chunk_index];
  for (const Segment& segment : chunk.segments) {
    kernels::Thaw(FrozenEpsilon(parameters_[segment.tensor].group),
                  SegmentOf(variance_, chunk, segment));
  }
}

void OneBitAdam::MakeMomentumDense(uint32_t chunk) {
  dense_momentum_[chunk] = Momentum(chunk);
  signed_momentum_[chunk] = Payload();
}

void OneBitAdam::TakeBack(uint32_t chunk, const uint8_t* payload) {
  if (payload != nullptr) PutBack(chunk, payload, MomentumShare::kStays);
  if (stage_ == Stage::kRefresh) ThawChunk(chunk);
}

void OneBitAdam::KeepInput(uint32_t chunk, const uint8_t* payload) {
  PutBack(chunk, payload, MomentumShare::kGoesBack);
}

void OneBitAdam::PutBack(uint32_t chunk_index, const uint8_t* payload, MomentumShare share) {
  has_error_[chunk_index] = true;
  ForEachBlock(layout_.chunks()[chunk_index], rule_.block_elements,
               [&](const Segment& block) { PutBack(chunk_index, block, payload, share); });
}

void OneBitAdam::PutBack(uint32_t chunk_index, const Segment& block, const uint8_t* payload,
                         MomentumShare share) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const absl::Span<float> error = SegmentOf(error_, chunk, block);
  const kernels::MomentumRates rates = MomentumRatesOf(RatesOfTensor(block.tensor));
  const bool is_packed = IsPacked(codec(), chunk, block, payload);
  if (stage_ != Stage::kOneBit) {
    if (!is_packed) return;
    // After the freeze errors are in units of the momentum.
    const float unit = stage_ == Stage::kRefresh ? rates.one_minus_beta1 : 1;
    const kernels::DenseType type = DenseTypeOf(codec());
    kernels::AddDense(type, payload + kernels::DenseBytes(type, block.chunk_offset), unit, error);
    return;
  }
  if (is_packed) kernels::AddOneBit(rule_, OneBitPart(chunk, block, payload), 1, error);
  // What was packed has a share of the momentum, which must not be in the error while the momentum
  // stays where it is; and must be, in any case, when it goes.
  if (is_packed && share == MomentumShare::kStays) {
    AddMomentum(chunk_index, block, -rates.beta1, error);
  } else if (!is_packed && share == MomentumShare::kGoesBack) {
    AddMomentum(chunk_index, block, rates.beta1, error);
  }
}

void OneBitAdam::AddMomentum(uint32_t chunk_index, const Segment& segment, float factor,
                             absl::Span<float> accumulator) const {
  const Payload& momentum = signed_momentum_[chunk_index];
  if (momentum.size() == 0) {
    const float* dense = dense_momentum_[chunk_index].data() + segment.chunk_offset;
    kernels::AddDense(kernels::DenseType::kFloat32, reinterpret_cast<const uint8_t*>(dense), factor,
                      accumulator);
    return;
  }
  kernels::AddOneBit(rule_, OneBitPart(layout_.chunks()[chunk_index], segment, momentum.data()),
                     factor, accumulator);
}

absl::Span<float> OneBitAdam::SegmentOf(PageVector<float>& values, const Chunk& chunk,
                                        const Segment& segment) {
  return absl::MakeSpan(values).subspan(chunk.first_element + segment.chunk_offset,
                                        segment.elements);
}

PageVector<float> OneBitAdam::Momentum(uint32_t chunk_index) const {
  const Payload& payload = signed_momentum_[chunk_index];
  if (payload.size() == 0) return dense_momentum_[chunk_index];
  // Not added to zeros: +0 + -0 is +0, and the next step takes the sign of what it sees.
  const Chunk& chunk = layout_.chunks()[chunk_index];
  PageVector<float> momentum(chunk.elements);
  for (const Segment& segment : chunk.segments) {
    const kernels::OneBitView view = OneBitPart(chunk, segment, payload.data());
    for (uint32_t i = 0; i < segment.elements; ++i) {
      const float scale = view.scales[i / rule_.block_elements];
      const bool is_negative = view.bits[i / 8] >> (i % 8) & 1;
      momentum[segment.chunk_offset + i] = is_negative ? -scale : scale;
    }
  }
  return momentum;
}

}  // namespace signpost
