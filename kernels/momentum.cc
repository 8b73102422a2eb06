#include "kernels/momentum.h"

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles momentum-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/momentum-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/momentum-inl.h"

namespace signpost::kernels {

HWY_EXPORT(MomentumInput);
HWY_EXPORT(ApplyDenseMomentum);

void MomentumInput(MomentumRates rates, absl::Span<const float> gradient, const float* momentum,
                   absl::Span<float> input) {
  HWY_DYNAMIC_DISPATCH(MomentumInput)(rates, gradient, momentum, input);
}

void ApplyDenseMomentum(absl::Span<const float> momentum, const UpdateRates& rates,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(ApplyDenseMomentum)
  (momentum, rates, inverse_denominator, parameters);
}

}  // namespace signpost::kernels
