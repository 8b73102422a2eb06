#include "worker/gpu_reduction_state.h"

#include <limits>
#include <vector>

#include "proto/codec.h"
#include "worker/gpu_chunks-inl.h"
#include "worker/page_vector.h"

namespace signpost {

GpuReductionState::GpuReductionState(const Layout& layout, Codec codec, uint32_t threads,
                                     kernels::cuda::Gpu& gpu)
    : codec_(codec),
      // A job may have a reduction for each bucket of its gradients: so few slots.
      chunks_(layout,
              {.codecs = {codec},
               .error = Loses(codec),
               .scratch = codec == CUSTOM,
               .packing_slots = 3,
               .applying_slots = 2},
              threads, gpu) {}

void GpuReductionState::Decompress(uint32_t chunk, const Payload& answer, Results results) {
  chunks_.Decompress(chunk, codec_, answer, [&](const Segment& segment) {
    return results[segment.tensor].data() + segment.tensor_offset;
  });
}

void GpuReductionState::SetToNan(uint32_t chunk, Results results) {
  // A NaN that a kernel made would have other bits than the host's.
  const Chunk& at = chunks_.layout().chunks()[chunk];
  const std::vector<float> nan(at.elements, std::numeric_limits<float>::quiet_NaN());
  for (const Segment& segment : at.segments) {
    chunks_.Write(results[segment.tensor].data() + segment.tensor_offset, nan.data(),
                  segment.elements * sizeof(float));
  }
}

void GpuReductionState::AddToError(uint32_t chunk, const uint8_t* payload,
                                   absl::Span<const Addition> additions) {
  if (!chunks_.ok()) return;
  GpuChunks::Slot& slot = chunks_.NextApplying();
  chunks_.AddToError(slot, chunk, codec_, payload, additions);
  chunks_.Release(slot);
}

HostFloats GpuReductionState::Errors() const {
  return Loses(codec_) ? chunks_.Errors() : HostFloats(PageVector<float>());
}

}  // namespace signpost
