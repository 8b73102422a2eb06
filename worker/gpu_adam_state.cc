#include "worker/gpu_adam_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/momentum.h"
#include "kernels/sum_cuda.h"
#include "proto/codec.h"
#include "worker/gpu_chunks-inl.h"
#include "worker/gpu_lamb_state.h"
#include "worker/gpu_zero_one_state.h"

namespace signpost {
namespace {

using kernels::cuda::AdamSegment;
using kernels::cuda::AddDenseSegment;
using kernels::cuda::AddSegment;
using kernels::cuda::ApplyDenseSegment;
using kernels::cuda::ApplySegment;
using kernels::cuda::CompressSegment;
using kernels::cuda::DecompressSegment;
using kernels::cuda::MomentumInputSegment;
using kernels::cuda::ScaleSegment;

GpuChunks::Needs NeedsOf(const GpuAdamState::Codecs& codecs) {
  return {.codecs = {codecs.gradient, codecs.momentum, codecs.apart},
          .scratch = codecs.momentum != ONE_BIT || !DenseTypeOf(codecs.gradient) ||
                     Loses(codecs.apart) || codecs.settles};
}

}  // namespace

GpuAdamState::GpuAdamState(const Layout& layout, std::vector<absl::Span<float>> values,
                           const Codecs& codecs, uint32_t threads, Gpu& gpu)
    : values_(std::move(values)),
      momentum_is_signed_(layout.chunks().size()),
      chunks_(layout, NeedsOf(codecs), threads, gpu) {
  TakeMemory(codecs);
}

void GpuAdamState::TakeMemory(const Codecs& codecs) {
  const Layout& layout = chunks_.layout();
  size_t signed_bytes = 0;
  for (size_t chunk = 0; chunk < layout.chunks().size(); ++chunk) {
    first_signed_.push_back(signed_bytes);
    if (codecs.momentum != ONE_BIT) continue;
    signed_bytes += GpuChunks::Aligned(layout.PayloadBytes(ONE_BIT, chunk));
  }
  size_t most_in_tensor = 0;
  for (const absl::Span<float> values : values_) {
    most_in_tensor = std::max(most_in_tensor, values.size());
  }
  const size_t sums = kernels::cuda::SumWorkspace(most_in_tensor) + 1;
  Gpu& gpu = chunks_.gpu();
  if (!chunks_.TakeZeros(variance_) || !chunks_.TakeZeros(dense_momentum_)) return;
  if (!chunks_.Take(gpu.Allocate(signed_bytes), signed_momentum_)) return;
  chunks_.Take(gpu.Allocate(sums * sizeof(double)), sums_);
}

std::optional<uint32_t> GpuAdamState::CompressMomentum(uint32_t chunk, Codec codec,
                                                       RatesOf<kernels::MomentumRates> rates,
                                                       absl::Span<const Gradient> gradients,
                                                       uint8_t* payload, Optimizer::Later later) {
  if (codec == ONE_BIT) {
    chunks_.Pack(chunk, codec, payload, std::move(later),
                 [&](Slot& slot, uint8_t* out, uint32_t* first_not_packed) {
                   CompressSigns(slot, chunk, rates, gradients, out, first_not_packed);
                 });
    return std::nullopt;
  }
  const auto row_of = [&](const Segment& segment) {
    const Gradient& gradient = gradients[segment.tensor];
    return MomentumInputSegment{.gradient = PartOf(gradient, segment),
                                .gradient_type = gradient.type,
                                .momentum = DenseMomentum(segment),
                                .input = chunks_.Scratch(chunk, segment),
                                .rates = rates(segment.tensor)};
  };
  return chunks_.CompressMade(chunk, codec, row_of, &Gpu::MomentumInput, payload, std::move(later));
}

void GpuAdamState::CompressSigns(Slot& slot, uint32_t chunk, RatesOf<kernels::MomentumRates> rates,
                                 absl::Span<const Gradient> gradients, uint8_t* out,
                                 uint32_t* first_not_packed) {
  const Chunk& at = ChunkAt(chunk);
  chunks_.Launch(
      slot, chunks_.BadBlockBegin(), chunks_.TablesBegin(), at.segments,
      [&](const Segment& segment) {
        const Gradient& gradient = gradients[segment.tensor];
        CompressSegment row = {.gradient = PartOf(gradient, segment),
                               .type = gradient.type,
                               .error = chunks_.Error(segment),
                               .out = OneBitPart(at, segment, out),
                               .rates = rates(segment.tensor)};
        if (momentum_is_signed_[chunk]) {
          row.momentum = SignedMomentum(chunk, segment);
        } else {
          row.dense_momentum = DenseMomentum(segment);
        }
        return row;
      },
      &Gpu::CompressOneBit, first_not_packed);
}

void GpuAdamState::AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                            Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return AdamSegment<kernels::AdamRates>{.rates = rates(segment.tensor),
                                           .gradient = gradient,
                                           .type = type,
                                           .momentum = DenseMomentum(segment),
                                           .variance = Variance(segment),
                                           .parameters = Values(segment)};
  };
  chunks_.RunOnDense(chunk, codec, answer, row_of, &Gpu::AdamStep);
}

