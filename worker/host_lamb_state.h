// 1-bit LAMB's state on the host, and the CPU's kernels.

#ifndef SIGNPOST_WORKER_HOST_LAMB_STATE_H_
#define SIGNPOST_WORKER_HOST_LAMB_STATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/lamb.h"
#include "worker/host_adam_state.h"
#include "worker/lamb_state.h"
#include "worker/page_vector.h"

namespace signpost {

// Borrows `adam`, which has the rest of the state, and the threads.
class HostLambState final : public LambState {
 public:
  explicit HostLambState(HostAdamState& adam);

  void UpdateMoments(uint32_t chunk, Codec codec, RatesOf<kernels::LambRates> rates,
                     Payload answer) override;
  void FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                      Payload answer) override;
  absl::Span<const kernels::LambSums> Sums() override { return sums_; }
  void Step(uint32_t chunk, RatesOf<StepRates> rates) override;
  void StepAlongMomentum(uint32_t chunk, RatesOf<kernels::UpdateRates> rates) override;

  void StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) override;
  void GetFreshVariance(uint32_t chunk, float* numbers) const override;
  void SetFreshVariance(uint32_t chunk, const float* numbers) override;
  HostFloats FreshVariances() const override {
    return HostFloats(absl::MakeConstSpan(fresh_variance_));
  }

 private:
  void FollowSigns(uint32_t chunk, RatesOf<kernels::FreshRates> rates, Payload answer);
  absl::Span<float> FreshVarianceOf(uint32_t chunk, const Segment& segment);
  kernels::LambSums* SumsOf(uint32_t chunk, const Segment& segment);

  HostAdamState& adam_;
  PageVector<float> fresh_variance_;     // in layout order; takes no memory before the freeze
  std::vector<kernels::LambSums> sums_;  // by block, in layout order
  std::vector<size_t> first_block_;      // by chunk
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HOST_LAMB_STATE_H_
