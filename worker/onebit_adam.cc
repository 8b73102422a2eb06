#include "worker/onebit_adam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/adam.h"
#include "kernels/dense.h"

namespace signpost {
namespace {

// The arithmetic is in fp32, where a number just below 1 is 1.
bool IsFraction(double value) { return value >= 0 && static_cast<float>(value) < 1; }

absl::Status OptionError(absl::string_view option, double got, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrFormat("optimizer option %s is %g, wanted %s", option, got, wanted));
}

kernels::MomentumRates MomentumRatesOf(const OptimizerOptions& options) {
  return {static_cast<float>(options.beta1), static_cast<float>(1 - options.beta1)};
}

}  // namespace

absl::Status CheckOptions(const OptimizerOptions& options) {
  if (!IsFraction(options.beta1)) return OptionError("beta1", options.beta1, "[0, 1)");
  if (!IsFraction(options.beta2)) return OptionError("beta2", options.beta2, "[0, 1)");
  if (!(static_cast<float>(options.epsilon) >= std::numeric_limits<float>::min() &&
        options.epsilon < 1)) {
    return OptionError("epsilon", options.epsilon, "a number between 1.2e-38 and 1");
  }
  if (options.freeze_step == 0) {
    return OptionError("freeze_step", 0, "at least 1: the warm-up estimates the variance");
  }
  if (!IsDense(options.warm_up_codec)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("optimizer option warm_up_codec is %s, wanted fp32 or bf16",
                        CodecName(options.warm_up_codec)));
  }
  if (!IsFraction(options.variance_floor)) {
    return OptionError("variance_floor", options.variance_floor, "[0, 1)");
  }
  return absl::OkStatus();
}

std::string DescribeOptions(const OptimizerOptions& options) {
  const std::string freeze = options.freeze_step == OptimizerOptions::kNever
                                 ? "never"
                                 : absl::StrFormat("%d", options.freeze_step);
  return absl::StrFormat(
      "1-bit adam beta1=%.17g beta2=%.17g epsilon=%.17g bias_correction=%d freeze_step=%s "
      "warm_up_codec=%s variance_floor=%.17g",
      options.beta1, options.beta2, options.epsilon, options.bias_correction, freeze,
      CodecName(options.warm_up_codec), options.variance_floor);
}

StepRates MessageOf(absl::Span<const GroupRates> rates) {
  StepRates message;
  for (const GroupRates& group : rates) {
    Rates& to = *message.add_groups();
    to.set_learning_rate(group.learning_rate);
    to.set_weight_decay(group.weight_decay);
  }
  return message;
}

std::vector<GroupRates> RatesOf(const StepRates& message) {
  std::vector<GroupRates> rates;
  for (const Rates& group : message.groups()) {
    rates.push_back({group.learning_rate(), group.weight_decay()});
  }
  return rates;
}

OneBitAdam::OneBitAdam(const Layout& layout, const OptimizerOptions& options,
                       std::vector<Parameter> parameters)
    : layout_(layout),
      options_(options),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      parameters_(std::move(parameters)),
      codec_(options.warm_up_codec),
      error_(layout.elements()),
      variance_(layout.elements()),
      signed_momentum_(layout.chunks().size()) {
  for (const Chunk& chunk : layout.chunks()) dense_momentum_.emplace_back(chunk.elements);
}

void OneBitAdam::Restore(OptimizerState state) {
  power_ = std::min(state.step, options_.freeze_step);
  beta1_power_ = state.beta1_power;
  beta2_power_ = state.beta2_power;
  error_ = std::move(state.error);
  variance_ = std::move(state.variance);
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    const float* momentum = state.momentum.data() + chunk.first_element;
    dense_momentum_[c].assign(momentum, momentum + chunk.elements);
    signed_momentum_[c] = Payload();
  }
}

void OneBitAdam::Seek(uint64_t step) {
  codec_ = options_.warm_up_codec;
  const uint64_t power = std::min(step, options_.freeze_step);
  if (power < power_) {
    power_ = 0;
    beta1_power_ = beta2_power_ = 1;
  }
  while (power_ < power) MultiplyPowers();
}

