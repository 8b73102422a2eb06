// 0/1 Adam's state on a GPU, and the CUDA kernels.

#ifndef SIGNPOST_WORKER_GPU_ZERO_ONE_STATE_H_
#define SIGNPOST_WORKER_GPU_ZERO_ONE_STATE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "worker/gpu_adam_state.h"
#include "worker/gpu_chunks.h"
#include "worker/zero_one_state.h"

namespace signpost {

// Borrows `adam`, which has the rest of the state, the slots and the stream. Takes eight bytes more
// for each parameter; when there is not so much, adam.Check says so.
class GpuZeroOneState final : public ZeroOneState {
 public:
  explicit GpuZeroOneState(GpuAdamState& adam);
  // Waits for the GPU.
  ~GpuZeroOneState() override;

  void AdaptiveStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdaptiveRates> rates,
                    Payload answer) override;

  void Begin(uint32_t chunk) override;
  void Step(uint32_t chunk, RatesOf<kernels::LocalRates> rates,
            absl::Span<const Gradient> gradients, Parameters parameters) override;
  std::vector<BlockLeftAlone> TakeBlocksLeftAlone(Wanted wanted) override;
  void SetSumToMomentum(uint32_t chunk) override;
  std::optional<uint32_t> CompressSum(uint32_t chunk, Codec codec, RatesOf<float> factor,
                                      uint8_t* payload, Optimizer::Later later) override;
  void ReturnToAnchor(uint32_t chunk) override;

  // Both wait for the GPU.
  void Set(Field field, uint32_t chunk, const float* numbers) override;
  HostFloats All(Field field) const override { return chunks_.Copy(MemoryOf(field)); }

 private:
  using Gpu = kernels::cuda::Gpu;
  using Memory = GpuChunks::Memory;

  const Memory& MemoryOf(Field field) const { return field == Field::kAnchor ? anchor_ : sum_; }
  float* Anchor(const Segment& segment) const { return chunks_.In(anchor_, segment); }
  float* Sum(const Segment& segment) const { return chunks_.In(sum_, segment); }
  // So many numbers, on the GPU.
  void Copy(float* to, const float* from, size_t elements);

  // A Step whose slot has its bad block, or will have, since nobody has looked yet.
  struct UnderWay {
    GpuChunks::Slot* slot;
    uint32_t chunk;
  };
  // Waits for it.
  void EndOldest();

  GpuAdamState& adam_;
  GpuChunks& chunks_;                    // adam_'s
  Memory anchor_, sum_;                  // a number for each element
  std::vector<Gradient> sum_of_tensor_;  // of sum_
  std::vector<UnderWay> under_way_;      // oldest first; at most as many as there are slots
  std::vector<BlockLeftAlone> left_alone_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_ZERO_ONE_STATE_H_
