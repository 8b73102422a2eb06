// 1-bit LAMB (arXiv:2104.06069, Algorithm 2): 1-bit Adam, with a learning rate for each tensor that
// the tensor itself scales.
//
// In the warm-up it is multiplied by the trust ratio ||x|| / ||update||, clipped (LAMB,
// arXiv:1904.00962). At the freeze step the ratios' moving average is frozen together with the
// variance, and from then on multiplied by a factor that makes up for how old the variance is: the
// largest (sqrt(v) + epsilon) / (sqrt(f) + epsilon) of the tensor, where f is a fresh variance, of
// gradients that are reconstructed from the momentum. A refresh of the variance is as 1-bit Adam's;
// fresh variance and factor begin anew with it.
//
// A ratio needs all chunks of a tensor: parameters stay until all answers of a step are there, and
// move in EndStep. Chunks that were skipped are in no norm.
//
// Where the paper says nothing: a step in which a norm is zero has the ratio 1, and no part in the
// average; the average is corrected for its start at zero, as moments are (bias_correction); weight
// decay, which no variance has to do with, keeps a factor of 1, by its share of the update.

#ifndef SIGNPOST_WORKER_ONEBIT_LAMB_H_
#define SIGNPOST_WORKER_ONEBIT_LAMB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "kernels/lamb.h"
#include "worker/lamb_state.h"
#include "worker/onebit_adam.h"

namespace signpost {

// As OneBitAdam.
class OneBitLamb final : public OneBitAdam {
 public:
  // Requires options.lamb.
  OneBitLamb(const Layout& layout, const OptimizerOptions& options,
             std::vector<Parameter> parameters, uint32_t threads = 1,
             kernels::cuda::Gpu* gpu = nullptr);

  void Restore(OptimizerState state) override;

  // The fresh variance comes last.
  Payload State(uint32_t chunk) const override;
  void SetState(uint32_t chunk, absl::Span<const uint8_t> state) override;

  void EndStep() override;
  bool EndsSteps() const override { return true; }
  // Whether the chunk's parameters have still to move.
  bool AwaitsEndStep(uint32_t chunk) const { return awaits_end_[chunk]; }

  void EndFollowedStep(uint32_t chunk, uint64_t step, const StepRates& rates,
                       const TensorScales& after) override;

  HostFloats fresh_variance() const override;

 protected:
  void ApplyGradient(uint32_t chunk, Payload answer) override;
  void ApplyMomentum(uint32_t chunk, Payload answer) override;
  double ScaleOf(uint32_t tensor) const override;
  void BeforeFreeze(AdamState::RatesOf<kernels::FreezeRates> rates) override;

 private:
  // Of the parts of a tensor that are in the step: sums over their blocks.
  struct Norms;

  bool HasFrozen() const;  // so that there is a fresh variance
  std::vector<Norms> NormsOfTensors();
  void UpdateRatio(const Norms& norms, TensorScale& scale) const;
  void UpdateFactor(const Norms& norms, TensorScale& scale) const;
  // The chunk's parameters, by what ScaleOf says.
  void Step(uint32_t chunk);
  kernels::LambRates LambRatesOf(uint32_t tensor) const;
  kernels::FreshRates FreshRatesOf(uint32_t tensor) const;

  const std::unique_ptr<LambState> lamb_;
  std::vector<bool> awaits_end_;  // by chunk
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ONEBIT_LAMB_H_
