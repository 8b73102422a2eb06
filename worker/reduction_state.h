// Where a reduction's error and tensors are, and what is done to them there: on the host
// (HostReductionState) or on a GPU (GpuReductionState).

#ifndef SIGNPOST_WORKER_REDUCTION_STATE_H_
#define SIGNPOST_WORKER_REDUCTION_STATE_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/types_cuda.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "worker/addition.h"
#include "worker/gradient.h"
#include "worker/host_floats.h"
#include "worker/optimizer.h"

namespace signpost {

// Not thread-safe. Tensors are where the error is: results[i] is tensor i's.
class ReductionState {
 public:
  using Results = absl::Span<const absl::Span<float>>;

  virtual ~ReductionState() = default;

  // As Optimizer's.
  virtual absl::Status Check() const = 0;
  virtual absl::Status CheckGradient(const Gradient& gradient) const = 0;
  virtual bool CanCompress() const = 0;
  virtual absl::Status SetStream(kernels::cuda::Stream stream) = 0;
  virtual std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                           uint8_t* payload, Optimizer::Later later) = 0;

  // An answer becomes the chunk's results.
  virtual void Decompress(uint32_t chunk, const Payload& answer, Results results) = 0;
  // All of the chunk's results become NaN, with the same bits everywhere.
  virtual void SetToNan(uint32_t chunk, Results results) = 0;
  // error = error + factor * what the payload has packed there. Not with fp32, which has no error.
  virtual void AddToError(uint32_t chunk, const uint8_t* payload,
                          absl::Span<const Addition> additions) = 0;

  virtual HostFloats Errors() const = 0;  // in layout order; empty with fp32
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_REDUCTION_STATE_H_
