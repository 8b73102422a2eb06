// LAMB's update (arXiv:1904.00962), and what 1-bit LAMB makes of a momentum that came as an answer
// (arXiv:2104.06069). A tensor's parameters move by a learning rate of its own, into which norms
// over all of it go, so each step has two halves: the first brings the moments up to date and sums
// squares by the block, the second moves parameters.
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_LAMB_H_
#define SIGNPOST_KERNELS_LAMB_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/onebit.h"

namespace signpost::kernels {

// One block's. Squares are summed in the lane order of block.h.
struct LambSums {
  float numerator = 0;       // of x, or of what the momentum alone makes of the update
  float update = 0;          // of the update
  float least_quotient = 0;  // see FollowMomentum
};

// One dense step's scalars, each rounded once from double. Without bias correction both corrections
// are 1.
struct LambRates {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float inverse_correction1;       // 1 / (1 - beta1^t)
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^t)
  float epsilon;
  float weight_decay;
};

// The first half of a dense step over n elements, with the averaged gradient, a dense payload;
// rounded as written:
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   v = (beta2 * v) + (one_minus_beta2 * (g * g))
//   update = ((m * inverse_correction1) / ((sqrt(v) * inverse_sqrt_correction2) + epsilon))
//            + (weight_decay * x)
// `sums` gets those of x and of the update, for each of BlockCount(n) blocks.
void UpdateMoments(const BlockRule& rule, const LambRates& rates, DenseType type,
                   const uint8_t* gradient, absl::Span<float> momentum, absl::Span<float> variance,
                   absl::Span<const float> parameters, LambSums* sums);

// The second half: x = x - step_size * update.
void LambStep(const LambRates& rates, float step_size, absl::Span<const float> momentum,
              absl::Span<const float> variance, absl::Span<float> parameters);

// Where the fresh variance begins: what Freeze (adam.h) is about to invert.
//   f = v > 0 ? max(v * variance_correction, floor) : 0
void FloorVariance(const FreezeRates& rates, absl::Span<const float> variance,
                   absl::Span<float> fresh_variance);

struct FreshRates {
  float beta1, inverse_one_minus_beta1;
  float beta2, one_minus_beta2;
  float epsilon;  // with which the variance was frozen
  float weight_decay;
};

// The first half of a one-bit step; the second is ApplyMomentum (onebit.h). The gradient is
// reconstructed from this step's momentum and the one before, which is dense in the first one-bit
// round, and keeps a fresh variance f; d is the inverse denominator that the frozen one has become.
// Rounded as written:
//   g = (m - (beta1 * m_before)) * inverse_one_minus_beta1
//   f = (beta2 * f) + (one_minus_beta2 * (g * g))
//   step = m * d
//   update = step + (weight_decay * x)
// `sums` gets those of step and update, and the least d * (sqrt(f) + epsilon) of those with d > 0,
// or infinity: 1 / that is the largest (sqrt(v) + epsilon) / (sqrt(f) + epsilon).
void FollowMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                    const float* momentum_before, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums);
void FollowMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                    OneBitView momentum_before, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums);
// The same where momenta travel in another codec: `momentum` is the one before, and becomes
// `answer`. The second half is ApplyDenseMomentum (momentum.h).
void FollowMomentum(const BlockRule& rule, const FreshRates& rates, const float* answer,
                    absl::Span<float> momentum, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_LAMB_H_