void GpuAdamState::RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                               Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return AdamSegment<kernels::RefreshRates>{.rates = rates(segment.tensor),
                                              .gradient = gradient,
                                              .type = type,
                                              .momentum = DenseMomentum(segment),
                                              .variance = Variance(segment),
                                              .parameters = Values(segment)};
  };
  chunks_.RunOnDense(chunk, codec, answer, row_of, &Gpu::RefreshStep);
}

void GpuAdamState::ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::UpdateRates> rates,
                                 Payload answer) {
  if (codec == ONE_BIT) return ApplySigns(chunk, rates, std::move(answer));
  chunks_.RunOnDecompressed(
      chunk, codec, answer, [&](const Segment& segment) { return DenseMomentum(segment); },
      [&](const Segment& segment) { return DenseRow(segment, rates(segment.tensor)); },
      &Gpu::ApplyDenseMomentum);
}

void GpuAdamState::ApplySigns(uint32_t chunk, RatesOf<kernels::UpdateRates> rates, Payload answer) {
  if (!chunks_.ok()) return;
  // The last answer has been read by all that came before on the stream.
  Slot& slot = chunks_.NextApplying();
  std::memcpy(slot.pinned.get(), answer.data(), answer.size());
  chunks_.Do(chunks_.gpu().CopyIn(signed_momentum_.get() + first_signed_[chunk], slot.pinned.get(),
                                  answer.size(), chunks_.stream()));
  momentum_is_signed_[chunk] = true;
  chunks_.Launch(
      slot, chunks_.TablesBegin(), chunks_.TablesBegin(), ChunkAt(chunk).segments,
      [&](const Segment& segment) { return SignedRow(chunk, segment, rates(segment.tensor)); },
      &Gpu::ApplyMomentum);
  chunks_.Release(slot);
}

void GpuAdamState::MakeMomentumDense(uint32_t chunk) {
  if (!momentum_is_signed_[chunk]) return;
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        return DecompressSegment{.compressed = SignedMomentum(chunk, segment),
                                 .values = DenseMomentum(segment)};
      },
      &Gpu::DecompressOneBit);
  momentum_is_signed_[chunk] = false;
}

void GpuAdamState::AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                              absl::Span<const Addition> of_payload,
                              absl::Span<const Addition> of_momentum) {
  if (!chunks_.ok()) return;
  Slot& slot = chunks_.NextApplying();
  const size_t end = chunks_.AddToError(slot, chunk, codec, payload, of_payload);
  if (momentum_is_signed_[chunk]) {
    chunks_.AddToError(
        slot, end, of_momentum,
        [&](const Segment& part) { return AddSegment{.addend = SignedMomentum(chunk, part)}; },
        &Gpu::AddOneBit);
  } else {
    chunks_.AddToError(
        slot, end, of_momentum,
        [&](const Segment& part) {
          const float* const dense = DenseMomentum(part);
          return AddDenseSegment{.addend = reinterpret_cast<const uint8_t*>(dense)};
        },
        &Gpu::AddDense);
  }
  chunks_.Release(slot);
}

