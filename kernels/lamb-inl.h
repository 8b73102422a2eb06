// The SIMD variants of lamb.h, in strips; lamb.cc includes this once per Highway target. No guard
// of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/dense_strip-inl.h"
#include "kernels/lamb.h"
#include "kernels/lamb_reference.h"
#include "kernels/square_lanes-inl.h"
#include "kernels/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::FloorVariance;
using reference::FollowDenseAnswer;
using reference::FollowDenseMomentum;
using reference::FollowOneBitMomentum;
using reference::LambStep;
using reference::UpdateMoments;

#else

// LambRates in every lane, and the three equations.
struct LambVectors {
  explicit HWY_INLINE LambVectors(const LambRates& rates)
      : beta1(hn::Set(Floats(), rates.beta1)),
        one_minus_beta1(hn::Set(Floats(), rates.one_minus_beta1)),
        beta2(hn::Set(Floats(), rates.beta2)),
        one_minus_beta2(hn::Set(Floats(), rates.one_minus_beta2)),
        inverse_correction1(hn::Set(Floats(), rates.inverse_correction1)),
        inverse_sqrt_correction2(hn::Set(Floats(), rates.inverse_sqrt_correction2)),
        epsilon(hn::Set(Floats(), rates.epsilon)),
        weight_decay(hn::Set(Floats(), rates.weight_decay)) {}

  HWY_INLINE Vector Momentum(Vector m, Vector g) const {
    return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g));
  }

  HWY_INLINE Vector Variance(Vector v, Vector g) const {
    return hn::Add(hn::Mul(beta2, v), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
  }

  HWY_INLINE Vector Update(Vector m, Vector v, Vector x) const {
    const Vector denominator = hn::Add(hn::Mul(hn::Sqrt(v), inverse_sqrt_correction2), epsilon);
    const Vector step = hn::Div(hn::Mul(m, inverse_correction1), denominator);
    return hn::Add(step, hn::Mul(weight_decay, x));
  }

  Vector beta1, one_minus_beta1, beta2, one_minus_beta2;
  Vector inverse_correction1, inverse_sqrt_correction2, epsilon, weight_decay;
};

template <class Codec>
HWY_INLINE void UpdateMomentsAs(const BlockRule& rule, const LambVectors& rates,
                                const uint8_t* gradient, absl::Span<float> momentum,
                                absl::Span<float> variance, absl::Span<const float> parameters,
                                LambSums* sums) {
  const size_t blocks = BlockCount(parameters.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, parameters.size() - begin);
    float* const m = momentum.data() + begin;
    float* const v = variance.data() + begin;
    const float* const x = parameters.data() + begin;
    SquareLanes values, updates;
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      PrefetchStrip(m + i);
      PrefetchStrip(v + i);
      PrefetchStrip(x + i);
      const Strip g = Codec::Decode(gradient, begin + i, count);
      const Strip new_m = Map([&](Vector m, Vector g) STRIP_BODY { return rates.Momentum(m, g); },
                              Load(m + i, count), g);
      const Strip new_v = Map([&](Vector v, Vector g) STRIP_BODY { return rates.Variance(v, g); },
                              Load(v + i, count), g);
      Store(new_m, m + i, count);
      Store(new_v, v + i, count);
      const Strip value = Load(x + i, count);
      values.Add(i, value);
      // Beyond a short strip all of it is zero, and so is the update.
      updates.Add(
          i, Map([&](Vector m, Vector v, Vector x) STRIP_BODY { return rates.Update(m, v, x); },
                 new_m, new_v, value));
    });
    sums[block] = {values.Fold(), updates.Fold(), 0};
  }
}

void UpdateMoments(const BlockRule& rule, const LambRates& rates, DenseType type,
                   const uint8_t* gradient, absl::Span<float> momentum, absl::Span<float> variance,
                   absl::Span<const float> parameters, LambSums* sums) {
  const LambVectors vectors(rates);
  WithCodec(type, [&](auto codec) STRIP_BODY {
    UpdateMomentsAs<decltype(codec)>(rule, vectors, gradient, momentum, variance, parameters, sums);
  });
}

void LambStep(const LambRates& rates, float step_size, absl::Span<const float> momentum,
              absl::Span<const float> variance, absl::Span<float> parameters) {
  const LambVectors vectors(rates);
  const Vector size = hn::Set(Floats(), step_size);
  const auto moved = [&](Vector x, Vector m, Vector v)
                         STRIP_BODY { return hn::Sub(x, hn::Mul(size, vectors.Update(m, v, x))); };
  ForEachStrip(parameters.size(), [&](size_t i, auto count) STRIP_BODY {
    const float* const m = momentum.data() + i;
    const float* const v = variance.data() + i;
    float* const x = parameters.data() + i;
    PrefetchStrip(m);
    PrefetchStrip(v);
    PrefetchStrip(x);
    Store(Map(moved, Load(x, count), Load(m, count), Load(v, count)), x, count);
  });
}

void FloorVariance(const FreezeRates& rates, absl::Span<const float> variance,
                   absl::Span<float> fresh_variance) {
  const Vector correction = hn::Set(Floats(), rates.variance_correction);
  const Vector floor = hn::Set(Floats(), rates.floor);
  const auto floored = [&](Vector v) STRIP_BODY {
    return hn::IfThenElseZero(hn::Gt(v, hn::Zero(Floats())),
                              hn::Max(hn::Mul(v, correction), floor));
  };
  ForEachStrip(variance.size(), [&](size_t i, auto count) STRIP_BODY {
    Store(Map(floored, Load(variance.data() + i, count)), fresh_variance.data() + i, count);
  });
}

