// What 0/1 Adam has beside AdamState, and in the same place: the sum that an interval of local
// steps comes to, and the parameters that all workers had when it began. What is to be done, and at
// which rates, ZeroOneAdam knows.

#ifndef SIGNPOST_WORKER_ZERO_ONE_STATE_H_
#define SIGNPOST_WORKER_ZERO_ONE_STATE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/zero_one.h"
#include "proto/frame.h"
#include "proto/payload.h"
#include "worker/adam_state.h"
#include "worker/gradient.h"
#include "worker/optimizer.h"

namespace signpost {

// A function `rates` tells those of each tensor; kernels/zero_one.h has the equations. Not
// thread-safe. Whatever fails here, AdamState::Check knows.
class ZeroOneState {
 public:
  template <class Rates>
  using RatesOf = AdamState::RatesOf<Rates>;

  enum class Field { kAnchor, kSum };
  enum class Parameters { kMove, kStay };
  enum class Wanted { kKnown, kAll };

  virtual ~ZeroOneState() = default;

  // Takes in the answer of a round of gradients. The momentum must be dense.
  virtual void AdaptiveStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdaptiveRates> rates,
                            Payload answer) = 0;

  // An interval begins: the parameters are its anchor, the sum is zero, and the momentum dense.
  virtual void Begin(uint32_t chunk) = 0;
  // A local step.
  virtual void Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
                    absl::Span<const Gradient> gradients, Parameters parameters) = 0;
  // The first block that each Step left alone, if it did: once each, in the order of Steps. On a
  // GPU those of the last few need not be known; if all are wanted it waits for them, which takes
  // no time behind a round.
  virtual std::vector<BlockLeftAlone> TakeBlocksLeftAlone(Wanted wanted) = 0;
  virtual void SetSumToMomentum(uint32_t chunk) = 0;
  // A contribution of the sum, which is multiplied by `factor`; as AdamState::CompressGradient.
  virtual std::optional<uint32_t> CompressSum(uint32_t chunk, Codec codec, RatesOf<float> factor,
                                              uint8_t* payload, Optimizer::Later later) = 0;
  // The parameters are those of the anchor again.
  virtual void ReturnToAnchor(uint32_t chunk) = 0;

  // The chunk's numbers.
  virtual void Set(Field field, uint32_t chunk, const float* numbers) = 0;
  // All chunks', in layout order.
  virtual HostFloats All(Field field) const = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ZERO_ONE_STATE_H_