void OneBitAdam::MultiplyPowers() {
  ++power_;
  beta1_power_ *= options_.beta1;
  beta2_power_ *= options_.beta2;
}

Payload OneBitAdam::State(uint32_t chunk_index) const {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  Payload state(layout_.PayloadBytes(STATE, chunk_index));
  auto* parameters = reinterpret_cast<float*>(state.data());
  for (const Segment& segment : chunk.segments) {
    const float* values = parameters_[segment.tensor].values.data() + segment.tensor_offset;
    std::copy_n(values, segment.elements, parameters + segment.chunk_offset);
  }
  const std::vector<float> momentum = Momentum(chunk_index);
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

uint32_t OneBitAdam::groups() const {
  uint32_t groups = 0;
  for (const Parameter& parameter : parameters_) groups = std::max(groups, parameter.group + 1);
  return groups;
}

void OneBitAdam::BeginStep(uint64_t step, absl::Span<const GroupRates> rates) {
  rates_.assign(rates.begin(), rates.end());
  error_scale_ = 1;
  if (step < options_.freeze_step) {
    MultiplyPowers();
    return;
  }
  codec_ = ONE_BIT;
  if (step == options_.freeze_step) FreezeVariance();
}

void OneBitAdam::FreezeVariance() {
  has_frozen_ = true;
  // Errors were in units of the gradient, and are in units of the momentum from here on.
  error_scale_ = MomentumRatesOf(options_).one_minus_beta1;
  kernels::Scale(error_scale_, absl::MakeSpan(error_));

  const bool correct = options_.bias_correction;
  kernels::FreezeRates rates;
  rates.momentum_correction = correct ? static_cast<float>(1 / (1 - beta1_power_)) : 1;
  const double variance_correction = correct ? 1 / (1 - beta2_power_) : 1;
  rates.variance_correction = static_cast<float>(variance_correction);
  rates.epsilon = static_cast<float>(options_.epsilon);

  std::vector<float> floors;  // by tensor
  size_t first = 0;
  for (const Parameter& parameter : parameters_) {
    const size_t elements = parameter.values.size();
    const double mean = kernels::Sum(absl::MakeSpan(variance_).subspan(first, elements)) / elements;
    floors.push_back(static_cast<float>(options_.variance_floor * mean * variance_correction));
    first += elements;
  }
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    for (const Segment& segment : chunk.segments) {
      rates.floor = floors[segment.tensor];
      kernels::Freeze(
          rates, absl::MakeSpan(dense_momentum_[c]).subspan(segment.chunk_offset, segment.elements),
          absl::MakeSpan(variance_).subspan(chunk.first_element + segment.chunk_offset,
                                            segment.elements));
    }
  }
}

uint32_t OneBitAdam::Compress(uint32_t chunk_index,
                              absl::Span<const absl::Span<const float>> gradients,
                              uint8_t* payload) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  for (const Segment& segment : chunk.segments) {
    const auto gradient =
        gradients[segment.tensor].subspan(segment.tensor_offset, segment.elements);
    const size_t packed = CompressSegment(chunk_index, segment, gradient, payload);
    if (packed < kernels::BlockCount(segment.elements, rule_.block_elements)) {
      return segment.first_block + packed;
    }
  }
  return chunk.blocks;
}

size_t OneBitAdam::CompressSegment(uint32_t chunk_index, const Segment& segment,
                                   absl::Span<const float> gradient, uint8_t* payload) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  const absl::Span<float> error = SegmentOf(error_, chunk, segment);
  if (codec_ != ONE_BIT) {
    const kernels::DenseType type = DenseTypeOf(codec_);
    return kernels::CompressDense(rule_, type, gradient, error,
                                  payload + kernels::DenseBytes(type, segment.chunk_offset));
  }
  const kernels::MomentumRates rates = MomentumRatesOf(options_);
  const kernels::OneBitSpan out = OneBitPart(chunk, segment, payload);
  const Payload& momentum = signed_momentum_[chunk_index];
  if (momentum.size() == 0) {
    return kernels::CompressMomentum(rule_, rates, gradient,
                                     dense_momentum_[chunk_index].data() + segment.chunk_offset,
                                     error, out);
  }
  return kernels::CompressMomentum(rule_, rates, gradient,
                                   OneBitPart(chunk, segment, momentum.data()), error, out);
}

