#include "kernels/lamb.h"

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles lamb-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/lamb-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/lamb-inl.h"

namespace signpost::kernels {

HWY_EXPORT(UpdateMoments);
HWY_EXPORT(LambStep);
HWY_EXPORT(FloorVariance);
HWY_EXPORT(FollowDenseMomentum);
HWY_EXPORT(FollowOneBitMomentum);
HWY_EXPORT(FollowDenseAnswer);

void UpdateMoments(const BlockRule& rule, const LambRates& rates, DenseType type,
                   const uint8_t* gradient, absl::Span<float> momentum, absl::Span<float> variance,
                   absl::Span<const float> parameters, LambSums* sums) {
  HWY_DYNAMIC_DISPATCH(UpdateMoments)
  (rule, rates, type, gradient, momentum, variance, parameters, sums);
}

void LambStep(const LambRates& rates, float step_size, absl::Span<const float> momentum,
              absl::Span<const float> variance, absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(LambStep)(rates, step_size, momentum, variance, parameters);
}

void FloorVariance(const FreezeRates& rates, absl::Span<const float> variance,
                   absl::Span<float> fresh_variance) {
  HWY_DYNAMIC_DISPATCH(FloorVariance)(rates, variance, fresh_variance);
}

void FollowMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                    const float* momentum_before, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums) {
  HWY_DYNAMIC_DISPATCH(FollowDenseMomentum)
  (rule, rates, momentum, momentum_before, inverse_denominator, fresh_variance, parameters, sums);
}

void FollowMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                    OneBitView momentum_before, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums) {
  HWY_DYNAMIC_DISPATCH(FollowOneBitMomentum)
  (rule, rates, momentum, momentum_before, inverse_denominator, fresh_variance, parameters, sums);
}

void FollowMomentum(const BlockRule& rule, const FreshRates& rates, const float* answer,
                    absl::Span<float> momentum, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums) {
  HWY_DYNAMIC_DISPATCH(FollowDenseAnswer)
  (rule, rates, answer, momentum, inverse_denominator, fresh_variance, parameters, sums);
}

}  // namespace signpost::kernels
