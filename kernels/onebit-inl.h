// The SIMD variants of onebit.h, in strips; onebit.cc includes this once per Highway target. No
// guard of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/container/fixed_array.h"
#include "absl/types/span.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/onebit.h"
#include "kernels/onebit_reference.h"
#include "kernels/rank_sum-inl.h"
#include "kernels/strip-inl.h"

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

// A block's u, between the pass that sums its squares and the pass that packs it. Blocks of the
// usual size lie on the stack and stay in the first-level cache.
struct alignas(64) ScratchStrip {
  float u[kStripElements];
};
constexpr size_t kStackElements = 4096;
using Scratch = absl::FixedArray<ScratchStrip, kStackElements / kStripElements>;

constexpr size_t kSumStrips = kSumLanes / kStripElements;

// Folds the lanes of block.h in halves.
HWY_INLINE float FoldLanes(const Strip* sums) {
  HWY_ALIGN float lanes[kStripElements];
  static_assert(kSumStrips == 4, "64, then 32 lanes are whole strips");
  Store(Add(Add(sums[0], sums[2]), Add(sums[1], sums[3])), lanes, Full());
  for (size_t w = kStripElements / 2; w > 0; w /= 2) {
    for (size_t l = 0; l < w; ++l) lanes[l] += lanes[l + w];
  }
  return lanes[0];
}

// Each of the two passes over a block also fetches half of the next block, so that memory is never
// idle: a strip is two cache lines long, so a line per strip, at i / 2 for the strip at i, does
// that.
static_assert(kStripElements * sizeof(float) == 2 * 64);

// Fills the scratch with the input's elements [begin, begin + length); returns their sum of
// squares.
template <class Input>
HWY_INLINE float Gather(const Input& input, size_t begin, size_t length, ScratchStrip* scratch) {
  Strip sums[kSumStrips];
  for (Strip& sum : sums) {
    sum = MakeStrip([](size_t) HWY_ATTR { return hn::Zero(Floats()); });
  }
  ForEachStrip(length, [&](size_t i, auto count) HWY_ATTR {
    input.Prefetch(begin + length + i / 2);
    const Strip u = ZeroBeyond(input(begin + i, count), count);
    Store(u, scratch[i / kStripElements].u, Full());
    Strip& sum = sums[i / kStripElements % kSumStrips];
    // Lanes beyond a short strip add +0, which changes no sum of squares.
    sum = Map([](Vector s, Vector v) HWY_ATTR { return hn::Add(s, hn::Mul(v, v)); }, sum, u);
  });
  return FoldLanes(sums);
}

// Writes the block [begin, begin + length): its sign bits and what they lose.
template <class Input>
HWY_INLINE void Pack(const Input& input, size_t begin, size_t length, const ScratchStrip* scratch,
                     float scale, float* error, uint8_t* bits) {
  const Vector s = hn::Set(Floats(), scale);
  ForEachStrip(length, [&](size_t i, auto count) HWY_ATTR {
    input.Prefetch(begin + length + length / 2 + i / 2);
    const Strip u = Load(scratch[i / kStripElements].u, Full());
    const auto lost = [s](Vector v) HWY_ATTR { return hn::Sub(v, hn::CopySignToAbs(s, v)); };
    Store(Map(lost, u), error + begin + i, count);
    StoreSigns(u, bits + (begin + i) / 8, count);
  });
}

// Compresses the input block by block, up to the first block that is not finite. An input gives
// the strip of u that begins at element i; EnterBlock comes before the strips of each block;
// Prefetch(i) fetches the cache line of element i from each array that it reads.
template <class Input>
HWY_INLINE size_t Compress(const BlockRule& rule, Input input, absl::Span<float> error,
                           OneBitSpan out) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  Scratch scratch(BlockCount(std::min(rule.block_elements, error.size()), kStripElements));
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, error.size() - begin);
    input.EnterBlock(block);
    const float scale = BlockScale(rule, Gather(input, begin, length, scratch.data()), length);
    if (!(scale <= kMaxScale)) return block;  // also when it is not a number
    out.scales[block] = scale;
    Pack(input, begin, length, scratch.data(), scale, error.data(), out.bits);
  }
  return blocks;
}

// u = (decayed_momentum + (one_minus_beta1 * g)) + e
template <class Count>
HWY_INLINE Strip AddGradientAndError(const Strip& decayed_momentum, float one_minus_beta1,
                                     const float* gradient, const float* error, Count count) {
  const Vector rate = hn::Set(Floats(), one_minus_beta1);
  const auto u = [rate](Vector m, Vector g, Vector e)
                     HWY_ATTR { return hn::Add(hn::Add(m, hn::Mul(rate, g)), e); };
  return Map(u, decayed_momentum, Load(gradient, count), Load(error, count));
}

struct DenseMomentumInput {
  MomentumRates rates;
  const float* gradient;
  const float* momentum;
  const float* error;

  void EnterBlock(size_t block) {}

  HWY_INLINE void Prefetch(size_t i) const {
    hwy::Prefetch(gradient + i);
    hwy::Prefetch(momentum + i);
    hwy::Prefetch(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    const Vector beta1 = hn::Set(Floats(), rates.beta1);
    const Strip decayed =
        Map([beta1](Vector m) HWY_ATTR { return hn::Mul(beta1, m); }, Load(momentum + i, count));
    return AddGradientAndError(decayed, rates.one_minus_beta1, gradient + i, error + i, count);
  }
};

struct OneBitMomentumInput {
  MomentumRates rates;
  const float* gradient;
  OneBitView momentum;
  const float* error;
  Magnitude decayed{0};  // the current block's beta1 * S: rounding is the same for both signs

