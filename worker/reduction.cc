#include "worker/reduction.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/dense.h"

namespace signpost {

absl::Status CheckOptions(const ReductionOptions& options) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT}) {
    if (options.codec == codec) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "the codec of a reduction is %s, wanted fp32, bf16 or one-bit", CodecName(options.codec)));
}

std::string DescribeOptions(const ReductionOptions& options) {
  return absl::StrCat("reduction codec=", CodecName(options.codec));
}

Reduction::Reduction(const Layout& layout, const ReductionOptions& options, uint32_t threads)
    : layout_(layout),
      codec_(options.codec),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      crew_(layout, threads) {
  if (codec_ != FLOAT32) error_ = PageVector<float>(layout.elements());
}

void Reduction::SetResults(absl::Span<const absl::Span<float>> results) {
  results_.assign(results.begin(), results.end());
}

std::optional<uint32_t> Reduction::Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                            uint8_t* payload, Later) {
  return crew_.Compress(chunk, [&](const Segment& part) {
    return CompressPart(layout_.chunks()[chunk], part, gradients[part.tensor].floats(part),
                        payload);
  });
}

size_t Reduction::CompressPart(const Chunk& chunk, const Segment& part,
                               absl::Span<const float> values, uint8_t* payload) {
  const absl::Span<float> error = ErrorOf(chunk, part);
  if (codec_ == ONE_BIT) {
    return kernels::CompressOneBit(rule_, values, error, OneBitPart(chunk, part, payload));
  }
  const kernels::DenseType type = DenseTypeOf(codec_);
  return kernels::CompressDense(rule_, type, values, error,
                                payload + kernels::DenseBytes(type, part.chunk_offset));
}

void Reduction::Apply(uint32_t chunk, Answer answer) {
  if (results_.empty()) return;
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    ApplyPart(layout_.chunks()[chunk], part, answer.payload.data());
  });
}

void Reduction::ApplyPart(const Chunk& chunk, const Segment& part, const uint8_t* payload) {
  const absl::Span<float> result = ResultOf(part);
  if (codec_ == ONE_BIT) {
    return kernels::DecompressOneBit(rule_, OneBitPart(chunk, part, payload), result);
  }
  const kernels::DenseType type = DenseTypeOf(codec_);
  std::fill(result.begin(), result.end(), 0.0f);
  kernels::AddDense(type, payload + kernels::DenseBytes(type, part.chunk_offset), /*factor=*/1,
                    result);
}

void Reduction::TakeBack(uint32_t chunk_index, const uint8_t* payload) {
  if (payload != nullptr) KeepInput(chunk_index, payload);
  if (results_.empty()) return;
  for (const Segment& segment : layout_.chunks()[chunk_index].segments) {
    const absl::Span<float> result = ResultOf(segment);
    std::fill(result.begin(), result.end(), std::numeric_limits<float>::quiet_NaN());
  }
}

void Reduction::KeepInput(uint32_t chunk_index, const uint8_t* payload) {
  if (codec_ == FLOAT32) return;
  const Chunk& chunk = layout_.chunks()[chunk_index];
  ForEachBlock(chunk, rule_.block_elements, [&](const Segment& block) {
    if (!IsPacked(codec_, chunk, block, payload)) return;
    if (codec_ == ONE_BIT) {
      kernels::AddOneBit(rule_, OneBitPart(chunk, block, payload), /*factor=*/1,
                         ErrorOf(chunk, block));
    } else {
      const kernels::DenseType type = DenseTypeOf(codec_);
      kernels::AddDense(type, payload + kernels::DenseBytes(type, block.chunk_offset),
                        /*factor=*/1, ErrorOf(chunk, block));
    }
  });
}

Payload Reduction::State(uint32_t chunk) const {
  Payload state(layout_.PayloadBytes(STATE, chunk));
  std::memset(state.data(), 0, state.size());
  return state;
}

absl::Span<float> Reduction::ErrorOf(const Chunk& chunk, const Segment& segment) {
  if (error_.empty()) return {};  // fp32 loses nothing
  return absl::MakeSpan(error_).subspan(chunk.first_element + segment.chunk_offset,
                                        segment.elements);
}

absl::Span<float> Reduction::ResultOf(const Segment& segment) {
  return results_[segment.tensor].subspan(segment.tensor_offset, segment.elements);
}

}  // namespace signpost
