// What the steps of 0/1 Adam (arXiv:2202.06009) do to a worker's state: those before the variance
// is frozen, and the local ones after it, in which nothing is sent.
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_ZERO_ONE_H_
#define SIGNPOST_KERNELS_ZERO_ONE_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense.h"

namespace signpost::kernels {

// One step's scalars before the freeze, each rounded once from double. Without bias correction
// step_size is the learning rate and inverse_sqrt_correction2 is 1.
struct AdaptiveRates {
  float beta1, one_minus_beta1;
  // beta2^K and 1 - beta2^K with K steps from one update of the variance to the next.
  float kept_variance, one_minus_kept_variance;
  float step_size;                 // lr / (1 - beta1^t)
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^t) as of the newest update
  float floor;                     // the least variance that an element counts as, uncorrected
  float epsilon;
  float decay;  // lr * weight_decay
  bool updates_variance;
  bool lifts_zeros = false;  // FreezeRates' (adam.h)
};

// A step before the freeze over n elements with the averaged gradient, a dense payload; rounded as
// written:
//   v = updates_variance ? (kept_variance * v) + (one_minus_kept_variance * (g * g)) : v
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   x = (x - decay * x) - step_size * ratio
//       with ratio = v > above
//                    ? m / ((sqrt(max(v, floor)) * inverse_sqrt_correction2) + epsilon) : 0
//       and above = lifts_zeros and floor > 0 ? -1 : 0
// Without lifts_zeros an element that never had a gradient (v = 0) gets no update but the decay, as
// after Freeze (adam.h). Where no v is 0, and without a floor, a step that updates the variance is
// AdamStep's.
void AdaptiveStep(const AdaptiveRates& rates, DenseType type, const uint8_t* gradient,
                  absl::Span<float> momentum, absl::Span<float> variance,
                  absl::Span<float> parameters);

struct LocalRates {
  float beta1, one_minus_beta1;
  float learning_rate, weight_decay;
  float most_update = std::numeric_limits<float>::infinity();  // UpdateRates' (momentum.h)
};

// A step that sends nothing, with this worker's own gradient; rounded as written:
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   u = u + (learning_rate * m)
//   x = x - (learning_rate * (max(-most, min(m * d, most)) + (weight_decay * x)))
// with most = most_update. d are inverse denominators as Freeze (adam.h) leaves them; x moves as by
// ApplyDenseMomentum (momentum.h). `parameters` may be empty: then d is not looked at. All others
// have as many elements as `gradient`.
//
// A block with an element of the gradient that is not finite or exceeds kMaxDense in magnitude is
// left alone: its m, u and x stay. Returns the index of the first such block, or BlockCount(n).
size_t LocalStep(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient,
                 absl::Span<float> momentum, absl::Span<float> accumulated,
                 absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_ZERO_ONE_H_
