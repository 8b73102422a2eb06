// Momentum that travels in another codec than one bit: what a worker compresses, and what it does
// with the answer. onebit.h has both in one pass with the compression itself.
//
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_MOMENTUM_H_
#define SIGNPOST_KERNELS_MOMENTUM_H_

#include "absl/types/span.h"

namespace signpost::kernels {

struct MomentumRates {
  float beta1 = 0.9f;
  float one_minus_beta1 = 0.1f;  // rounded from the double 1 - beta1
};

// The new momentum as far as this worker knows it, rounded after each operation:
//   input = (beta1 * m) + (one_minus_beta1 * g)
// All have as many elements as `gradient`.
void MomentumInput(MomentumRates rates, absl::Span<const float> gradient, const float* momentum,
                   absl::Span<float> input);

// The use of the answer, as ApplyMomentum (onebit.h) but with a dense momentum; rounded as written:
//   x = x - lr * (m * inverse_denominator + weight_decay * x)
// All have equal sizes.
void ApplyDenseMomentum(absl::Span<const float> momentum, float learning_rate, float weight_decay,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_MOMENTUM_H_
