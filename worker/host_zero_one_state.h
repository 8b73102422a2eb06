// 0/1 Adam's state on the host, and the CPU's kernels.

#ifndef SIGNPOST_WORKER_HOST_ZERO_ONE_STATE_H_
#define SIGNPOST_WORKER_HOST_ZERO_ONE_STATE_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "worker/host_adam_state.h"
#include "worker/page_vector.h"
#include "worker/zero_one_state.h"

namespace signpost {

// Borrows `adam`, which has the rest of the state, and the crew. Takes no memory before the first
// local step.
class HostZeroOneState final : public ZeroOneState {
 public:
  explicit HostZeroOneState(HostAdamState& adam);

  void AdaptiveStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdaptiveRates> rates,
                    Payload answer) override;

  void Begin(uint32_t chunk) override;
  void Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
            absl::Span<const Gradient> gradients, Parameters parameters) override;
  std::vector<BlockLeftAlone> TakeBlocksLeftAlone(Wanted) override {
    return std::exchange(left_alone_, {});
  }
  void SetSumToMomentum(uint32_t chunk) override;
  std::optional<uint32_t> CompressSum(uint32_t chunk, Codec codec, RatesOf<float> factor,
                                      uint8_t* payload, Optimizer::Later later) override;
  void ReturnToAnchor(uint32_t chunk) override;

  void Set(Field field, uint32_t chunk, const float* numbers) override;
  HostFloats All(Field field) const override {
    return HostFloats(absl::MakeConstSpan(field == Field::kAnchor ? anchor_ : sum_));
  }

 private:
  HostAdamState& adam_;
  PageVector<float> anchor_, sum_;       // in layout order
  std::vector<Gradient> sum_of_tensor_;  // of sum_
  std::vector<BlockLeftAlone> left_alone_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HOST_ZERO_ONE_STATE_H_
