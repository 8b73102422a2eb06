// The functions of momentum.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_MOMENTUM_REFERENCE_H_
#define SIGNPOST_KERNELS_MOMENTUM_REFERENCE_H_

#include "absl/types/span.h"
#include "kernels/momentum.h"

namespace signpost::kernels::reference {

void MomentumInput(MomentumRates rates, absl::Span<const float> gradient, const float* momentum,
                   absl::Span<float> input);
void ApplyDenseMomentum(absl::Span<const float> momentum, const UpdateRates& rates,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_MOMENTUM_REFERENCE_H_
