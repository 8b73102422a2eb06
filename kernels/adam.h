// Adam's moments and update (Kingma & Ba, arXiv:1412.6980) with decoupled weight decay
// (arXiv:1711.05101), the freezing of the variance that ends 1-bit Adam's warm-up, and the dense
// steps that refresh it.
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_ADAM_H_
#define SIGNPOST_KERNELS_ADAM_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/dense.h"

namespace signpost::kernels {

// One step's scalars, each rounded once from double. Without bias correction step_size is the
// learning rate and inverse_sqrt_correction2 is 1.
struct AdamRates {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float step_size;                 // lr / (1 - beta1^t)
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^t)
  float epsilon;
  float decay;  // lr * weight_decay
};

// One Adam step over n elements with the averaged gradient, a dense payload; rounded as written:
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   v = (beta2 * v) + (one_minus_beta2 * (g * g))
//   x = (x - decay * x) - step_size * (m / ((sqrt(v) * inverse_sqrt_correction2) + epsilon))
void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance, absl::Span<float> parameters);

// The end of the warm-up: applies the bias corrections once, for good, and turns each variance into
// the frozen inverse denominator that ApplyMomentum (onebit.h) reads:
//   m = m * momentum_correction
//   v = v > above ? 1 / (sqrt(max(v * variance_correction, floor)) + epsilon) : 0
//                                      with above = lifts_zeros and floor > 0 ? -1 : 0
// An element that never had a gradient (v = 0) gets 0 and so no update: no 1/epsilon blow-up.
// Unless a codec may have taken its gradients for zero: lifts_zeros. The corrections are 1 / (1 -
// beta^t), or 1 without bias correction.
struct FreezeRates {
  float momentum_correction;
  float variance_correction;
  float floor;  // the least corrected variance; 0 for none
  float epsilon;
  bool lifts_zeros = false;
};
void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance);

// A dense step after the freeze, which refreshes the variance; rounded as written:
//   x = (x - decay * x) - learning_rate * max(-most, min(m * d, most))
//                                      with m after, d before this step, and most = most_update
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   d = kept_variance * v + one_minus_kept_variance * (g * g)
//                                      with r = 1 / d - epsilon; v = d > 0 ? r * r : 0
// `inverse_denominator` is as Freeze left it and becomes a variance, for Freeze to come.
// kept_variance is beta2^K with K steps from one refresh to the next; epsilon is that of the
// freeze.
struct RefreshRates {
  float beta1, one_minus_beta1;
  float kept_variance, one_minus_kept_variance;
  float learning_rate;
  float epsilon;
  float decay;                                                 // lr * weight_decay
  float most_update = std::numeric_limits<float>::infinity();  // UpdateRates' (momentum.h)
};
void RefreshStep(const RefreshRates& rates, DenseType type, const uint8_t* gradient,
                 absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                 absl::Span<float> parameters);

// What RefreshStep does to the denominators where there is no gradient to learn from:
//   d = d > 0 ? (1 / d - epsilon)^2 : 0
void Thaw(float epsilon, absl::Span<float> inverse_denominator);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_ADAM_H_
