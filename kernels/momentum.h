// Momentum that travels in another codec than one bit: what a worker compresses, and what it does
// with the answer. onebit.h has both in one pass with the compression itself.
//
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_MOMENTUM_H_
#define SIGNPOST_KERNELS_MOMENTUM_H_

#include <limits>

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

// The rates of a step along the momentum. No element moves by more than learning_rate * most_update,
// weight decay apart: as long as the variance fits the gradients, Adam's updates are a few learning
// rates at most, and larger ones come from a frozen variance that no longer fits.
struct UpdateRates {
  float learning_rate = 0;
  float weight_decay = 0;
  float most_update = std::numeric_limits<float>::infinity();
  // The caller's promise that no inverse denominator is larger: ApplyMomentum (onebit.h) looks at
  // single updates only in blocks where one may be above the bound. A promise that does not hold
  // lifts the bound there.
  float most_inverse_denominator = std::numeric_limits<float>::infinity();
};

// The use of the answer, as ApplyMomentum (onebit.h) but with a dense momentum; rounded as written:
//   x = x - lr * (max(-most, min(m * inverse_denominator, most)) + weight_decay * x)
// with most = most_update. All have equal sizes.
void ApplyDenseMomentum(absl::Span<const float> momentum, const UpdateRates& rates,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_MOMENTUM_H_
