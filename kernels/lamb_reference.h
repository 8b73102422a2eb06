// The functions of lamb.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_LAMB_REFERENCE_H_
#define SIGNPOST_KERNELS_LAMB_REFERENCE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/lamb.h"

namespace signpost::kernels::reference {

void UpdateMoments(const BlockRule& rule, const LambRates& rates, DenseType type,
                   const uint8_t* gradient, absl::Span<float> momentum, absl::Span<float> variance,
                   absl::Span<const float> parameters, LambSums* sums);
void LambStep(const LambRates& rates, float step_size, absl::Span<const float> momentum,
              absl::Span<const float> variance, absl::Span<float> parameters);
void FloorVariance(const FreezeRates& rates, absl::Span<const float> variance,
                   absl::Span<float> fresh_variance);
// FollowMomentum, by the forms that momenta have: of the one before, or of both.
void FollowDenseMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                         const float* momentum_before, absl::Span<const float> inverse_denominator,
                         absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                         LambSums* sums);
void FollowOneBitMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                          OneBitView momentum_before, absl::Span<const float> inverse_denominator,
                          absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                          LambSums* sums);
void FollowDenseAnswer(const BlockRule& rule, const FreshRates& rates, const float* answer,
                       absl::Span<float> momentum, absl::Span<const float> inverse_denominator,
                       absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                       LambSums* sums);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_LAMB_REFERENCE_H_
