// The SIMD variants of onebit.h, in strips; onebit.cc includes this once per Highway target. No
// guard of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/compress-inl.h"
#include "kernels/formulas.h"
#include "kernels/onebit.h"
#include "kernels/onebit_reference.h"
#include "kernels/rank_sum-inl.h"
#include "kernels/square_lanes-inl.h"
#include "kernels/strip-inl.h"
#include "kernels/target.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AddOneBit;
using reference::AggregateOneBit;
using reference::ApplyMomentum;
using reference::CompressDenseMomentum;
using reference::CompressOneBit;
using reference::CompressOneBitMomentum;
using reference::DecompressOneBit;

#else

// What Compress makes of a block: sign bits, and the scale of its sum of squares.
struct OneBitFormat {
  float gamma;
  uint8_t* bits;

  using Measure = SquareLanes;

  class Packer {
   public:
    HWY_INLINE Packer(float scale, uint8_t* bits) : scale_(scale), bits_(bits) {}

    template <class Count>
    HWY_INLINE Strip operator()(const Strip& u, size_t i, Count count) const {
      StoreSigns(u, bits_ + i / 8, count);
      return Map([&](Vector v) STRIP_BODY { return hn::Sub(v, SignedLike(v, scale_)); }, u);
    }

   private:
    Magnitude scale_;
    uint8_t* bits_;
  };

  HWY_INLINE float ScaleOf(Measure& measure, size_t length) const {
    return formulas::BlockScale(gamma, measure.Fold(), length);
  }

  HWY_INLINE Packer PackerOf(const Measure&, float scale) const { return {scale, bits}; }
};

// u = (decayed_momentum + (one_minus_beta1 * g)) + e
template <class Count>
HWY_INLINE Strip AddGradientAndError(const Strip& decayed_momentum, float one_minus_beta1,
                                     const float* gradient, const float* error, Count count) {
  const Vector rate = hn::Set(Floats(), one_minus_beta1);
  const auto u = [rate](Vector m, Vector g, Vector e)
                     STRIP_BODY { return hn::Add(hn::Add(m, hn::Mul(rate, g)), e); };
  return Map(u, decayed_momentum, Load(gradient, count), Load(error, count));
}

struct DenseMomentumInput {
  static constexpr bool kIsMadeTwice = false;

  MomentumRates rates;
  const float* gradient;
  const float* momentum;
  const float* error;

  size_t Passes() const { return 2; }

  void EnterBlock(size_t block) {}

  HWY_INLINE void Prefetch(size_t i) const {
    PrefetchFar(gradient + i);
    PrefetchFar(momentum + i);
    PrefetchFar(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    const Vector beta1 = hn::Set(Floats(), rates.beta1);
    const Strip decayed =
        Map([beta1](Vector m) STRIP_BODY { return hn::Mul(beta1, m); }, Load(momentum + i, count));
    return AddGradientAndError(decayed, rates.one_minus_beta1, gradient + i, error + i, count);
  }
};

struct OneBitMomentumInput {
  static constexpr bool kIsMadeTwice = true;

  MomentumRates rates;
  const float* gradient;
  OneBitView momentum;
  const float* error;
  Magnitude decayed{0};  // the current block's beta1 * S: rounding is the same for both signs

  size_t Passes() const { return 2; }

  HWY_INLINE void EnterBlock(size_t block) {
    decayed = Magnitude(rates.beta1 * momentum.scales[block]);
  }

  HWY_INLINE void Prefetch(size_t i) const {
    PrefetchFar(gradient + i);
    PrefetchFar(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return AddGradientAndError(Signed(decayed, LoadSigns(momentum.bits + i / 8, count)),
                               rates.one_minus_beta1, gradient + i, error + i, count);
  }
};

// What all ranks sent, for RankSumInput.
template <template <size_t kGroups> class Signs>
struct OneBitRanks {
  static constexpr size_t kPerPass = kRanksPerPass;

  absl::Span<const OneBitView> contributions;

  size_t size() const { return contributions.size(); }

  template <class Use>
  HWY_INLINE void ForEachSum(size_t pass, const Block& block, Use use) const {
    ForEachSumOf(std::make_index_sequence<kGroupsPerPass>(), pass, block, use);
  }

  template <class Use>
  HWY_INLINE void ForEachLastSum(size_t pass, const Block& block, Use use) const {
    static_assert(kGroupsPerPass == 2);
    if (contributions.size() - pass * kPerPass > kRankGroup) return ForEachSum(pass, block, use);
    ForEachSumOf(std::make_index_sequence<1>(), pass, block, use);
  }

