#include "worker/gpu_zero_one_state.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "kernels/dense.h"
#include "proto/codec.h"
#include "worker/gpu_adam_state-inl.h"

namespace signpost {

using kernels::cuda::AdaptiveSegment;
using kernels::cuda::LocalSegment;
using kernels::cuda::ScaleSegment;

GpuZeroOneState::GpuZeroOneState(GpuAdamState& adam) : adam_(adam) {
  under_way_.reserve(adam_.applying_.size());
  if (!adam_.status_.ok()) return;
  const size_t bytes = adam_.floats_ * sizeof(float);
  if (!adam_.Take(adam_.gpu_.Allocate(bytes), anchor_)) return;
  if (!adam_.Take(adam_.gpu_.Allocate(bytes), sum_)) return;
  for (uint32_t tensor = 0; tensor < adam_.values_.size(); ++tensor) {
    sum_of_tensor_.emplace_back(Sum({.tensor = tensor}), adam_.values_[tensor].size(),
                                GradientType::kFloat32);
  }
}

GpuZeroOneState::~GpuZeroOneState() {
  while (!under_way_.empty()) EndOldest();
}

void GpuZeroOneState::AdaptiveStep(uint32_t chunk, Codec codec,
                                   RatesOf<kernels::AdaptiveRates> rates, Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return AdaptiveSegment{.rates = rates(segment.tensor),
                           .gradient = gradient,
                           .type = type,
                           .momentum = adam_.DenseMomentum(segment),
                           .variance = adam_.Variance(segment),
                           .parameters = adam_.Values(segment)};
  };
  adam_.RunOnGradient(chunk, codec, answer, row_of, [&](auto... table) {
    return adam_.gpu_.AdaptiveStep(adam_.rule_, table..., adam_.stream_);
  });
}

void GpuZeroOneState::Begin(uint32_t chunk) {
  adam_.MakeMomentumDense(chunk);
  if (!adam_.status_.ok()) return;
  const Chunk& at = adam_.layout_.chunks()[chunk];
  for (const Segment& segment : at.segments) {
    Copy(Anchor(segment), adam_.Values(segment), segment.elements);
  }
  adam_.Do(adam_.gpu_.SetToZero(Sum(at.segments[0]), adam_.RoomFor(chunk) * sizeof(float),
                                adam_.stream_));
}

void GpuZeroOneState::Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
                           absl::Span<const Gradient> gradients, Parameters parameters) {
  if (!adam_.status_.ok()) return;
  GpuAdamState::Slot& slot = adam_.NextApplying();
  while (absl::c_any_of(under_way_, [&](const UnderWay& step) { return step.slot == &slot; })) {
    EndOldest();
  }
  uint32_t* const first_left_alone = adam_.ClearBadBlock(slot);
  adam_.Launch(
      slot, adam_.payload_room_, adam_.TablesBegin(), adam_.layout_.chunks()[chunk].segments,
      [&](const Segment& segment) {
        const Gradient& gradient = gradients[segment.tensor];
        return LocalSegment{
            .rates = rates(segment.tensor),
            .gradient = PartOf(gradient, segment),
            .gradient_type = gradient.type,
            .momentum = adam_.DenseMomentum(segment),
            .accumulated = Sum(segment),
            .inverse_denominator = adam_.Variance(segment),
            .parameters = parameters == Parameters::kMove ? adam_.Values(segment) : nullptr};
      },
      [&](auto... table) {
        return adam_.gpu_.LocalStep(adam_.rule_, table..., first_left_alone, adam_.stream_);
      });
  adam_.Release(slot);
  adam_.CopyOut(slot, adam_.payload_room_);
  under_way_.push_back({&slot, chunk});
}

void GpuZeroOneState::EndOldest() {
  const UnderWay step = under_way_.front();
  under_way_.erase(under_way_.begin());
  if (!adam_.Do(adam_.gpu_.Await(step.slot->copied.get()))) return;
  const uint32_t block = adam_.BadBlock(*step.slot);
  if (block != GpuAdamState::kNoBadBlock) left_alone_.push_back({step.chunk, block});
}

std::vector<BlockLeftAlone> GpuZeroOneState::TakeBlocksLeftAlone(Wanted wanted) {
  while (wanted == Wanted::kAll && !under_way_.empty()) EndOldest();
  return std::exchange(left_alone_, {});
}

void GpuZeroOneState::SetSumToMomentum(uint32_t chunk) {
  adam_.MakeMomentumDense(chunk);
  if (!adam_.status_.ok()) return;
  const Segment& first = adam_.layout_.chunks()[chunk].segments[0];
  Copy(Sum(first), adam_.DenseMomentum(first), adam_.RoomFor(chunk));
}

std::optional<uint32_t> GpuZeroOneState::CompressSum(uint32_t chunk, Codec codec,
                                                     RatesOf<float> factor, uint8_t* payload,
                                                     Optimizer::Later later) {
  adam_.Run(
      chunk,
      [&](const Segment& segment) {
        return ScaleSegment{.factor = factor(segment.tensor), .values = Sum(segment)};
      },
      [&](auto... table) { return adam_.gpu_.Scale(adam_.rule_, table..., adam_.stream_); });
  return adam_.CompressGradient(chunk, codec, /*adds_error=*/true, sum_of_tensor_, payload,
                                std::move(later));
}

void GpuZeroOneState::ReturnToAnchor(uint32_t chunk) {
  if (!adam_.status_.ok()) return;
  for (const Segment& segment : adam_.layout_.chunks()[chunk].segments) {
    Copy(adam_.Values(segment), Anchor(segment), segment.elements);
  }
}

void GpuZeroOneState::Set(Field field, uint32_t chunk, const float* numbers) {
  adam_.Write(MemoryOf(field), chunk, numbers);
}

void GpuZeroOneState::Copy(float* to, const float* from, size_t elements) {
  adam_.Do(adam_.gpu_.Copy(to, from, elements * sizeof(float), adam_.stream_));
}

}  // namespace signpost