void OneBitAdam::Apply(uint32_t chunk_index, Answer answer) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  for (const Segment& segment : chunk.segments) {
    if (codec_ == ONE_BIT) {
      ApplyOneBit(chunk, segment, answer.payload.data());
    } else {
      ApplyDense(chunk_index, segment, answer.payload.data());
    }
  }
  if (codec_ != ONE_BIT) return;
  signed_momentum_[chunk_index] = std::move(answer.payload);
  dense_momentum_[chunk_index] = {};
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
  const double correction1 = options_.bias_correction ? 1 - beta1_power_ : 1;
  const double correction2 = options_.bias_correction ? 1 - beta2_power_ : 1;
  const kernels::AdamRates rates = {
      .beta1 = static_cast<float>(options_.beta1),
      .one_minus_beta1 = static_cast<float>(1 - options_.beta1),
      .beta2 = static_cast<float>(options_.beta2),
      .one_minus_beta2 = static_cast<float>(1 - options_.beta2),
      .step_size = static_cast<float>(group.learning_rate / correction1),
      .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2)),
      .epsilon = static_cast<float>(options_.epsilon),
      .decay = static_cast<float>(group.learning_rate * group.weight_decay),
  };
  const kernels::DenseType type = DenseTypeOf(codec_);
  kernels::AdamStep(
      rates, type, payload + kernels::DenseBytes(type, segment.chunk_offset),
      absl::MakeSpan(dense_momentum_[chunk_index]).subspan(segment.chunk_offset, segment.elements),
      SegmentOf(variance_, chunk, segment),
      parameter.values.subspan(segment.tensor_offset, segment.elements));
}

void OneBitAdam::TakeBack(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) {
  PutBack(chunk, payload, blocks_packed, MomentumShare::kStays);
}

void OneBitAdam::KeepInput(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) {
  PutBack(chunk, payload, blocks_packed, MomentumShare::kGoesBack);
}

void OneBitAdam::PutBack(uint32_t chunk_index, const uint8_t* payload, uint32_t blocks_packed,
                         MomentumShare share) {
  const Chunk& chunk = layout_.chunks()[chunk_index];
  for (const Segment& segment : chunk.segments) {
    if (segment.first_block >= blocks_packed) return;
    const size_t elements = std::min<size_t>(
        segment.elements, (blocks_packed - segment.first_block) * rule_.block_elements);
    const absl::Span<float> error = SegmentOf(error_, chunk, segment).first(elements);
    if (codec_ != ONE_BIT) {
      const kernels::DenseType type = DenseTypeOf(codec_);
      kernels::AddDense(type, payload + kernels::DenseBytes(type, segment.chunk_offset), 1, error);
      continue;
    }
    kernels::AddOneBit(rule_, OneBitPart(chunk, segment, payload), 1, error);
    if (share == MomentumShare::kGoesBack) continue;
    // The momentum stays where it is, so its share must not be in the error as well.
    AddMomentum(chunk_index, segment, -MomentumRatesOf(options_).beta1, error);
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

absl::Span<float> OneBitAdam::SegmentOf(std::vector<float>& values, const Chunk& chunk,
                                        const Segment& segment) {
  return absl::MakeSpan(values).subspan(chunk.first_element + segment.chunk_offset,
                                        segment.elements);
}

std::vector<float> OneBitAdam::Momentum(uint32_t chunk_index) const {
  const Payload& payload = signed_momentum_[chunk_index];
  if (payload.size() == 0) return dense_momentum_[chunk_index];
  // Not added to zeros: +0 + -0 is +0, and the next step takes the sign of what it sees.
  const Chunk& chunk = layout_.chunks()[chunk_index];
  std::vector<float> momentum(chunk.elements);
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
