// The SIMD variants of zero_one.h, in strips; zero_one.cc includes this once per Highway target. No
// guard of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/dense_strip-inl.h"
#include "kernels/formulas.h"
#include "kernels/strip-inl.h"
#include "kernels/zero_one.h"
#include "kernels/zero_one_reference.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AdaptiveStep;
using reference::LocalStep;

#else

// AdaptiveRates in every lane, and the three equations.
struct AdaptiveVectors {
  explicit HWY_INLINE AdaptiveVectors(const AdaptiveRates& rates)
      : beta1(hn::Set(Floats(), rates.beta1)),
        one_minus_beta1(hn::Set(Floats(), rates.one_minus_beta1)),
        kept(hn::Set(Floats(), rates.kept_variance)),
        one_minus_kept(hn::Set(Floats(), rates.one_minus_kept_variance)),
        step_size(hn::Set(Floats(), rates.step_size)),
        inverse_sqrt_correction2(hn::Set(Floats(), rates.inverse_sqrt_correction2)),
        floor(hn::Set(Floats(), rates.floor)),
        epsilon(hn::Set(Floats(), rates.epsilon)),
        decay(hn::Set(Floats(), rates.decay)),
        above(hn::Set(Floats(), formulas::UpdatedAbove(rates))) {}

  HWY_INLINE Vector Momentum(Vector m, Vector g) const {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  }

  HWY_INLINE Vector Variance(Vector v, Vector g) const {
    return hn::Add(hn::Mul(kept, v), hn::Mul(one_minus_kept, hn::Mul(g, g)));
  }

  HWY_INLINE Vector Parameter(Vector x, Vector m, Vector v) const {
    const Vector root = hn::Sqrt(hn::Max(v, floor));
    const Vector denominator = hn::Add(hn::Mul(root, inverse_sqrt_correction2), epsilon);
    const auto has_variance = hn::Gt(v, above);
    const Vector ratio = hn::IfThenElseZero(has_variance, hn::Div(m, denominator));
    return hn::Sub(hn::Sub(x, hn::Mul(decay, x)), hn::Mul(step_size, ratio));
  }

  Vector beta1, one_minus_beta1, kept, one_minus_kept;
  Vector step_size, inverse_sqrt_correction2, floor, epsilon, decay;
  Vector above;
};

template <class Codec, bool kUpdatesVariance>
HWY_INLINE void AdaptiveStepAs(const AdaptiveVectors& rates, const uint8_t* gradient,
                               absl::Span<float> momentum, absl::Span<float> variance,
                               absl::Span<float> parameters) {
  const auto momentum_of = [&](Vector m, Vector g) STRIP_BODY { return rates.Momentum(m, g); };
  const auto variance_of = [&](Vector v, Vector g) STRIP_BODY { return rates.Variance(v, g); };
  const auto parameter_of = [&](Vector x, Vector m, Vector v)
                                STRIP_BODY { return rates.Parameter(x, m, v); };
  ForEachStrip(parameters.size(), [&](size_t i, auto count) STRIP_BODY {
    float* const m = momentum.data() + i;
    float* const v = variance.data() + i;
    float* const x = parameters.data() + i;
    PrefetchStrip(m);
    PrefetchStrip(v);
    PrefetchStrip(x);
    const Strip g = Codec::Decode(gradient, i, count);
    const Strip new_m = Map(momentum_of, Load(m, count), g);
    Strip new_v = Load(v, count);
    if constexpr (kUpdatesVariance) {
      new_v = Map(variance_of, new_v, g);
      Store(new_v, v, count);
    }
    Store(Map(parameter_of, Load(x, count), new_m, new_v), x, count);
    Store(new_m, m, count);
  });
}

