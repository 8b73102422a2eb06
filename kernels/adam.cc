#include "kernels/adam.h"

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/dense.h"
#include "kernels/highway_targets.h"

// Compiles adam-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/adam-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/adam-inl.h"

namespace signpost::kernels {

HWY_EXPORT(AdamStep);
HWY_EXPORT(Freeze);
HWY_EXPORT(RefreshStep);
HWY_EXPORT(Thaw);

void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance,
              absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(AdamStep)(rates, type, gradient, momentum, variance, parameters);
}

void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance) {
  HWY_DYNAMIC_DISPATCH(Freeze)(rates, momentum, variance);
}

void RefreshStep(const RefreshRates& rates, DenseType type, const uint8_t* gradient,
                 absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                 absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(RefreshStep)
  (rates, type, gradient, momentum, inverse_denominator, parameters);
}

void Thaw(float epsilon, absl::Span<float> inverse_denominator) {
  HWY_DYNAMIC_DISPATCH(Thaw)(epsilon, inverse_denominator);
}

}  // namespace signpost::kernels
