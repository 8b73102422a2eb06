// The functions of zero_one.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_ZERO_ONE_REFERENCE_H_
#define SIGNPOST_KERNELS_ZERO_ONE_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/zero_one.h"

namespace signpost::kernels::reference {

void AdaptiveStep(const AdaptiveRates& rates, DenseType type, const uint8_t* gradient,
                  absl::Span<float> momentum, absl::Span<float> variance,
                  absl::Span<float> parameters);
size_t LocalStep(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient,
                 absl::Span<float> momentum, absl::Span<float> accumulated,
                 absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_ZERO_ONE_REFERENCE_H_