void AdaptiveStep(const AdaptiveRates& rates, DenseType type, const uint8_t* gradient,
                  absl::Span<float> momentum, absl::Span<float> variance,
                  absl::Span<float> parameters) {
  const AdaptiveVectors vectors(rates);
  WithCodec(type, [&](auto codec) STRIP_BODY {
    if (rates.updates_variance) {
      AdaptiveStepAs<decltype(codec), true>(vectors, gradient, momentum, variance, parameters);
    } else {
      AdaptiveStepAs<decltype(codec), false>(vectors, gradient, momentum, variance, parameters);
    }
  });
}

// LocalRates in every lane, and the three equations.
struct LocalVectors {
  explicit HWY_INLINE LocalVectors(const LocalRates& rates)
      : beta1(hn::Set(Floats(), rates.beta1)),
        one_minus_beta1(hn::Set(Floats(), rates.one_minus_beta1)),
        learning_rate(hn::Set(Floats(), rates.learning_rate)),
        weight_decay(hn::Set(Floats(), rates.weight_decay)),
        update_of(rates.most_update) {}

  HWY_INLINE Vector Momentum(Vector m, Vector g) const {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  }

  HWY_INLINE Vector Accumulated(Vector u, Vector m) const {
    return hn::Add(u, hn::Mul(learning_rate, m));
  }

  HWY_INLINE Vector Parameter(Vector x, Vector m, Vector d) const {
    const Vector direction = hn::Add(update_of(m, d), hn::Mul(weight_decay, x));
    return hn::Sub(x, hn::Mul(learning_rate, direction));
  }

  Vector beta1, one_minus_beta1, learning_rate, weight_decay;
  BoundedUpdate update_of;
};

template <bool kHasParameters>
HWY_INLINE size_t LocalStepOn(const BlockRule& rule, const LocalVectors& rates,
                              absl::Span<const float> gradient, absl::Span<float> momentum,
                              absl::Span<float> accumulated,
                              absl::Span<const float> inverse_denominator,
                              absl::Span<float> parameters) {
  const auto momentum_of = [&](Vector m, Vector g) STRIP_BODY { return rates.Momentum(m, g); };
  const auto accumulated_of = [&](Vector u, Vector m)
                                  STRIP_BODY { return rates.Accumulated(u, m); };
  const auto parameter_of = [&](Vector x, Vector m, Vector d)
                                STRIP_BODY { return rates.Parameter(x, m, d); };
  const size_t blocks = BlockCount(gradient.size(), rule.block_elements);
  size_t first_left_alone = blocks;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, gradient.size() - begin);
    const float* const g = gradient.data() + begin;
    LargestMagnitude largest;
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      PrefetchStrip(g + i);
      largest.Add(Load(g + i, count));
    });
    if (!formulas::IsWithinRange(largest.Get())) {
      first_left_alone = std::min(first_left_alone, block);
      continue;
    }
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      float* const m = momentum.data() + begin + i;
      float* const u = accumulated.data() + begin + i;
      PrefetchStrip(m);
      PrefetchStrip(u);
      const Strip new_m = Map(momentum_of, Load(m, count), Load(g + i, count));
      Store(new_m, m, count);
      Store(Map(accumulated_of, Load(u, count), new_m), u, count);
      if constexpr (kHasParameters) {
        const float* const d = inverse_denominator.data() + begin + i;
        float* const x = parameters.data() + begin + i;
        PrefetchStrip(d);
        PrefetchStrip(x);
        Store(Map(parameter_of, Load(x, count), new_m, Load(d, count)), x, count);
      }
    });
  }
  return first_left_alone;
}

size_t LocalStep(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient,
                 absl::Span<float> momentum, absl::Span<float> accumulated,
                 absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  const LocalVectors vectors(rates);
  if (parameters.empty()) {
    return LocalStepOn<false>(rule, vectors, gradient, momentum, accumulated, inverse_denominator,
                              parameters);
  }
  return LocalStepOn<true>(rule, vectors, gradient, momentum, accumulated, inverse_denominator,
                           parameters);
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
