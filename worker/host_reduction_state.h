// A reduction's error on the host, beside the tensors.

#ifndef SIGNPOST_WORKER_HOST_REDUCTION_STATE_H_
#define SIGNPOST_WORKER_HOST_REDUCTION_STATE_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/onebit.h"
#include "proto/codec.h"
#include "proto/layout.h"
#include "worker/chunk_crew.h"
#include "worker/page_vector.h"
#include "worker/reduction_state.h"

namespace signpost {

// Borrows the layout. Works with `threads` threads, the caller's included. What it compresses is
// done when Compress returns.
class HostReductionState final : public ReductionState {
 public:
  HostReductionState(const Layout& layout, Codec codec, uint32_t threads);

  absl::Status Check() const override { return absl::OkStatus(); }
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return CheckOnHost(gradient);
  }
  bool CanCompress() const override { return true; }
  absl::Status SetStream(kernels::cuda::Stream) override { return absl::OkStatus(); }
  std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                   uint8_t* payload, Optimizer::Later later) override;

  void Decompress(uint32_t chunk, const Payload& answer, Results results) override;
  void SetToNan(uint32_t chunk, Results results) override;
  void AddToError(uint32_t chunk, const uint8_t* payload,
                  absl::Span<const Addition> additions) override;

  HostFloats Errors() const override { return HostFloats(absl::MakeConstSpan(error_)); }

 private:
  absl::Span<float> ErrorOf(const Chunk& chunk, const Segment& part);

  const Layout& layout_;
  const NumberCodec& codec_;
  const kernels::BlockRule rule_;
  PageVector<float> error_;  // in layout order; empty with fp32
  ChunkCrew crew_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HOST_REDUCTION_STATE_H_
