// Where 1-bit Adam's state is, and what is done to it there: on the host (HostAdamState) or on a
// GPU (GpuAdamState). What is to be done, and at which rates, OneBitAdam knows.

#ifndef SIGNPOST_WORKER_ADAM_STATE_H_
#define SIGNPOST_WORKER_ADAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/onebit.h"
#include "kernels/types_cuda.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "worker/addition.h"
#include "worker/gradient.h"
#include "worker/host_floats.h"
#include "worker/optimizer.h"

namespace signpost {

class LambState;
class ZeroOneState;

// Parameters, momentum, variance and error of all tensors. A function `rates` tells those of each
// tensor; kernels/ has the equations. Not thread-safe.
class AdamState {
 public:
  template <class Rates>
  using RatesOf = absl::FunctionRef<Rates(uint32_t tensor)>;

  enum class Field { kParameters, kMomentum, kVariance, kError };

  virtual ~AdamState() = default;

  // As Optimizer's. Whatever fails here, fails there.
  virtual absl::Status Check() const = 0;
  virtual absl::Status CheckGradient(const Gradient& gradient) const = 0;
  virtual bool CanCompress() const = 0;
  virtual absl::Status SetStream(kernels::cuda::Stream stream) = 0;

  // A contribution of gradients; as Optimizer::Compress. Without the error only what loses nothing.
  virtual std::optional<uint32_t> CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                                   absl::Span<const Gradient> gradients,
                                                   uint8_t* payload, Optimizer::Later later) = 0;
  // One apart from the error, which takes what the codec loses times `unit`: error = error + unit *
  // loss.
  virtual std::optional<uint32_t> CompressApart(uint32_t chunk, Codec codec, RatesOf<float> unit,
                                                absl::Span<const Gradient> gradients,
                                                uint8_t* payload, Optimizer::Later later) = 0;
  // One of the momentum.
  virtual std::optional<uint32_t> CompressMomentum(uint32_t chunk, Codec codec,
                                                   RatesOf<kernels::MomentumRates> rates,
                                                   absl::Span<const Gradient> gradients,
                                                   uint8_t* payload, Optimizer::Later later) = 0;

  // Answers, in each of the codecs. The momentum must be dense, but for ApplyMomentum, which leaves
  // one that came in one bit as it is.
  virtual void AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                        Payload answer) = 0;
  virtual void ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::UpdateRates> rates,
                             Payload answer) = 0;
  virtual void RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                           Payload answer) = 0;
  virtual void MakeMomentumDense(uint32_t chunk) = 0;

  // error = error + factor * what a payload of that codec has packed there, and then
  // error = error + factor * momentum.
  virtual void AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                          absl::Span<const Addition> of_payload,
                          absl::Span<const Addition> of_momentum) = 0;

  // Of the tensor's variances, in the order of kernels/sum.h.
  virtual double SumOfVariance(uint32_t tensor) = 0;
  virtual void Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) = 0;
  // Back from inverse denominators to variances.
  virtual void Thaw(uint32_t chunk, RatesOf<float> epsilon) = 0;
  virtual void Scale(Field field, uint32_t chunk, RatesOf<float> factor) = 0;

  // The chunk's numbers, the momentum dense whatever form it has, with the signs of its zeros. What
  // they are after a failure, Check knows.
  virtual void Get(Field field, uint32_t chunk, float* numbers) const = 0;
  virtual void Set(Field field, uint32_t chunk, const float* numbers) = 0;
  // All chunks', in layout order.
  virtual HostFloats Errors() const = 0;
  virtual HostFloats Variances() const = 0;
  virtual HostFloats ValuesOf(uint32_t tensor) const = 0;

  // What 1-bit LAMB has beside, in the same place; it borrows this state. Once.
  virtual std::unique_ptr<LambState> NewLambState() = 0;
  // What 0/1 Adam has beside, likewise.
  virtual std::unique_ptr<ZeroOneState> NewZeroOneState() = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ADAM_STATE_H_