// The least of some quotients, of which a comparison leaves out what is not a number, as the others
// do.
class LeastQuotient {
 public:
  HWY_INLINE LeastQuotient() {
    const Vector infinity = hn::Set(Floats(), std::numeric_limits<float>::infinity());
    least_ = MakeStrip([=](size_t) STRIP_BODY { return infinity; });
  }

  // `d` must be zero in lanes beyond a short strip: only where it is not do they count.
  HWY_INLINE void Add(const Strip& quotients, const Strip& d) {
    least_ = Map(
        [](Vector least, Vector quotient, Vector d) STRIP_BODY {
          const auto counts = hn::And(hn::Gt(d, hn::Zero(Floats())), hn::Lt(quotient, least));
          return hn::IfThenElse(counts, quotient, least);
        },
        least_, quotients, d);
  }

  HWY_INLINE float Fold() const {
    HWY_ALIGN float all[kStripElements];
    Store(least_, all, Full());
    return *std::min_element(all, all + kStripElements);
  }

 private:
  Strip least_;
};

// A momentum: EnterBlock(block) comes before the strips of each block, momentum(i, count) is the
// strip at element i. Once that has been read, Replace(i, answer, count) says what comes after it.
struct DenseMomentum {
  const float* momentum;

  HWY_INLINE void EnterBlock(size_t) {}

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    PrefetchStrip(momentum + i);
    return Load(momentum + i, count);
  }

  template <class Count>
  HWY_INLINE void Replace(size_t, const Strip&, Count) const {}
};

struct ReplacedMomentum : DenseMomentum {
  explicit ReplacedMomentum(float* momentum) : DenseMomentum{momentum}, replaced(momentum) {}

  template <class Count>
  HWY_INLINE void Replace(size_t i, const Strip& answer, Count count) const {
    Store(answer, replaced + i, count);
  }

  float* replaced;
};

struct OneBitMomentum {
  OneBitView momentum;
  Magnitude scale{0};

  HWY_INLINE void EnterBlock(size_t block) { scale = Magnitude(momentum.scales[block]); }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return Signed(scale, LoadSigns(momentum.bits + i / 8, count));
  }

  template <class Count>
  HWY_INLINE void Replace(size_t, const Strip&, Count) const {}
};

template <class Momentum, class Before>
HWY_INLINE void FollowMomentum(const BlockRule& rule, const FreshRates& rates, Momentum momentum,
                               Before before, absl::Span<const float> inverse_denominator,
                               absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                               LambSums* sums) {
  const Vector beta1 = hn::Set(Floats(), rates.beta1);
  const Vector inverse_one_minus_beta1 = hn::Set(Floats(), rates.inverse_one_minus_beta1);
  const Vector beta2 = hn::Set(Floats(), rates.beta2);
  const Vector one_minus_beta2 = hn::Set(Floats(), rates.one_minus_beta2);
  const Vector epsilon = hn::Set(Floats(), rates.epsilon);
  const Vector weight_decay = hn::Set(Floats(), rates.weight_decay);
  const auto fresh = [&](Vector m, Vector before, Vector f) STRIP_BODY {
    const Vector g = hn::Mul(hn::Sub(m, hn::Mul(beta1, before)), inverse_one_minus_beta1);
    return hn::Add(hn::Mul(beta2, f), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
  };
  const auto step = [](Vector m, Vector d) STRIP_BODY { return hn::Mul(m, d); };
  const auto update = [&](Vector step, Vector x)
                          STRIP_BODY { return hn::Add(step, hn::Mul(weight_decay, x)); };
  const auto quotient = [&](Vector d, Vector f)
                            STRIP_BODY { return hn::Mul(d, hn::Add(hn::Sqrt(f), epsilon)); };
  const size_t blocks = BlockCount(parameters.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, parameters.size() - begin);
    const float* const d = inverse_denominator.data() + begin;
    const float* const x = parameters.data() + begin;
    float* const f = fresh_variance.data() + begin;
    SquareLanes steps, updates;
    LeastQuotient least;
    momentum.EnterBlock(block);
    before.EnterBlock(block);
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      PrefetchStrip(d + i);
      PrefetchStrip(x + i);
      PrefetchStrip(f + i);
      const Strip m = momentum(begin + i, count);
      const Strip new_f = Map(fresh, m, before(begin + i, count), Load(f + i, count));
      Store(new_f, f + i, count);
      before.Replace(begin + i, m, count);
      const Strip inverse = Load(d + i, count);  // zero beyond a short strip, and so are products
      const Strip along = Map(step, m, inverse);
      steps.Add(i, along);
      updates.Add(i, Map(update, along, Load(x + i, count)));
      least.Add(Map(quotient, inverse, new_f), inverse);
    });
    sums[block] = {steps.Fold(), updates.Fold(), least.Fold()};
  }
}

void FollowDenseMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                         const float* momentum_before, absl::Span<const float> inverse_denominator,
                         absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                         LambSums* sums) {
  FollowMomentum(rule, rates, OneBitMomentum{momentum}, DenseMomentum{momentum_before},
                 inverse_denominator, fresh_variance, parameters, sums);
}

void FollowOneBitMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                          OneBitView momentum_before, absl::Span<const float> inverse_denominator,
                          absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                          LambSums* sums) {
  FollowMomentum(rule, rates, OneBitMomentum{momentum}, OneBitMomentum{momentum_before},
                 inverse_denominator, fresh_variance, parameters, sums);
}

void FollowDenseAnswer(const BlockRule& rule, const FreshRates& rates, const float* answer,
                       absl::Span<float> momentum, absl::Span<const float> inverse_denominator,
                       absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                       LambSums* sums) {
  FollowMomentum(rule, rates, DenseMomentum{answer}, ReplacedMomentum(momentum.data()),
                 inverse_denominator, fresh_variance, parameters, sums);
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
