// The SIMD variants of momentum.h, in strips; momentum.cc includes this once per Highway target. No
// guard of its own: Highway's foreach_target.h relies on that.

#include <cstddef>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/momentum.h"
#include "kernels/momentum_reference.h"
#include "kernels/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::ApplyDenseMomentum;
using reference::MomentumInput;

#else

void MomentumInput(MomentumRates rates, absl::Span<const float> gradient, const float* momentum,
                   absl::Span<float> input) {
  const Vector beta1 = hn::Set(Floats(), rates.beta1);
  const Vector one_minus_beta1 = hn::Set(Floats(), rates.one_minus_beta1);
  const auto mix = [&](Vector m, Vector g) STRIP_BODY {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  };
  ForEachStrip(input.size(), [&](size_t i, auto count) STRIP_BODY {
    const float* const g = gradient.data() + i;
    PrefetchStrip(g);
    PrefetchStrip(momentum + i);
    PrefetchStrip(input.data() + i);
    Store(Map(mix, Load(momentum + i, count), Load(g, count)), input.data() + i, count);
  });
}

void ApplyDenseMomentum(absl::Span<const float> momentum, const UpdateRates& rates,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  const Vector rate = hn::Set(Floats(), rates.learning_rate);
  const Vector decay = hn::Set(Floats(), rates.weight_decay);
  const BoundedUpdate update_of(rates.most_update);
  const auto step = [&](Vector m, Vector inverse, Vector x) STRIP_BODY {
    const Vector direction = hn::Add(update_of(m, inverse), hn::Mul(decay, x));
    return hn::Sub(x, hn::Mul(rate, direction));
  };
  ForEachStrip(parameters.size(), [&](size_t i, auto count) STRIP_BODY {
    const float* const m = momentum.data() + i;
    const float* const inverse = inverse_denominator.data() + i;
    float* const x = parameters.data() + i;
    PrefetchStrip(m);
    PrefetchStrip(inverse);
    PrefetchStrip(x);
    Store(Map(step, Load(m, count), Load(inverse, count), Load(x, count)), x, count);
  });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
