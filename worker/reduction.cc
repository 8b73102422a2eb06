#include "worker/reduction.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"

namespace signpost {

absl::Status CheckOptions(const ReductionOptions& options) {
  // Sums beyond its range would wait in errors for ever.
  if (options.sum && options.codec == FLOAT16) {
    return absl::InvalidArgumentError(
        "the codec of a reduction is fp16, which has no room for sums");
  }
  return CheckCodecOption("the codec of a reduction", options.codec);
}

std::string DescribeOptions(const ReductionOptions& options) {
  return absl::StrCat("reduction codec=", CodecName(options.codec));
}

Reduction::Reduction(const Layout& layout, const ReductionOptions& options, uint32_t threads)
    : layout_(layout),
      codec_(options.codec),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      crew_(layout, threads) {
  if (Loses(codec_)) error_ = PageVector<float>(layout.elements());
}

void Reduction::SetResults(absl::Span<const absl::Span<float>> results) {
  results_.assign(results.begin(), results.end());
}

std::optional<uint32_t> Reduction::Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                            uint8_t* payload, Later) {
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& codec = NumberCodecOf(codec_, layout_);
  return crew_.Compress(chunk, [&](const Segment& part) {
    return codec.Compress(rule_, at, part, gradients[part.tensor].floats(part), ErrorOf(at, part),
                          payload);
  });
}

void Reduction::Apply(uint32_t chunk, Answer answer) {
  if (results_.empty()) return;
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& codec = NumberCodecOf(codec_, layout_);
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    codec.Decompress(rule_, at, part, answer.payload.data(), ResultOf(part));
  });
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
  if (!Loses(codec_)) return;
  const NumberCodec& codec = NumberCodecOf(codec_, layout_);
  const Chunk& chunk = layout_.chunks()[chunk_index];
  ForEachBlock(chunk, rule_.block_elements, [&](const Segment& block) {
    if (!codec.IsPacked(chunk, block, payload)) return;
    codec.Add(rule_, chunk, block, payload, /*factor=*/1, ErrorOf(chunk, block));
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