  HWY_INLINE void EnterBlock(size_t block) {
    decayed = Magnitude(rates.beta1 * momentum.scales[block]);
  }

  HWY_INLINE void Prefetch(size_t i) const {
    hwy::Prefetch(gradient + i);
    hwy::Prefetch(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return AddGradientAndError(Signed(decayed, LoadSigns(momentum.bits + i / 8, count)),
                               rates.one_minus_beta1, gradient + i, error + i, count);
  }
};

// u = value + error
struct ValueInput {
  const float* values;
  const float* error;

  void EnterBlock(size_t block) {}

  HWY_INLINE void Prefetch(size_t i) const {
    hwy::Prefetch(values + i);
    hwy::Prefetch(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return Add(Load(values + i, count), Load(error + i, count));
  }
};

// u = (sum over ranks) * inverse_count + error
struct RankSumInput {
  absl::Span<const OneBitView> contributions;
  absl::Span<GroupSum> groups;
  float inverse_count;
  const float* error;

  HWY_INLINE void EnterBlock(size_t block) {
    for (size_t group = 0; group < groups.size(); ++group) {
      groups[group].EnterBlock(contributions.subspan(group * kRankGroup, kRankGroup), block);
    }
  }

  // Not here: bound by arithmetic rather than memory, it measures better with the short way ahead
  // that PrefetchStrip looks.
  void Prefetch(size_t i) const {}

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    PrefetchStrip(error + i);
    Strip sum = groups[0](i, count);
    for (size_t group = 1; group < groups.size(); ++group) {
      sum = Add(sum, groups[group](i, count));
    }
    const Vector inverse = hn::Set(Floats(), inverse_count);
    const auto mean_and_error = [inverse](Vector s, Vector e)
                                    HWY_ATTR { return hn::Add(hn::Mul(s, inverse), e); };
    return Map(mean_and_error, sum, Load(error + i, count));
  }
};

size_t CompressDenseMomentum(const BlockRule& rule, MomentumRates rates,
                             absl::Span<const float> gradient, const float* momentum,
                             absl::Span<float> error, OneBitSpan out) {
  const DenseMomentumInput input = {rates, gradient.data(), momentum, error.data()};
  return Compress(rule, input, error, out);
}

size_t CompressOneBitMomentum(const BlockRule& rule, MomentumRates rates,
                              absl::Span<const float> gradient, OneBitView momentum,
                              absl::Span<float> error, OneBitSpan out) {
  const OneBitMomentumInput input = {rates, gradient.data(), momentum, error.data()};
  return Compress(rule, input, error, out);
}

size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out) {
  const ValueInput input = {values.data(), error.data()};
  return Compress(rule, input, error, out);
}

void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values) {
  const size_t blocks = BlockCount(values.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const Magnitude scale(compressed.scales[block]);
    const size_t length = std::min(rule.block_elements, values.size() - begin);
    ForEachStrip(length, [&](size_t i, auto count) HWY_ATTR {
      const uint32_t signs = LoadSigns(compressed.bits + (begin + i) / 8, count);
      Store(Signed(scale, signs), values.data() + begin + i, count);
    });
  }
}

size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out) {
  absl::FixedArray<GroupSum, 16> groups(BlockCount(contributions.size(), kRankGroup));
  const RankSumInput input = {contributions, absl::MakeSpan(groups), inverse_count, error.data()};
  return Compress(rule, input, error, out);
}

void ApplyMomentum(const BlockRule& rule, OneBitView momentum, float learning_rate,
                   float weight_decay, absl::Span<const float> inverse_denominator,
                   absl::Span<float> parameters) {
  const Vector rate = hn::Set(Floats(), learning_rate);
  const Vector decay = hn::Set(Floats(), weight_decay);
  const auto step = [rate, decay](Vector m, Vector inverse, Vector x) HWY_ATTR {
    const Vector direction = hn::Add(hn::Mul(m, inverse), hn::Mul(decay, x));
    return hn::Sub(x, hn::Mul(rate, direction));
  };
  const size_t blocks = BlockCount(parameters.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const Magnitude scale(momentum.scales[block]);
    const float* const inverse = inverse_denominator.data() + begin;
    float* const x = parameters.data() + begin;
    const size_t length = std::min(rule.block_elements, parameters.size() - begin);
    ForEachStrip(length, [&](size_t i, auto count) HWY_ATTR {
      PrefetchStrip(inverse + i);
      PrefetchStrip(x + i);
      const Strip m = Signed(scale, LoadSigns(momentum.bits + (begin + i) / 8, count));
      Store(Map(step, m, Load(inverse + i, count), Load(x + i, count)), x + i, count);
    });
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
    ForEachStrip(length, [&](size_t i, auto count) HWY_ATTR {
      PrefetchStrip(sum + i);
      const Strip value = Signed(scale, LoadSigns(addend.bits + (begin + i) / 8, count));
      Store(Add(Load(sum + i, count), value), sum + i, count);
    });
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
