// 1-bit Adam's state on a GPU, beside the parameters, and the CUDA kernels. Which stream they go
// on, what crosses to the host, and what waits for the GPU, gpu_chunks.h says.

#ifndef SIGNPOST_WORKER_GPU_ADAM_STATE_H_
#define SIGNPOST_WORKER_GPU_ADAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "worker/adam_state.h"
#include "worker/gpu_chunks.h"

namespace signpost {

// Borrows layout, values and gpu: values[i] is tensor i's parameters, on the GPU. All memory that
// it needs it takes at once; when there is not so much, Check says so from the beginning. A codec
// from outside has `threads` threads, the caller's included.
class GpuAdamState final : public AdamState {
 public:
  // In which gradients travel before the freeze, the momentum after it, and gradients that are
  // apart from the errors.
  struct Codecs {
    Codec gradient = FLOAT32;
    Codec momentum = ONE_BIT;
    Codec apart = FLOAT32;
    bool settles = false;  // whether the momentum also travels in `apart`
  };
  GpuAdamState(const Layout& layout, std::vector<absl::Span<float>> values, const Codecs& codecs,
               uint32_t threads, kernels::cuda::Gpu& gpu);

  absl::Status Check() const override { return chunks_.Check(); }
  // As GpuChunks'.
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return chunks_.CheckGradient(gradient);
  }
  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return chunks_.SetStream(stream);
  }

  bool CanCompress() const override { return chunks_.CanCompress(); }
  std::optional<uint32_t> CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later) override {
    return chunks_.CompressGradient(chunk, codec, adds_error, gradients, payload, std::move(later));
  }
  std::optional<uint32_t> CompressApart(uint32_t chunk, Codec codec, RatesOf<float> unit,
                                        absl::Span<const Gradient> gradients, uint8_t* payload,
                                        Optimizer::Later later) override {
    return chunks_.CompressApart(chunk, codec, unit, gradients, payload, std::move(later));
  }
  std::optional<uint32_t> CompressMomentum(uint32_t chunk, Codec codec,
                                           RatesOf<kernels::MomentumRates> rates,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later) override;

  void AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                Payload answer) override;
  void ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<kernels::UpdateRates> rates,
                     Payload answer) override;
  void RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                   Payload answer) override;
  void MakeMomentumDense(uint32_t chunk) override;

  void AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                  absl::Span<const Addition> of_payload,
                  absl::Span<const Addition> of_momentum) override;

  double SumOfVariance(uint32_t tensor) override;  // waits for the GPU
  void Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) override;
  void Thaw(uint32_t chunk, RatesOf<float> epsilon) override;
  void Scale(Field field, uint32_t chunk, RatesOf<float> factor) override;

  // All of these wait for the GPU.
  void Get(Field field, uint32_t chunk, float* numbers) const override;
  void Set(Field field, uint32_t chunk, const float* numbers) override;
  HostFloats Errors() const override { return chunks_.Errors(); }
  HostFloats Variances() const override { return chunks_.Copy(variance_); }
  HostFloats ValuesOf(uint32_t tensor) const override {
    return chunks_.Copy(values_[tensor].data(), values_[tensor].size());
  }
  std::unique_ptr<LambState> NewLambState() override;
  std::unique_ptr<ZeroOneState> NewZeroOneState() override;

 private:
  friend class GpuLambState;     // the rest of 1-bit LAMB's state
  friend class GpuZeroOneState;  // and of 0/1 Adam's

  using Gpu = kernels::cuda::Gpu;
  using Memory = GpuChunks::Memory;
  using Slot = GpuChunks::Slot;

  void TakeMemory(const Codecs& codecs);
  void CompressSigns(Slot& slot, uint32_t chunk, RatesOf<kernels::MomentumRates> rates,
                     absl::Span<const Gradient> gradients, uint8_t* out,
                     uint32_t* first_not_packed);
  void ApplySigns(uint32_t chunk, RatesOf<kernels::UpdateRates> rates, Payload answer);

  // What moves a segment's parameters along its momentum, in each of its forms.
  kernels::cuda::ApplyDenseSegment DenseRow(const Segment& segment,
                                            const kernels::UpdateRates& rates) const;
  kernels::cuda::ApplySegment SignedRow(uint32_t chunk, const Segment& segment,
                                        const kernels::UpdateRates& rates) const;

  const Chunk& ChunkAt(uint32_t chunk) const { return chunks_.layout().chunks()[chunk]; }
  float* Variance(const Segment& segment) const { return chunks_.In(variance_, segment); }
  float* DenseMomentum(const Segment& segment) const {
    return chunks_.In(dense_momentum_, segment);
  }
  float* Values(const Segment& segment) const;
  float* DenseField(Field field, const Segment& segment) const;
  kernels::OneBitView SignedMomentum(uint32_t chunk, const Segment& segment) const;

  const std::vector<absl::Span<float>> values_;  // by tensor
  Memory variance_;
  Memory dense_momentum_;
  Memory signed_momentum_;                // each chunk's one-bit payload, from first_signed_ on
  std::vector<size_t> first_signed_;      // by chunk
  std::vector<bool> momentum_is_signed_;  // by chunk: which of the two counts
  Memory sums_;                           // what it takes to make a sum, and the sum
  GpuChunks chunks_;                      // the last: when it goes, nothing uses the rest any more
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_ADAM_STATE_H_
