// What 1-bit LAMB has beside AdamState, and in the same place: a fresh variance, and the sums that
// trust ratios and factors are made of. What is to be done, and at which rates, OneBitLamb knows.

#ifndef SIGNPOST_WORKER_LAMB_STATE_H_
#define SIGNPOST_WORKER_LAMB_STATE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/lamb.h"
#include "proto/frame.h"
#include "proto/payload.h"
#include "worker/adam_state.h"

namespace signpost {

// A function `rates` tells those of each tensor; kernels/lamb.h has the equations. Not thread-safe.
// Whatever fails here, AdamState::Check knows.
class LambState {
 public:
  template <class Rates>
  using RatesOf = AdamState::RatesOf<Rates>;

  struct StepRates {
    kernels::LambRates rates;
    float step_size;
  };

  virtual ~LambState() = default;

  // The first halves of steps, with their answers, in each of the codecs: a gradient, and the
  // momentum afterwards. The momentum must be dense, but for one that follows another of one bit.
  // Parameters stay.
  virtual void UpdateMoments(uint32_t chunk, Codec codec, RatesOf<kernels::LambRates> rates,
                             Payload answer) = 0;
  virtual void FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                              Payload answer) = 0;
  // What the last of these gave of each block, in layout order. Until the next one.
  virtual absl::Span<const kernels::LambSums> Sums() = 0;
  // The second halves.
  virtual void Step(uint32_t chunk, RatesOf<StepRates> rates) = 0;
  virtual void StepAlongMomentum(uint32_t chunk, RatesOf<kernels::UpdateRates> rates) = 0;

  // The fresh variance begins as the one that AdamState::Freeze is about to invert.
  virtual void StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) = 0;
  // The chunk's.
  virtual void GetFreshVariance(uint32_t chunk, float* numbers) const = 0;
  virtual void SetFreshVariance(uint32_t chunk, const float* numbers) = 0;
  // All chunks', in layout order.
  virtual HostFloats FreshVariances() const = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_LAMB_STATE_H_
