// The SIMD variants of adam.h, in strips; adam.cc includes this once per Highway target. No guard
// of its own: Highway's foreach_target.h relies on that.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/adam.h"
#include "kernels/adam_reference.h"
#include "kernels/dense.h"
#include "kernels/dense_strip-inl.h"
#include "kernels/formulas.h"
#include "kernels/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AdamStep;
using reference::Freeze;
using reference::RefreshStep;
using reference::Thaw;

#else

// AdamRates in every lane, and the three equations of AdamStep.
struct AdamVectors {
  explicit HWY_INLINE AdamVectors(const AdamRates& rates)
      : beta1(hn::Set(Floats(), rates.beta1)),
        one_minus_beta1(hn::Set(Floats(), rates.one_minus_beta1)),
        beta2(hn::Set(Floats(), rates.beta2)),
        one_minus_beta2(hn::Set(Floats(), rates.one_minus_beta2)),
        step_size(hn::Set(Floats(), rates.step_size)),
        inverse_sqrt_correction2(hn::Set(Floats(), rates.inverse_sqrt_correction2)),
        epsilon(hn::Set(Floats(), rates.epsilon)),
        decay(hn::Set(Floats(), rates.decay)) {}

  HWY_INLINE Vector Momentum(Vector m, Vector g) const {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  }

  HWY_INLINE Vector Variance(Vector v, Vector g) const {
    return hn::Add(hn::Mul(beta2, v), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
  }

  HWY_INLINE Vector Parameter(Vector x, Vector m, Vector v) const {
    const Vector denominator = hn::Add(hn::Mul(hn::Sqrt(v), inverse_sqrt_correction2), epsilon);
    const Vector decayed = hn::Sub(x, hn::Mul(decay, x));
    return hn::Sub(decayed, hn::Mul(step_size, hn::Div(m, denominator)));
  }

  Vector beta1, one_minus_beta1, beta2, one_minus_beta2;
  Vector step_size, inverse_sqrt_correction2, epsilon, decay;
};

template <class Codec>
HWY_INLINE void AdamStepAs(const AdamVectors& rates, const uint8_t* gradient,
                           absl::Span<float> momentum, absl::Span<float> variance,
                           absl::Span<float> parameters) {
  ForEachStrip(parameters.size(), [&](size_t i, auto count) STRIP_BODY {
    float* const m = momentum.data() + i;
    float* const v = variance.data() + i;
    float* const x = parameters.data() + i;
    PrefetchStrip(m);
    PrefetchStrip(v);
    PrefetchStrip(x);
    const Strip g = Codec::Decode(gradient, i, count);
    const Strip new_m =
        Map([&](Vector m, Vector g) STRIP_BODY { return rates.Momentum(m, g); }, Load(m, count), g);
    const Strip new_v =
        Map([&](Vector v, Vector g) STRIP_BODY { return rates.Variance(v, g); }, Load(v, count), g);
    const Strip new_x =
        Map([&](Vector x, Vector m, Vector v) STRIP_BODY { return rates.Parameter(x, m, v); },
            Load(x, count), new_m, new_v);
    Store(new_m, m, count);
    Store(new_v, v, count);
    Store(new_x, x, count);
  });
}

void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance,
              absl::Span<float> parameters) {
  const AdamVectors vectors(rates);
  WithCodec(type, [&](auto codec) STRIP_BODY {
    AdamStepAs<decltype(codec)>(vectors, gradient, momentum, variance, parameters);
  });
}

