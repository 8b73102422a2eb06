#include "worker/host_adam_state.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "kernels/adam.h"
#include "kernels/dense.h"
#include "kernels/momentum.h"
#include "kernels/sum.h"
#include "proto/codec.h"
#include "worker/host_lamb_state.h"
#include "worker/host_zero_one_state.h"

namespace signpost {

HostAdamState::HostAdamState(const Layout& layout, std::vector<absl::Span<float>> values,
                             uint32_t threads)
    : layout_(layout),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      values_(std::move(values)),
      error_(layout.elements()),
      variance_(layout.elements()),
      signed_momentum_(layout.chunks().size()),
      crew_(layout, threads) {
  for (const Chunk& chunk : layout.chunks()) dense_momentum_.emplace_back(chunk.elements);
  size_t first = 0;
  for (const absl::Span<float> values : values_) {
    first_element_.push_back(first);
    first += values.size();
  }
}

absl::Status HostAdamState::CheckGradient(const Gradient& gradient) const {
  return CheckOnHost(gradient);
}

std::optional<uint32_t> HostAdamState::CompressGradient(uint32_t chunk, Codec codec,
                                                        bool adds_error,
                                                        absl::Span<const Gradient> gradients,
                                                        uint8_t* payload, Optimizer::Later) {
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  return crew_.Compress(chunk, [&](const Segment& part) {
    return number_codec.Compress(rule_, layout_.chunks()[chunk], part,
                                 gradients[part.tensor].floats(part),
                                 adds_error ? ErrorOf(chunk, part) : absl::Span<float>(), payload);
  });
}

std::optional<uint32_t> HostAdamState::CompressApart(uint32_t chunk, Codec codec,
                                                     RatesOf<float> unit,
                                                     absl::Span<const Gradient> gradients,
                                                     uint8_t* payload, Optimizer::Later later) {
  if (!Loses(codec)) {
    return CompressGradient(chunk, codec, /*adds_error=*/false, gradients, payload,
                            std::move(later));
  }
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  return crew_.Compress(chunk, [&](const Segment& part) {
    return signpost::CompressApart(number_codec, rule_, layout_.chunks()[chunk], part,
                                   gradients[part.tensor].floats(part), unit(part.tensor),
                                   ErrorOf(chunk, part), payload);
  });
}

std::optional<uint32_t> HostAdamState::CompressMomentum(uint32_t chunk, Codec codec,
                                                        RatesOf<kernels::MomentumRates> rates,
                                                        absl::Span<const Gradient> gradients,
                                                        uint8_t* payload, Optimizer::Later) {
  if (codec == ONE_BIT) return CompressSigns(chunk, rates, gradients, payload);
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  return crew_.Compress(chunk, [&](const Segment& part) {
    std::vector<float> scratch(std::min<size_t>(part.elements, rule_.block_elements));
    size_t block_number = 0, first_not_packed = 0;
    ForEachBlock(part, rule_.block_elements, [&](const Segment& block) {
      const absl::Span<float> input = absl::MakeSpan(scratch).first(block.elements);
      kernels::MomentumInput(rates(part.tensor), gradients[part.tensor].floats(block),
                             MomentumOf(chunk, block).data(), input);
      const bool is_packed = number_codec.Compress(rule_, layout_.chunks()[chunk], block, input,
                                                   ErrorOf(chunk, block), payload) > 0;
      if (is_packed && first_not_packed == block_number) ++first_not_packed;
      ++block_number;
    });
    return first_not_packed;
  });
}

std::optional<uint32_t> HostAdamState::CompressSigns(uint32_t chunk,
                                                     RatesOf<kernels::MomentumRates> rates,
                                                     absl::Span<const Gradient> gradients,
                                                     uint8_t* payload) {
  const Chunk& at = layout_.chunks()[chunk];
  const Payload& momentum = signed_momentum_[chunk];
  return crew_.Compress(chunk, [&](const Segment& part) {
    const absl::Span<const float> gradient = gradients[part.tensor].floats(part);
    const absl::Span<float> error = ErrorOf(chunk, part);
    const kernels::OneBitSpan out = OneBitPart(at, part, payload);
    if (momentum.size() == 0) {
      return kernels::CompressMomentum(rule_, rates(part.tensor), gradient,
                                       MomentumOf(chunk, part).data(), error, out);
    }
    return kernels::CompressMomentum(rule_, rates(part.tensor), gradient,
                                     OneBitPart(at, part, momentum.data()), error, out);
  });
}

void HostAdamState::AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                             Payload answer) {
  ForEachGradient(chunk, codec, answer,
                  [&](const Segment& part, kernels::DenseType type, const uint8_t* gradient) {
                    kernels::AdamStep(rates(part.tensor), type, gradient, MomentumOf(chunk, part),
                                      VarianceOf(chunk, part), ValuesOf(part));
                  });
}

