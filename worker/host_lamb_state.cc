#include "worker/host_lamb_state.h"

#include <algorithm>
#include <utility>

#include "kernels/dense.h"
#include "kernels/momentum.h"
#include "kernels/onebit.h"
#include "proto/codec.h"

namespace signpost {

HostLambState::HostLambState(HostAdamState& adam)
    : adam_(adam), fresh_variance_(adam.layout_.elements()) {
  size_t blocks = 0;
  for (const Chunk& chunk : adam.layout_.chunks()) {
    first_block_.push_back(blocks);
    blocks += chunk.blocks;
  }
  sums_.resize(blocks);
}

void HostLambState::UpdateMoments(uint32_t chunk, Codec codec, RatesOf<kernels::LambRates> rates,
                                  Payload answer) {
  adam_.ForEachGradient(chunk, codec, answer,
                        [&](const Segment& part, kernels::DenseType type, const uint8_t* gradient) {
                          kernels::UpdateMoments(adam_.rule_, rates(part.tensor), type, gradient,
                                                 adam_.MomentumOf(chunk, part),
                                                 adam_.VarianceOf(chunk, part),
                                                 adam_.ValuesOf(part), SumsOf(chunk, part));
                        });
}

void HostLambState::FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                                   Payload answer) {
  if (codec == ONE_BIT) return FollowSigns(chunk, rates, std::move(answer));
  adam_.ForEachDecompressedBlock(
      chunk, codec, answer, [&](const Segment& block, absl::Span<const float> momentum) {
        kernels::FollowMomentum(adam_.rule_, rates(block.tensor), momentum.data(),
                                adam_.MomentumOf(chunk, block), adam_.VarianceOf(chunk, block),
                                FreshVarianceOf(chunk, block), adam_.ValuesOf(block),
                                SumsOf(chunk, block));
      });
}

void HostLambState::FollowSigns(uint32_t chunk, RatesOf<kernels::FreshRates> rates,
                                Payload answer) {
  const Chunk& at = adam_.layout_.chunks()[chunk];
  Payload& before = adam_.signed_momentum_[chunk];
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const kernels::OneBitView momentum = OneBitPart(at, part, answer.span().data());
    const absl::Span<const float> inverse_denominator = adam_.VarianceOf(chunk, part);
    const absl::Span<float> fresh = FreshVarianceOf(chunk, part);
    if (before.size() == 0) {
      kernels::FollowMomentum(adam_.rule_, rates(part.tensor), momentum,
                              adam_.MomentumOf(chunk, part).data(), inverse_denominator, fresh,
                              adam_.ValuesOf(part), SumsOf(chunk, part));
    } else {
      kernels::FollowMomentum(adam_.rule_, rates(part.tensor), momentum,
                              OneBitPart(at, part, before.span().data()), inverse_denominator,
                              fresh, adam_.ValuesOf(part), SumsOf(chunk, part));
    }
  });
  before = std::move(answer);
  adam_.dense_momentum_[chunk] = PageVector<float>();  // {} would keep its memory
}

void HostLambState::Step(uint32_t chunk, RatesOf<StepRates> rates) {
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const StepRates step = rates(part.tensor);
    kernels::LambStep(step.rates, step.step_size, adam_.MomentumOf(chunk, part),
                      adam_.VarianceOf(chunk, part), adam_.ValuesOf(part));
  });
}

void HostLambState::StepAlongMomentum(uint32_t chunk, RatesOf<kernels::UpdateRates> rates) {
  const Chunk& at = adam_.layout_.chunks()[chunk];
  const absl::Span<const uint8_t> momentum = adam_.signed_momentum_[chunk].span();
  adam_.crew_.ForEachPart(chunk, [&](const Segment& part) {
    const kernels::UpdateRates update = rates(part.tensor);
    const absl::Span<const float> inverse_denominator = adam_.VarianceOf(chunk, part);
    if (momentum.empty()) {
      kernels::ApplyDenseMomentum(adam_.MomentumOf(chunk, part), update, inverse_denominator,
                                  adam_.ValuesOf(part));
    } else {
      kernels::ApplyMomentum(adam_.rule_, OneBitPart(at, part, momentum.data()), update,
                             inverse_denominator, adam_.ValuesOf(part));
    }
  });
}

void HostLambState::StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  for (const Segment& segment : adam_.layout_.chunks()[chunk].segments) {
    kernels::FloorVariance(rates(segment.tensor), adam_.VarianceOf(chunk, segment),
                           FreshVarianceOf(chunk, segment));
  }
}

void HostLambState::GetFreshVariance(uint32_t chunk, float* numbers) const {
  const Chunk& at = adam_.layout_.chunks()[chunk];
  std::copy_n(fresh_variance_.data() + at.first_element, at.elements, numbers);
}

void HostLambState::SetFreshVariance(uint32_t chunk, const float* numbers) {
  const Chunk& at = adam_.layout_.chunks()[chunk];
  std::copy_n(numbers, at.elements, fresh_variance_.data() + at.first_element);
}

absl::Span<float> HostLambState::FreshVarianceOf(uint32_t chunk, const Segment& segment) {
  return adam_.InLayoutOrder(fresh_variance_, chunk, segment);
}

kernels::LambSums* HostLambState::SumsOf(uint32_t chunk, const Segment& segment) {
  return sums_.data() + first_block_[chunk] + segment.first_block;
}

}  // namespace signpost