void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance) {
  const Vector momentum_correction = hn::Set(Floats(), rates.momentum_correction);
  const Vector variance_correction = hn::Set(Floats(), rates.variance_correction);
  const Vector floor = hn::Set(Floats(), rates.floor);
  const Vector above = hn::Set(Floats(), formulas::UpdatedAbove(rates));
  const Vector epsilon = hn::Set(Floats(), rates.epsilon);
  const Vector one = hn::Set(Floats(), 1.0f);
  const auto correct = [&](Vector m) STRIP_BODY { return hn::Mul(m, momentum_correction); };
  const auto invert = [&](Vector v) STRIP_BODY {
    const Vector floored = hn::Max(hn::Mul(v, variance_correction), floor);
    const Vector inverse = hn::Div(one, hn::Add(hn::Sqrt(floored), epsilon));
    return hn::IfThenElseZero(hn::Gt(v, above), inverse);
  };
  ForEachStrip(momentum.size(), [&](size_t i, auto count) STRIP_BODY {
    Store(Map(correct, Load(momentum.data() + i, count)), momentum.data() + i, count);
  });
  ForEachStrip(variance.size(), [&](size_t i, auto count) STRIP_BODY {
    Store(Map(invert, Load(variance.data() + i, count)), variance.data() + i, count);
  });
}

HWY_INLINE Vector VarianceOf(Vector inverse_denominator, Vector epsilon) {
  const Vector one = hn::Set(Floats(), 1.0f);
  const Vector root = hn::Sub(hn::Div(one, inverse_denominator), epsilon);
  return hn::IfThenElseZero(hn::Gt(inverse_denominator, hn::Zero(Floats())), hn::Mul(root, root));
}

template <class Codec>
HWY_INLINE void RefreshStepAs(const RefreshRates& rates, const uint8_t* gradient,
                              absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                              absl::Span<float> parameters) {
  const Vector beta1 = hn::Set(Floats(), rates.beta1);
  const Vector one_minus_beta1 = hn::Set(Floats(), rates.one_minus_beta1);
  const Vector kept = hn::Set(Floats(), rates.kept_variance);
  const Vector one_minus_kept = hn::Set(Floats(), rates.one_minus_kept_variance);
  const Vector learning_rate = hn::Set(Floats(), rates.learning_rate);
  const Vector epsilon = hn::Set(Floats(), rates.epsilon);
  const Vector decay = hn::Set(Floats(), rates.decay);
  const BoundedUpdate update_of(rates.most_update);
  const auto momentum_of = [&](Vector m, Vector g) STRIP_BODY {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  };
  const auto parameter_of = [&](Vector x, Vector m, Vector d) STRIP_BODY {
    return hn::Sub(hn::Sub(x, hn::Mul(decay, x)), hn::Mul(learning_rate, update_of(m, d)));
  };
  const auto variance_of = [&](Vector d, Vector g) STRIP_BODY {
    return hn::Add(hn::Mul(kept, VarianceOf(d, epsilon)), hn::Mul(one_minus_kept, hn::Mul(g, g)));
  };
  ForEachStrip(parameters.size(), [&](size_t i, auto count) STRIP_BODY {
    float* const m = momentum.data() + i;
    float* const d = inverse_denominator.data() + i;
    float* const x = parameters.data() + i;
    const Strip g = Codec::Decode(gradient, i, count);
    const Strip old_d = Load(d, count);
    const Strip new_m = Map(momentum_of, Load(m, count), g);
    Store(Map(parameter_of, Load(x, count), new_m, old_d), x, count);
    Store(new_m, m, count);
    Store(Map(variance_of, old_d, g), d, count);
  });
}

void RefreshStep(const RefreshRates& rates, DenseType type, const uint8_t* gradient,
                 absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                 absl::Span<float> parameters) {
  WithCodec(type, [&](auto codec) STRIP_BODY {
    RefreshStepAs<decltype(codec)>(rates, gradient, momentum, inverse_denominator, parameters);
  });
}

void Thaw(float epsilon, absl::Span<float> inverse_denominator) {
  const Vector epsilons = hn::Set(Floats(), epsilon);
  const auto variance_of = [&](Vector d) STRIP_BODY { return VarianceOf(d, epsilons); };
  ForEachStrip(inverse_denominator.size(), [&](size_t i, auto count) STRIP_BODY {
    float* const d = inverse_denominator.data() + i;
    Store(Map(variance_of, Load(d, count)), d, count);
  });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
