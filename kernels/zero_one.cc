#include "kernels/zero_one.h"

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles zero_one-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/zero_one-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/zero_one-inl.h"

namespace signpost::kernels {

HWY_EXPORT(AdaptiveStep);
HWY_EXPORT(LocalStep);

void AdaptiveStep(const AdaptiveRates& rates, DenseType type, const uint8_t* gradient,
                  absl::Span<float> momentum, absl::Span<float> variance,
                  absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(AdaptiveStep)(rates, type, gradient, momentum, variance, parameters);
}

size_t LocalStep(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient,
                 absl::Span<float> momentum, absl::Span<float> accumulated,
                 absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  return HWY_DYNAMIC_DISPATCH(LocalStep)(rule, rates, gradient, momentum, accumulated,
                                         inverse_denominator, parameters);
}

}  // namespace signpost::kernels
