// 1-bit Adam's state on the host, and the CPU's kernels.

#ifndef SIGNPOST_WORKER_HOST_ADAM_STATE_H_
#define SIGNPOST_WORKER_HOST_ADAM_STATE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/onebit.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "worker/adam_state.h"
#include "worker/chunk_crew.h"
#include "worker/page_vector.h"

namespace signpost {

// Borrows layout and values: values[i] is tensor i's parameters. Compresses and applies each chunk
// with `threads` threads, the caller's included.
class HostAdamState final : public AdamState {
 public:
  HostAdamState(const Layout& layout, std::vector<absl::Span<float>> values, uint32_t threads);

  absl::Status Check() const override { return absl::OkStatus(); }
  // INVALID_ARGUMENT for one that is not fp32.
  absl::Status CheckGradient(const Gradient& gradient) const override;
  absl::Status SetStream(kernels::cuda::Stream) override { return absl::OkStatus(); }

  bool CanCompress() const override { return true; }
  // All three are done when they return.
  std::optional<uint32_t> CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later) override;
  std::optional<uint32_t> CompressApart(uint32_t chunk, Codec codec, RatesOf<float> unit,
                                        absl::Span<const Gradient> gradients, uint8_t* payload,
                                        Optimizer::Later later) override;
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

  double SumOfVariance(uint32_t tensor) override;
  void Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) override;
  void Thaw(uint32_t chunk, RatesOf<float> epsilon) override;
  void Scale(Field field, uint32_t chunk, RatesOf<float> factor) override;

  void Get(Field field, uint32_t chunk, float* numbers) const override;
  void Set(Field field, uint32_t chunk, const float* numbers) override;
  HostFloats Errors() const override { return HostFloats(absl::MakeConstSpan(error_)); }
  HostFloats Variances() const override { return HostFloats(absl::MakeConstSpan(variance_)); }
  HostFloats ValuesOf(uint32_t tensor) const override { return HostFloats(values_[tensor]); }
  std::unique_ptr<LambState> NewLambState() override;
  std::unique_ptr<ZeroOneState> NewZeroOneState() override;

 private:
  friend class HostLambState;     // the rest of 1-bit LAMB's state
  friend class HostZeroOneState;  // and of 0/1 Adam's

  std::optional<uint32_t> CompressSigns(uint32_t chunk, RatesOf<kernels::MomentumRates> rates,
                                        absl::Span<const Gradient> gradients, uint8_t* payload);
  void ApplySigns(uint32_t chunk, RatesOf<kernels::UpdateRates> rates, Payload answer);
  // A mean of gradients, in parts, on any of the crew's threads: as it came where that is dense,
  // and decompressed block by block otherwise.
  void ForEachGradient(
      uint32_t chunk, Codec codec, const Payload& answer,
      absl::FunctionRef<void(const Segment& part, kernels::DenseType type, const uint8_t* gradient)>
          use);
  // What the answer has for each block of the chunk, likewise.
  void ForEachDecompressedBlock(
      uint32_t chunk, Codec codec, const Payload& answer,
      absl::FunctionRef<void(const Segment& block, absl::Span<const float> numbers)> use);
  void GetMomentum(uint32_t chunk, float* numbers) const;
  // Parts of vectors that belong to a segment of the chunk.
  absl::Span<float> ValuesOf(const Segment& segment) const;
  absl::Span<float> InLayoutOrder(PageVector<float>& numbers, uint32_t chunk,
                                  const Segment& segment);
  absl::Span<float> MomentumOf(uint32_t chunk, const Segment& segment);
  absl::Span<float> VarianceOf(uint32_t chunk, const Segment& segment) {
    return InLayoutOrder(variance_, chunk, segment);
  }
  absl::Span<float> ErrorOf(uint32_t chunk, const Segment& segment) {
    return InLayoutOrder(error_, chunk, segment);
  }
  absl::Span<float> FieldOf(Field field, uint32_t chunk, const Segment& segment);

  const Layout& layout_;
  const kernels::BlockRule rule_;
  const std::vector<absl::Span<float>> values_;  // by tensor
  std::vector<size_t> first_element_;            // likewise, in layout order

  PageVector<float> error_;     // in layout order; takes no memory before it is written
  PageVector<float> variance_;  // in layout order
  // Per chunk: dense until its first one-bit answer, then that answer's payload as it came (1/32 of
  // the memory).
  std::vector<PageVector<float>> dense_momentum_;
  std::vector<Payload> signed_momentum_;
  bool keeps_dense_momentum_ = false;  // its memory, for the next time

  ChunkCrew crew_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HOST_ADAM_STATE_H_