void HostAdamState::ForEachGradient(
    uint32_t chunk, Codec codec, const Payload& answer,
    absl::FunctionRef<void(const Segment& part, kernels::DenseType type, const uint8_t* gradient)>
        use) {
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    return crew_.ForEachPart(chunk, [&](const Segment& part) {
      use(part, *type, answer.data() + kernels::DenseBytes(*type, part.chunk_offset));
    });
  }
  ForEachDecompressedBlock(
      chunk, codec, answer, [&](const Segment& block, absl::Span<const float> gradient) {
        use(block, kernels::DenseType::kFloat32, reinterpret_cast<const uint8_t*>(gradient.data()));
      });
}

void HostAdamState::ForEachDecompressedBlock(
    uint32_t chunk, Codec codec, const Payload& answer,
    absl::FunctionRef<void(const Segment& block, absl::Span<const float> numbers)> use) {
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    std::vector<float> scratch(std::min<size_t>(part.elements, rule_.block_elements));
    ForEachBlock(part, rule_.block_elements, [&](const Segment& block) {
      const absl::Span<float> numbers = absl::MakeSpan(scratch).first(block.elements);
      number_codec.Decompress(rule_, layout_.chunks()[chunk], block, answer.data(), numbers);
      use(block, numbers);
    });
  });
}

void HostAdamState::ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::UpdateRates> rates,
                                  Payload answer) {
  if (codec == ONE_BIT) return ApplySigns(chunk, rates, std::move(answer));
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    const kernels::UpdateRates update = rates(part.tensor);
    ForEachBlock(part, rule_.block_elements, [&](const Segment& block) {
      const absl::Span<float> momentum = MomentumOf(chunk, block);
      number_codec.Decompress(rule_, layout_.chunks()[chunk], block, answer.data(), momentum);
      kernels::ApplyDenseMomentum(momentum, update, VarianceOf(chunk, block), ValuesOf(block));
    });
  });
}

void HostAdamState::ApplySigns(uint32_t chunk, RatesOf<kernels::UpdateRates> rates,
                               Payload answer) {
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    const kernels::UpdateRates update = rates(part.tensor);
    kernels::ApplyMomentum(rule_, OneBitPart(layout_.chunks()[chunk], part, answer.data()), update,
                           VarianceOf(chunk, part), ValuesOf(part));
  });
  signed_momentum_[chunk] = std::move(answer);
  if (!keeps_dense_momentum_) dense_momentum_[chunk] = PageVector<float>();  // {} would keep it
}

void HostAdamState::RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                                Payload answer) {
  ForEachGradient(chunk, codec, answer,
                  [&](const Segment& part, kernels::DenseType type, const uint8_t* gradient) {
                    kernels::RefreshStep(rates(part.tensor), type, gradient,
                                         MomentumOf(chunk, part), VarianceOf(chunk, part),
                                         ValuesOf(part));
                  });
}

void HostAdamState::MakeMomentumDense(uint32_t chunk) {
  if (signed_momentum_[chunk].size() == 0) return;
  dense_momentum_[chunk].resize(layout_.chunks()[chunk].elements);
  GetMomentum(chunk, dense_momentum_[chunk].data());
  signed_momentum_[chunk] = Payload();
}

void HostAdamState::AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                               absl::Span<const Addition> of_payload,
                               absl::Span<const Addition> of_momentum) {
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& number_codec = NumberCodecOf(codec, layout_);
  for (const auto& [part, factor] : of_payload) {
    number_codec.Add(rule_, at, part, payload, factor, ErrorOf(chunk, part));
  }
  const Payload& momentum = signed_momentum_[chunk];
  for (const auto& [part, factor] : of_momentum) {
    if (momentum.size() == 0) {
      const float* dense = MomentumOf(chunk, part).data();
      kernels::AddDense(kernels::DenseType::kFloat32, reinterpret_cast<const uint8_t*>(dense),
                        factor, ErrorOf(chunk, part));
    } else {
      kernels::AddOneBit(rule_, OneBitPart(at, part, momentum.data()), factor,
                         ErrorOf(chunk, part));
    }
  }
}

