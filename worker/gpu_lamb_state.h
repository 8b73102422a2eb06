// 1-bit LAMB's state on a GPU, and the CUDA kernels.

#ifndef SIGNPOST_WORKER_GPU_LAMB_STATE_H_
#define SIGNPOST_WORKER_GPU_LAMB_STATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "kernels/lamb.h"
#include "worker/gpu_adam_state.h"
#include "worker/gpu_chunks.h"
#include "worker/lamb_state.h"

namespace signpost {

// Borrows `adam`, which has the rest of the state, the slots and the stream. Takes four bytes more
// for each parameter; when there is not so much, adam.Check says so.
class GpuLambState final : public LambState {
 public:
  explicit GpuLambState(GpuAdamState& adam);
  ~GpuLambState() override { chunks_.Await(); }

  void UpdateMoments(uint32_t chunk, Codec codec, RatesOf<kernels::LambRates> rates,
                     Payload answer) override;
  void FollowMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::FreshRates> rates,
                      Payload answer) override;
  absl::Span<const kernels::LambSums> Sums() override;  // waits for the GPU
  void Step(uint32_t chunk, RatesOf<StepRates> rates) override;
  void StepAlongMomentum(uint32_t chunk, RatesOf<kernels::UpdateRates> rates) override;

  void StartFreshVariance(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) override;
  // All of these wait for the GPU.
  void GetFreshVariance(uint32_t chunk, float* numbers) const override;
  void SetFreshVariance(uint32_t chunk, const float* numbers) override;
  HostFloats FreshVariances() const override { return chunks_.Copy(fresh_variance_); }

 private:
  using Gpu = kernels::cuda::Gpu;
  using Memory = GpuChunks::Memory;

  void FollowSigns(uint32_t chunk, RatesOf<kernels::FreshRates> rates, Payload answer);
  float* FreshVariance(const Segment& segment) const {
    return chunks_.In(fresh_variance_, segment);
  }
  kernels::LambSums* SumsOf(uint32_t chunk, const Segment& segment) const;

  GpuAdamState& adam_;
  GpuChunks& chunks_;                    // adam_'s
  Memory fresh_variance_;                // a number for each element
  Memory sums_;                          // by block, in layout order
  std::vector<kernels::LambSums> read_;  // from sums_
  std::vector<size_t> first_block_;      // by chunk
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_LAMB_STATE_H_
