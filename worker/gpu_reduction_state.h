// A reduction's error on a GPU, beside the tensors, and the CUDA kernels: packed numbers alone
// cross to the host and back. Which stream work goes on, and what waits for the GPU, gpu_chunks.h
// says.

#ifndef SIGNPOST_WORKER_GPU_REDUCTION_STATE_H_
#define SIGNPOST_WORKER_GPU_REDUCTION_STATE_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "worker/gpu_chunks.h"
#include "worker/reduction_state.h"

namespace signpost {

// Borrows layout and gpu.
class GpuReductionState final : public ReductionState {
 public:
  // Takes all memory at once, 4 bytes for each element, unless the codec is fp32, and those of five
  // chunks' payloads; when there is not so much, Check says so from the beginning. A codec from
  // outside has `threads` threads, the caller's included.
  GpuReductionState(const Layout& layout, Codec codec, uint32_t threads, kernels::cuda::Gpu& gpu);

  absl::Status Check() const override { return chunks_.Check(); }
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return chunks_.CheckGradient(gradient);
  }
  bool CanCompress() const override { return chunks_.CanCompress(); }
  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return chunks_.SetStream(stream);
  }
  std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                   uint8_t* payload, Optimizer::Later later) override {
    return chunks_.CompressGradient(chunk, codec_, /*adds_error=*/true, gradients, payload,
                                    std::move(later));
  }

  void Decompress(uint32_t chunk, const Payload& answer, Results results) override;
  void SetToNan(uint32_t chunk, Results results) override;  // waits for the GPU
  void AddToError(uint32_t chunk, const uint8_t* payload,
                  absl::Span<const Addition> additions) override;

  HostFloats Errors() const override;  // waits for the GPU

 private:
  const Codec codec_;
  GpuChunks chunks_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_REDUCTION_STATE_H_