double GpuAdamState::SumOfVariance(uint32_t tensor) {
  double sum = 0;
  if (!chunks_.ok()) return sum;
  auto* const workspace = reinterpret_cast<double*>(sums_.get());
  const size_t elements = values_[tensor].size();
  double* const on_gpu = workspace + kernels::cuda::SumWorkspace(elements);
  chunks_.Do(chunks_.gpu().Sum(Variance({.tensor = tensor}), elements, workspace, on_gpu,
                               chunks_.stream()));
  chunks_.Read(&sum, on_gpu, sizeof sum);
  return sum;
}

void GpuAdamState::Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        return AdamSegment<kernels::FreezeRates>{.rates = rates(segment.tensor),
                                                 .momentum = DenseMomentum(segment),
                                                 .variance = Variance(segment)};
      },
      &Gpu::Freeze);
}

void GpuAdamState::Thaw(uint32_t chunk, RatesOf<float> epsilon) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        AdamSegment<kernels::RefreshRates> row = {.variance = Variance(segment)};
        row.rates.epsilon = epsilon(segment.tensor);
        return row;
      },
      &Gpu::Thaw);
}

void GpuAdamState::Scale(Field field, uint32_t chunk, RatesOf<float> factor) {
  chunks_.Run(
      chunk,
      [&](const Segment& segment) {
        return ScaleSegment{.factor = factor(segment.tensor), .values = DenseField(field, segment)};
      },
      &Gpu::Scale);
}

void GpuAdamState::Get(Field field, uint32_t chunk, float* numbers) const {
  const Chunk& at = ChunkAt(chunk);
  const bool is_signed = field == Field::kMomentum && momentum_is_signed_[chunk];
  Payload payload(is_signed ? chunks_.layout().PayloadBytes(ONE_BIT, chunk) : 0);
  if (is_signed)
    chunks_.Read(payload.data(), signed_momentum_.get() + first_signed_[chunk], payload.size());
  for (const Segment& segment : at.segments) {
    float* const to = numbers + segment.chunk_offset;
    if (is_signed) {
      kernels::DecompressOneBit(chunks_.rule(), OneBitPart(at, segment, payload.data()),
                                {to, segment.elements});
    } else {
      chunks_.Read(to, DenseField(field, segment), segment.elements * sizeof(float));
    }
  }
}

void GpuAdamState::Set(Field field, uint32_t chunk, const float* numbers) {
  if (field == Field::kMomentum) momentum_is_signed_[chunk] = false;
  for (const Segment& segment : ChunkAt(chunk).segments) {
    chunks_.Write(DenseField(field, segment), numbers + segment.chunk_offset,
                  segment.elements * sizeof(float));
  }
}

std::unique_ptr<LambState> GpuAdamState::NewLambState() {
  return std::make_unique<GpuLambState>(*this);
}

std::unique_ptr<ZeroOneState> GpuAdamState::NewZeroOneState() {
  return std::make_unique<GpuZeroOneState>(*this);
}

float* GpuAdamState::DenseField(Field field, const Segment& segment) const {
  switch (field) {
    case Field::kParameters:
      return Values(segment);
    case Field::kMomentum:
      return DenseMomentum(segment);
    case Field::kVariance:
      return Variance(segment);
    case Field::kError:
      break;
  }
  return chunks_.Error(segment);
}

ApplyDenseSegment GpuAdamState::DenseRow(const Segment& segment,
                                         const kernels::UpdateRates& rates) const {
  return {.momentum = DenseMomentum(segment),
          .inverse_denominator = Variance(segment),
          .parameters = Values(segment),
          .rates = rates};
}

ApplySegment GpuAdamState::SignedRow(uint32_t chunk, const Segment& segment,
                                     const kernels::UpdateRates& rates) const {
  return {.momentum = SignedMomentum(chunk, segment),
          .inverse_denominator = Variance(segment),
          .parameters = Values(segment),
          .rates = rates};
}

float* GpuAdamState::Values(const Segment& segment) const {
  return values_[segment.tensor].data() + segment.tensor_offset;
}

kernels::OneBitView GpuAdamState::SignedMomentum(uint32_t chunk, const Segment& segment) const {
  const uint8_t* const payload = signed_momentum_.get() + first_signed_[chunk];
  return OneBitPart(ChunkAt(chunk), segment, payload);
}

}  // namespace signpost
