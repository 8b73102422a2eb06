#include "worker/gpu_zero_one_state.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "kernels/dense.h"
#include "proto/codec.h"
#include "worker/gpu_chunks-inl.h"

namespace signpost {

using kernels::cuda::AdaptiveSegment;
using kernels::cuda::LocalSegment;
using kernels::cuda::ScaleSegment;

GpuZeroOneState::GpuZeroOneState(GpuAdamState& adam) : adam_(adam), chunks_(adam.chunks_) {
  if (!chunks_.TakeFloats(anchor_) || !chunks_.TakeFloats(sum_)) return;
  for (uint32_t tensor = 0; tensor < adam_.values_.size(); ++tensor) {
    sum_of_tensor_.emplace_back(Sum({.tensor = tensor}), adam_.values_[tensor].size(),
                                GradientType::kFloat32);
  }
}

GpuZeroOneState::~GpuZeroOneState() {
  while (!under_way_.empty()) EndOldest();
  chunks_.Await();
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
  chunks_.RunOnDense(chunk, codec, answer, row_of, &Gpu::AdaptiveStep);
}

void GpuZeroOneState::Begin(uint32_t chunk) {
  adam_.MakeMomentumDense(chunk);
  if (!chunks_.ok()) return;
  const Chunk& at = adam_.ChunkAt(chunk);
  for (const Segment& segment : at.segments) {
    Copy(Anchor(segment), adam_.Values(segment), segment.elements);
  }
  chunks_.Do(chunks_.gpu().SetToZero(Sum(at.segments[0]), chunks_.RoomFor(chunk) * sizeof(float),
                                     chunks_.stream()));
}

void GpuZeroOneState::Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
                           absl::Span<const Gradient> gradients, Parameters parameters) {
  if (!chunks_.ok()) return;
  GpuChunks::Slot& slot = chunks_.NextApplying();
  while (absl::c_any_of(under_way_, [&](const UnderWay& step) { return step.slot == &slot; })) {
    EndOldest();
  }
  uint32_t* const first_left_alone = chunks_.ClearBadBlock(slot);
  chunks_.Launch(
      slot, chunks_.BadBlockBegin(), chunks_.TablesBegin(), adam_.ChunkAt(chunk).segments,
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
      &Gpu::LocalStep, first_left_alone);
  chunks_.Release(slot);
  chunks_.CopyOut(slot, chunks_.BadBlockBegin());
  under_way_.push_back({&slot, chunk});
}

void GpuZeroOneState::EndOldest() {
  const UnderWay step = under_way_.front();
  under_way_.erase(under_way_.begin());
  if (!chunks_.Do(chunks_.gpu().Await(step.slot->copied.get()))) return;
  const uint32_t block = chunks_.BadBlock(*step.slot);
  if (block != GpuChunks::kNoBadBlock) left_alone_.push_back({step.chunk, block});
}

std::vector<BlockLeftAlone> GpuZeroOneState::TakeBlocksLeftAlone(Wanted wanted) {
  while (wanted == Wanted::kAll && !under_way_.empty()) EndOldest();
  return std::exchange(left_alone_, {});
}

void GpuZeroOneState::SetSumToMomentum(uint32_t chunk) {
  adam_.MakeMomentumDense(chunk);
  if (!chunks_.ok()) return;
  const Segment& first = adam_.ChunkAt(chunk).segments[0];
  Copy(Sum(first), adam_.DenseMomentum(first), chunks_.RoomFor(chunk));
}

std::optional<uint32_t> GpuZeroOneState::CompressSum(uint32_t chunk, Codec codec,
                                                     RatesOf<float> factor, uint8_t* payload,
                                                     Optimizer::Later later) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        return ScaleSegment{.factor = factor(segment.tensor), .values = Sum(segment)};
      },
      &Gpu::Scale);
  return chunks_.CompressGradient(chunk, codec, /*adds_error=*/true, sum_of_tensor_, payload,
                                  std::move(later));
}

void GpuZeroOneState::ReturnToAnchor(uint32_t chunk) {
  if (!chunks_.ok()) return;
  for (const Segment& segment : adam_.ChunkAt(chunk).segments) {
    Copy(adam_.Values(segment), Anchor(segment), segment.elements);
  }
}

void GpuZeroOneState::Set(Field field, uint32_t chunk, const float* numbers) {
  chunks_.Write(MemoryOf(field), chunk, numbers);
}

void GpuZeroOneState::Copy(float* to, const float* from, size_t elements) {
  chunks_.Do(chunks_.gpu().Copy(to, from, elements * sizeof(float), chunks_.stream()));
}

}  // namespace signpost