double HostAdamState::SumOfVariance(uint32_t tensor) {
  const size_t elements = values_[tensor].size();
  return kernels::Sum(absl::MakeConstSpan(variance_).subspan(first_element_[tensor], elements));
}

void HostAdamState::Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    kernels::Freeze(rates(segment.tensor), MomentumOf(chunk, segment), VarianceOf(chunk, segment));
  }
}

void HostAdamState::Thaw(uint32_t chunk, RatesOf<float> epsilon) {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    kernels::Thaw(epsilon(segment.tensor), VarianceOf(chunk, segment));
  }
}

void HostAdamState::Scale(Field field, uint32_t chunk, RatesOf<float> factor) {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    kernels::Scale(factor(segment.tensor), FieldOf(field, chunk, segment));
  }
}

void HostAdamState::Get(Field field, uint32_t chunk, float* numbers) const {
  const Chunk& at = layout_.chunks()[chunk];
  switch (field) {
    case Field::kParameters:
      for (const Segment& segment : at.segments) {
        const absl::Span<const float> values = ValuesOf(segment);
        std::copy(values.begin(), values.end(), numbers + segment.chunk_offset);
      }
      return;
    case Field::kMomentum:
      return GetMomentum(chunk, numbers);
    case Field::kVariance:
      std::copy_n(variance_.data() + at.first_element, at.elements, numbers);
      return;
    case Field::kError:
      std::copy_n(error_.data() + at.first_element, at.elements, numbers);
  }
}

void HostAdamState::Set(Field field, uint32_t chunk, const float* numbers) {
  const Chunk& at = layout_.chunks()[chunk];
  switch (field) {
    case Field::kParameters:
      for (const Segment& segment : at.segments) {
        std::copy_n(numbers + segment.chunk_offset, segment.elements, ValuesOf(segment).data());
      }
      return;
    case Field::kMomentum:
      dense_momentum_[chunk].assign(numbers, numbers + at.elements);
      signed_momentum_[chunk] = Payload();
      return;
    case Field::kVariance:
      std::copy_n(numbers, at.elements, variance_.data() + at.first_element);
      return;
    case Field::kError:
      std::copy_n(numbers, at.elements, error_.data() + at.first_element);
  }
}

std::unique_ptr<LambState> HostAdamState::NewLambState() {
  return std::make_unique<HostLambState>(*this);
}

std::unique_ptr<ZeroOneState> HostAdamState::NewZeroOneState() {
  return std::make_unique<HostZeroOneState>(*this);
}

void HostAdamState::GetMomentum(uint32_t chunk, float* numbers) const {
  const Payload& payload = signed_momentum_[chunk];
  if (payload.size() == 0) {
    std::copy(dense_momentum_[chunk].begin(), dense_momentum_[chunk].end(), numbers);
    return;
  }
  // Not added to zeros: +0 + -0 is +0, and the next step takes the sign of what it sees.
  const Chunk& at = layout_.chunks()[chunk];
  for (const Segment& segment : at.segments) {
    kernels::DecompressOneBit(rule_, OneBitPart(at, segment, payload.data()),
                              {numbers + segment.chunk_offset, segment.elements});
  }
}

absl::Span<float> HostAdamState::ValuesOf(const Segment& segment) const {
  return values_[segment.tensor].subspan(segment.tensor_offset, segment.elements);
}

absl::Span<float> HostAdamState::MomentumOf(uint32_t chunk, const Segment& segment) {
  return absl::MakeSpan(dense_momentum_[chunk]).subspan(segment.chunk_offset, segment.elements);
}

absl::Span<float> HostAdamState::InLayoutOrder(PageVector<float>& numbers, uint32_t chunk,
                                               const Segment& segment) {
  return absl::MakeSpan(numbers).subspan(
      layout_.chunks()[chunk].first_element + segment.chunk_offset, segment.elements);
}

absl::Span<float> HostAdamState::FieldOf(Field field, uint32_t chunk, const Segment& segment) {
  switch (field) {
    case Field::kParameters:
      return ValuesOf(segment);
    case Field::kMomentum:
      return MomentumOf(chunk, segment);
    case Field::kVariance:
      return VarianceOf(chunk, segment);
    case Field::kError:
      break;
  }
  return ErrorOf(chunk, segment);
}

}  // namespace signpost
