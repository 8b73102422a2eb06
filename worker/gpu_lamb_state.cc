#include "worker/gpu_lamb_state.h"

#include <cstring>
#include <utility>

#include "kernels/dense.h"
#include "proto/codec.h"
#include "worker/gpu_adam_state-inl.h"

namespace signpost {

using kernels::cuda::ApplyDenseSegment;
using kernels::cuda::ApplySegment;
using kernels::cuda::FloorSegment;
using kernels::cuda::FollowSegment;
using kernels::cuda::LambSegment;

GpuLambState::GpuLambState(GpuAdamState& adam) : adam_(adam) {
  size_t blocks = 0;
  for (const Chunk& chunk : adam.layout_.chunks()) {
    first_block_.push_back(blocks);
    blocks += chunk.blocks;
  }
  read_.resize(blocks);
  if (!adam_.status_.ok()) return;
  const size_t bytes = adam_.floats_ * sizeof(float);
  if (!adam_.Take(adam_.gpu_.Allocate(bytes), fresh_variance_)) return;
  if (!adam_.Take(adam_.gpu_.Allocate(blocks * sizeof(kernels::LambSums)), sums_)) return;
  adam_.Do(adam_.gpu_.SetToZero(fresh_variance_.get(), bytes, adam_.stream_));
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
  adam_.RunOnGradient(chunk, codec, answer, row_of, [&](auto... table) {
    return adam_.gpu_.UpdateMoments(adam_.rule_, table..., adam_.stream_);
  });
}

void GpuLambState::FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                                  Payload answer) {
  if (codec == ONE_BIT) return FollowSigns(chunk, rates, std::move(answer));
  adam_.RunOnDecompressed(
      chunk, codec, answer, [&](const Segment& segment) { return adam_.Scratch(chunk, segment); },
      [&](const Segment& segment) {
        return FollowSegment{.rates = rates(segment.tensor),
                             .dense_momentum = adam_.Scratch(chunk, segment),
                             .dense_momentum_before = adam_.DenseMomentum(segment),
                             .inverse_denominator = adam_.Variance(segment),
                             .fresh_variance = FreshVariance(segment),
                             .parameters = adam_.Values(segment),
                             .sums = SumsOf(chunk, segment)};
      },
      [&](auto... table) {
        return adam_.gpu_.FollowMomentum(adam_.rule_, table..., adam_.stream_);
      });
}

void GpuLambState::FollowSigns(uint32_t chunk, RatesOf<kernels::FreshRates> rates, Payload answer) {
  if (!adam_.status_.ok()) return;
  const Chunk& at = adam_.layout_.chunks()[chunk];
  GpuAdamState::Slot& slot = adam_.NextApplying();
  const size_t begin = adam_.PayloadBegin(answer.size());
  std::memcpy(slot.pinned.get() + begin, answer.data(), answer.size());
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
  const auto table = adam_.Write<FollowSegment>(slot, adam_.TablesBegin(), at.segments, row_of);
  adam_.CopyIn(slot, begin, table.end);
  adam_.Do(
      adam_.gpu_.FollowMomentum(adam_.rule_, table.rows, table.count, table.blocks, adam_.stream_));
  // Now that the one before has been read.
  adam_.Do(adam_.gpu_.Copy(adam_.signed_momentum_.get() + adam_.first_signed_[chunk], on_gpu,
                           answer.size(), adam_.stream_));
  adam_.momentum_is_signed_[chunk] = true;
  adam_.Release(slot);
}

absl::Span<const kernels::LambSums> GpuLambState::Sums() {
  adam_.Read(read_.data(), sums_.get(), read_.size() * sizeof(kernels::LambSums));
  return read_;
}

void GpuLambState::Step(uint32_t chunk, RatesOf<StepRates> rates) {
  adam_.Run(
      chunk,
      [&](const Segment& segment) {
        const StepRates step = rates(segment.tensor);
        return LambSegment{.rates = step.rates,
                           .step_size = step.step_size,
                           .momentum = adam_.DenseMomentum(segment),
                           .variance = adam_.Variance(segment),
                           .parameters = adam_.Values(segment)};
      },
      [&](auto... table) { return adam_.gpu_.LambStep(adam_.rule_, table..., adam_.stream_); });
}

void GpuLambState::StepAlongMomentum(uint32_t chunk, RatesOf<AdamState::UpdateRates> rates) {
  if (!adam_.momentum_is_signed_[chunk]) {
    return adam_.Run(
        chunk,
        [&](const Segment& segment) {
          const AdamState::UpdateRates update = rates(segment.tensor);
          return ApplyDenseSegment{.momentum = adam_.DenseMomentum(segment),
                                   .inverse_denominator = adam_.Variance(segment),
                                   .parameters = adam_.Values(segment),
                                   .learning_rate = update.learning_rate,
                                   .weight_decay = update.weight_decay};
        },
        [&](auto... table) {
          return adam_.gpu_.ApplyDenseMomentum(adam_.rule_, table..., adam_.stream_);
        });
  }
  adam_.Run(
      chunk,
      [&](const Segment& segment) {
        const AdamState::UpdateRates update = rates(segment.tensor);
        return ApplySegment{.momentum = adam_.SignedMomentum(chunk, segment),
                            .inverse_denominator = adam_.Variance(segment),
                            .parameters = adam_.Values(segment),
                            .learning_rate = update.learning_rate,
                            .weight_decay = update.weight_decay};
      },
      [&](auto... table) {
        return adam_.gpu_.ApplyMomentum(adam_.rule_, table..., adam_.stream_);
      });
}

void GpuLambState::StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  adam_.Run(
      chunk,
      [&](const Segment& segment) {
        return FloorSegment{.rates = rates(segment.tensor),
                            .variance = adam_.Variance(segment),
                            .fresh_variance = FreshVariance(segment)};
      },
      [&](auto... table) {
        return adam_.gpu_.FloorVariance(adam_.rule_, table..., adam_.stream_);
      });
}

void GpuLambState::GetFreshVariance(uint32_t chunk, float* numbers) const {
  adam_.Read(numbers, fresh_variance_, chunk);
}

void GpuLambState::SetFreshVariance(uint32_t chunk, const float* numbers) {
  adam_.Write(fresh_variance_, chunk, numbers);
}

kernels::LambSums* GpuLambState::SumsOf(uint32_t chunk, const Segment& segment) const {
  return reinterpret_cast<kernels::LambSums*>(sums_.get()) + first_block_[chunk] +
         segment.first_block;
}

}  // namespace signpost
