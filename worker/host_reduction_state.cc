#include "worker/host_reduction_state.h"

#include <algorithm>
#include <limits>

namespace signpost {
namespace {

absl::Span<float> PartOf(ReductionState::Results results, const Segment& part) {
  return results[part.tensor].subspan(part.tensor_offset, part.elements);
}

}  // namespace

HostReductionState::HostReductionState(const Layout& layout, Codec codec, uint32_t threads)
    : layout_(layout),
      codec_(NumberCodecOf(codec, layout)),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      crew_(layout, threads) {
  if (Loses(codec)) error_ = PageVector<float>(layout.elements());
}

std::optional<uint32_t> HostReductionState::Compress(uint32_t chunk,
                                                     absl::Span<const Gradient> gradients,
                                                     uint8_t* payload, Optimizer::Later) {
  const Chunk& at = layout_.chunks()[chunk];
  return crew_.Compress(chunk, [&](const Segment& part) {
    return codec_.Compress(rule_, at, part, gradients[part.tensor].floats(part), ErrorOf(at, part),
                           payload);
  });
}

void HostReductionState::Decompress(uint32_t chunk, const Payload& answer, Results results) {
  const Chunk& at = layout_.chunks()[chunk];
  crew_.ForEachPart(chunk, [&](const Segment& part) {
    codec_.Decompress(rule_, at, part, answer.data(), PartOf(results, part));
  });
}

void HostReductionState::SetToNan(uint32_t chunk, Results results) {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    const absl::Span<float> result = PartOf(results, segment);
    std::fill(result.begin(), result.end(), std::numeric_limits<float>::quiet_NaN());
  }
}

void HostReductionState::AddToError(uint32_t chunk, const uint8_t* payload,
                                    absl::Span<const Addition> additions) {
  const Chunk& at = layout_.chunks()[chunk];
  for (const Addition& addition : additions) {
    codec_.Add(rule_, at, addition.part, payload, addition.factor, ErrorOf(at, addition.part));
  }
}

absl::Span<float> HostReductionState::ErrorOf(const Chunk& chunk, const Segment& part) {
  if (error_.empty()) return {};  // fp32 loses nothing
  return absl::MakeSpan(error_).subspan(chunk.first_element + part.chunk_offset, part.elements);
}

}  // namespace signpost
