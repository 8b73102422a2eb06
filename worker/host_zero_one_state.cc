#include "worker/host_zero_one_state.h"

#include <algorithm>
#include <utility>

#include "kernels/dense.h"
#include "proto/codec.h"

namespace signpost {

HostZeroOneState::HostZeroOneState(HostAdamState& adam)
    : adam_(adam), anchor_(adam.layout_.elements()), sum_(adam.layout_.elements()) {
  size_t first = 0;
  for (const absl::Span<float> values : adam.values_) {
    sum_of_tensor_.push_back(absl::MakeSpan(sum_).subspan(first, values.size()));
    first += values.size();
  }
}

void HostZeroOneState::AdaptiveStep(uint32_t chunk, Codec codec,
                                    RatesOf<kernels::AdaptiveRates> rates, Payload answer) {
  adam_.ForEachGradient(chunk, codec, answer,
                        [&](const Segment& part, kernels::DenseType type, const uint8_t* gradient) {
                          kernels::AdaptiveStep(
                              rates(part.tensor), type, gradient, adam_.MomentumOf(chunk, part),
                              adam_.VarianceOf(chunk, part), adam_.ValuesOf(part));
                        });
}

void HostZeroOneState::Begin(uint32_t chunk) {
  adam_.keeps_dense_momentum_ = true;
  adam_.MakeMomentumDense(chunk);
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const absl::Span<const float> values = adam_.ValuesOf(part);
    std::copy(values.begin(), values.end(), adam_.InLayoutOrder(anchor_, chunk, part).begin());
    const absl::Span<float> sum = adam_.InLayoutOrder(sum_, chunk, part);
    std::fill(sum.begin(), sum.end(), 0.0f);
  });
}

void HostZeroOneState::Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
                            absl::Span<const Gradient> gradients, Parameters parameters) {
  const uint32_t first = adam_.crew_.Compress(chunk, [&](const Segment& part) {
    return kernels::LocalStep(
        adam_.rule_, rates(part.tensor), gradients[part.tensor].floats(part),
        adam_.MomentumOf(chunk, part), adam_.InLayoutOrder(sum_, chunk, part),
        adam_.VarianceOf(chunk, part),
        parameters == Parameters::kMove ? adam_.ValuesOf(part) : absl::Span<float>());
  });
  if (first < adam_.layout_.chunks()[chunk].blocks) left_alone_.push_back({chunk, first});
}

void HostZeroOneState::SetSumToMomentum(uint32_t chunk) {
  adam_.MakeMomentumDense(chunk);
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const absl::Span<const float> momentum = adam_.MomentumOf(chunk, part);
    std::copy(momentum.begin(), momentum.end(), adam_.InLayoutOrder(sum_, chunk, part).begin());
  });
}

std::optional<uint32_t> HostZeroOneState::CompressSum(uint32_t chunk, Codec codec,
                                                      RatesOf<float> factor, uint8_t* payload,
                                                      Optimizer::Later later) {
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    kernels::Scale(factor(part.tensor), adam_.InLayoutOrder(sum_, chunk, part));
  });
  return adam_.CompressGradient(chunk, codec, /*adds_error=*/true, sum_of_tensor_, payload,
                                std::move(later));
}

void HostZeroOneState::ReturnToAnchor(uint32_t chunk) {
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const absl::Span<const float> anchor = adam_.InLayoutOrder(anchor_, chunk, part);
    std::copy(anchor.begin(), anchor.end(), adam_.ValuesOf(part).begin());
  });
}

void HostZeroOneState::Set(Field field, uint32_t chunk, const float* numbers) {
  const Chunk& at = adam_.layout_.chunks()[chunk];
  PageVector<float>& to = field == Field::kAnchor ? anchor_ : sum_;
  std::copy_n(numbers, at.elements, to.data() + at.first_element);
}

}  // namespace signpost