 private:
  template <class Use, size_t... group>
  HWY_INLINE void ForEachSumOf(std::index_sequence<group...> groups, size_t pass,
                               const Block& block, Use use) const {
    const auto ranks = contributions.subspan(pass * kPerPass, kPerPass);
    const NextPass next(size(), kPerPass, pass, block);
    const RankBits bits(ranks, block.begin / 8);
    const RankBits next_bits(contributions.subspan(next.index * kPerPass, kPerPass),
                             next.begin / 8);
    const GroupSum sums[] = {{ranks.subspan(group * kRankGroup, kRankGroup), block.index}...};
    ForEachStripOfGroups<Signs<sizeof...(group)> >(groups, sums, bits, next_bits, block.length,
                                                   use);
  }
};

template <class Input>
HWY_INLINE size_t CompressToOneBit(const BlockRule& rule, const Input& input,
                                   absl::Span<float> error, OneBitSpan out) {
  return Compress(rule, input, error, OneBitFormat{rule.gamma, out.bits}, out.scales);
}

size_t CompressDenseMomentum(const BlockRule& rule, MomentumRates rates,
                             absl::Span<const float> gradient, const float* momentum,
                             absl::Span<float> error, OneBitSpan out) {
  const DenseMomentumInput input = {rates, gradient.data(), momentum, error.data()};
  return CompressToOneBit(rule, input, error, out);
}

size_t CompressOneBitMomentum(const BlockRule& rule, MomentumRates rates,
                              absl::Span<const float> gradient, OneBitView momentum,
                              absl::Span<float> error, OneBitSpan out) {
  const OneBitMomentumInput input = {rates, gradient.data(), momentum, error.data()};
  return CompressToOneBit(rule, input, error, out);
}

size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out) {
  const ValueInput input = {values.data(), error.data()};
  return CompressToOneBit(rule, input, error, out);
}

void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values) {
  const size_t blocks = BlockCount(values.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const Magnitude scale(compressed.scales[block]);
    const size_t length = std::min(rule.block_elements, values.size() - begin);
    const auto strip_at = [&](size_t i, auto count) STRIP_BODY {
      return Signed(scale, LoadSigns(compressed.bits + (begin + i) / 8, count));
    };
    WriteStrips(values.data() + begin, length, values.size(), strip_at);
  }
  FinishStrips(values.size());
}

template <template <size_t kGroups> class Signs>
size_t AggregateWith(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                     float inverse_count, absl::Span<float> error, OneBitSpan out) {
  const RankSumInput<OneBitRanks<Signs> > input = {{contributions}, inverse_count, error.data()};
  return CompressToOneBit(rule, input, error, out);
}

size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out) {
#if HWY_TARGET == HWY_AVX3
  if (CurrentTarget() == Target::kAvx512Gfni) {
    return AggregateWith<TransposedSigns>(rule, contributions, inverse_count, error, out);
  }
#endif
  return AggregateWith<ExchangedSigns>(rule, contributions, inverse_count, error, out);
}

// One block of ApplyMomentum, of momentum `scale` with the signs `bits`.
template <class UpdateOf>
HWY_INLINE void ApplySigns(float scale, const uint8_t* bits, const UpdateOf& update_of,
                           const UpdateRates& rates, const float* inverse_denominator,
                           float* parameters, size_t length) {
  const Vector rate = hn::Set(Floats(), rates.learning_rate);
  const Vector decay = hn::Set(Floats(), rates.weight_decay);
  const Magnitude magnitude(scale);
  const auto step = [&](Vector m, Vector inverse, Vector x) STRIP_BODY {
    const Vector direction = hn::Add(update_of(m, inverse), hn::Mul(decay, x));
    return hn::Sub(x, hn::Mul(rate, direction));
  };
  ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
    const float* const inverse = inverse_denominator + i;
    float* const x = parameters + i;
    PrefetchStrip(inverse);
    PrefetchStrip(x);
    const Strip m = Signed(magnitude, LoadSigns(bits + i / 8, count));
    Store(Map(step, m, Load(inverse, count), Load(x, count)), x, count);
  });
}

void ApplyMomentum(const BlockRule& rule, OneBitView momentum, const UpdateRates& rates,
                   absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  const size_t blocks = BlockCount(parameters.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, parameters.size() - begin);
    const float scale = momentum.scales[block];
    const uint8_t* const bits = momentum.bits + begin / 8;
    const float* const inverse = inverse_denominator.data() + begin;
    float* const x = parameters.data() + begin;
    if (scale * rates.most_inverse_denominator <= rates.most_update) {
      const auto update_of = [](Vector m, Vector d) STRIP_BODY { return hn::Mul(m, d); };
      ApplySigns(scale, bits, update_of, rates, inverse, x, length);
    } else {
      ApplySigns(scale, bits, BoundedUpdate(rates.most_update), rates, inverse, x, length);
    }
  }
}

void AddOneBit(const BlockRule& rule, OneBitView addend, float factor,
               absl::Span<float> accumulator) {
  const size_t blocks = BlockCount(accumulator.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const Magnitude scale(factor * addend.scales[block]);
    float* const sum = accumulator.data() + begin;
    const size_t length = std::min(rule.block_elements, accumulator.size() - begin);
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      PrefetchStrip(sum + i);
      const Strip value = Signed(scale, LoadSigns(addend.bits + (begin + i) / 8, count));
      Store(Add(Load(sum + i, count), value), sum + i, count);
    });
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
