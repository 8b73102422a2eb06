#include "worker/gpu_lamb_state.h"

#include <utility>

#include "kernels/dense.h"
#include "proto/codec.h"
#include "worker/gpu_chunks-inl.h"

namespace signpost {

using kernels::cuda::FloorSegment;
using kernels::cuda::FollowSegment;
using kernels::cuda::LambSegment;

GpuLambState::GpuLambState(GpuAdamState& adam) : adam_(adam), chunks_(adam.chunks_) {
  size_t blocks = 0;
  for (const Chunk& chunk : chunks_.layout().chunks()) {
    first_block_.push_back(blocks);
    blocks += chunk.blocks;
  }
  read_.resize(blocks);
  if (!chunks_.TakeZeros(fresh_variance_)) return;
  chunks_.Take(chunks_.gpu().Allocate(blocks * sizeof(kernels::LambSums)), sums_);
}

void GpuLambState::UpdateMoments(uint32_t chunk, Codec codec, RatesOf<kernels::LambRates> rates,
                                 Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return LambSegment{.rates = rates(segment.tensor),
                       .gradient = gradient,
                       .type = type,
                       .momentum = adam_.DenseMomentum(segment),
                       .variance = adam_.Variance(segment),
                       .parameters = adam_.Values(segment),
                       .sums = SumsOf(chunk, segment)};
  };
  chunks_.RunOnDense(chunk, codec, answer, row_of, &Gpu::UpdateMoments);
}

void GpuLambState::FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                                  Payload answer) {
  if (codec == ONE_BIT) return FollowSigns(chunk, rates, std::move(answer));
  chunks_.RunOnDecompressed(
      chunk, codec, answer, [&](const Segment& segment) { return chunks_.Scratch(chunk, segment); },
      [&](const Segment& segment) {
        return FollowSegment{.rates = rates(segment.tensor),
                             .dense_momentum = chunks_.Scratch(chunk, segment),
                             .dense_momentum_before = adam_.DenseMomentum(segment),
                             .inverse_denominator = adam_.Variance(segment),
                             .fresh_variance = FreshVariance(segment),
                             .parameters = adam_.Values(segment),
                             .sums = SumsOf(chunk, segment)};
      },
      &Gpu::FollowMomentum);
}

void GpuLambState::FollowSigns(uint32_t chunk, RatesOf<kernels::FreshRates> rates, Payload answer) {
  if (!chunks_.ok()) return;
  const Chunk& at = adam_.ChunkAt(chunk);
  GpuChunks::Slot& slot = chunks_.NextApplying();
  const size_t begin = chunks_.PutPayload(slot, chunk, ONE_BIT, answer.data());
  const uint8_t* const on_gpu = slot.device.get() + begin;
  const auto row_of = [&](const Segment& segment) {
    FollowSegment row = {.rates = rates(segment.tensor),
                         .momentum = OneBitPart(at, segment, on_gpu),
                         .inverse_denominator = adam_.Variance(segment),
                         .fresh_variance = FreshVariance(segment),
                         .parameters = adam_.Values(segment),
                         .sums = SumsOf(chunk, segment)};
    if (adam_.momentum_is_signed_[chunk]) {
      row.momentum_before = adam_.SignedMomentum(chunk, segment);
    } else {
      row.dense_momentum_before = adam_.DenseMomentum(segment);
    }
    return row;
  };
  chunks_.Launch(slot, begin, chunks_.TablesBegin(), at.segments, row_of, &Gpu::FollowMomentum);
  // Now that the one before has been read.
  chunks_.Do(chunks_.gpu().Copy(adam_.signed_momentum_.get() + adam_.first_signed_[chunk], on_gpu,
                                answer.size(), chunks_.stream()));
  adam_.momentum_is_signed_[chunk] = true;
  chunks_.Release(slot);
}

absl::Span<const kernels::LambSums> GpuLambState::Sums() {
  chunks_.Read(read_.data(), sums_.get(), read_.size() * sizeof(kernels::LambSums));
  return read_;
}

void GpuLambState::Step(uint32_t chunk, RatesOf<StepRates> rates) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        const StepRates step = rates(segment.tensor);
        return LambSegment{.rates = step.rates,
                           .step_size = step.step_size,
                           .momentum = adam_.DenseMomentum(segment),
                           .variance = adam_.Variance(segment),
                           .parameters = adam_.Values(segment)};
      },
      &Gpu::LambStep);
}

void GpuLambState::StepAlongMomentum(uint32_t chunk, RatesOf<kernels::UpdateRates> rates) {
  if (adam_.momentum_is_signed_[chunk]) {
    return chunks_.Run(
        chunk,
        [&](const Segment& segment) {
          return adam_.SignedRow(chunk, segment, rates(segment.tensor));
        },
        &Gpu::ApplyMomentum);
  }
  chunks_.Run(
      chunk, [&](const Segment& segment) { return adam_.DenseRow(segment, rates(segment.tensor)); },
      &Gpu::ApplyDenseMomentum);
}

void GpuLambState::StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        return FloorSegment{.rates = rates(segment.tensor),
                            .variance = adam_.Variance(segment),
                            .fresh_variance = FreshVariance(segment)};
      },
      &Gpu::FloorVariance);
}

void GpuLambState::GetFreshVariance(uint32_t chunk, float* numbers) const {
  chunks_.Read(numbers, fresh_variance_, chunk);
}

void GpuLambState::SetFreshVariance(uint32_t chunk, const float* numbers) {
  chunks_.Write(fresh_variance_, chunk, numbers);
}

kernels::LambSums* GpuLambState::SumsOf(uint32_t chunk, const Segment& segment) const {
  return reinterpret_cast<kernels::LambSums*>(sums_.get()) + first_block_[chunk] +
         segment.first_block;
}

}  // namespace signpost
