// The functions of adam.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_ADAM_REFERENCE_H_
#define SIGNPOST_KERNELS_ADAM_REFERENCE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/dense.h"

namespace signpost::kernels::reference {

void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance, absl::Span<float> parameters);
void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance);
void RefreshStep(const RefreshRates& rates, DenseType type, const uint8_t* gradient,
                 absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                 absl::Span<float> parameters);
void Thaw(float epsilon, absl::Span<float> inverse_denominator);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_ADAM_REFERENCE_H_
