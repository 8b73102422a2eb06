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
#include "kernels/formulas.h"
#include "kernels/onebit.h"
#include "kernels/onebit_reference.h"
#include "kernels/rank_sum-inl.h"
#include "kernels/square_lanes-inl.h"
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
class Scratch {
 public:
  explicit Scratch(size_t elements) : pieces_(BlockCount(elements, kPieceElements)) {}
  float* data() { return pieces_.data()->elements; }

 private:
  struct alignas(64) AlignedPiece {
    float elements[kPieceElements];
  };
  static constexpr size_t kStackElements = 4096;
  absl::FixedArray<AlignedPiece, kStackElements / kPieceElements> pieces_;
};

// A block of a span: elements [begin, begin + length).
struct Block {
  size_t index;
  size_t begin;
  size_t length;
};

// Fetches the next block while one is worked on, a part of it with each strip of each pass over the
// block, so that memory is never idle. Gather takes longer than other passes, and fetches the rest.
template <class Input>
class Ahead {
 public:
  explicit HWY_INLINE Ahead(const Input& input)
      : input_(input), rest_(kStripElements - kShare * (input.Passes() - 1)) {}

  HWY_INLINE void EnterBlock(const Block& block) { next_ = block.begin + block.length; }

  HWY_INLINE void Fetch() {
    input_.Prefetch(next_);
    next_ += kShare;
  }

  HWY_INLINE void FetchRest() {
    input_.Prefetch(next_);
    input_.Prefetch(next_ + kCacheLine);
    next_ += rest_;
  }

 private:
  // In elements. As steps, neither leaves out a cache line.
  static constexpr size_t kCacheLine = 16;
  static constexpr size_t kShare = 12;

  const Input& input_;
  const size_t rest_;
  size_t next_ = 0;
};

// Fills the scratch with the input's u of a block; returns their sum of squares.
template <class Input>
HWY_INLINE float Gather(Input& input, const Block& block, Ahead<Input>& ahead, float* scratch) {
  SquareLanes squares;
  ForEachStripOf(input, block, ahead, scratch, [&](size_t i, auto count, Strip u) STRIP_BODY {
    ahead.FetchRest();
    u = ZeroBeyond(u, count);
    Store(u, scratch + i, Full());
    squares.Add(i, u);
  });
  return squares.Fold();
}

// Writes a block: its sign bits and what they lose.
template <class Input>
HWY_INLINE void Pack(const Block& block, Ahead<Input>& ahead, const float* scratch, float scale,
                     float* error, uint8_t* bits) {
  const Magnitude magnitude(scale);
  const auto lost = [&](Vector v) STRIP_BODY { return hn::Sub(v, SignedLike(v, magnitude)); };
  ForEachStrip(block.length, [&](size_t i, auto count) STRIP_BODY {
    ahead.Fetch();
    const Strip u = Load(scratch + i, Full());
    Store(Map(lost, u), error + block.begin + i, count);
    StoreSigns(u, bits + (block.begin + i) / 8, count);
  });
}

// Compresses the input block by block; as onebit.h says of CompressMomentum. An input gives the
// strip of u that begins at element i; EnterBlock comes before the strips of each block;
// Prefetch(i) fetches the cache line of element i from each array that it reads; Passes() is how
// often it fetches ahead of a whole block, packing included.
template <class Input>
HWY_INLINE size_t Compress(const BlockRule& rule, Input input, absl::Span<float> error,
                           OneBitSpan out) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  Scratch scratch(std::min(rule.block_elements, error.size()));
  size_t first_not_packed = blocks;
  Ahead ahead(input);
  for (size_t index = 0; index < blocks; ++index) {
    const size_t begin = index * rule.block_elements;
    const Block block = {index, begin, std::min(rule.block_elements, error.size() - begin)};
    ahead.EnterBlock(block);
    const float squares = Gather(input, block, ahead, scratch.data());
    const float scale = formulas::BlockScale(rule.gamma, squares, block.length);
    if (HWY_LIKELY(scale <= kMaxScale)) {
      out.scales[index] = scale;
      Pack(block, ahead, scratch.data(), scale, error.data(), out.bits);
    } else {  // also when it is not a number
      out.scales[index] = kNotPacked;
      first_not_packed = std::min(first_not_packed, index);
    }
  }
  return first_not_packed;
}

// Calls use(i, count, u) for each strip of a block, with what an input makes of it at once.
template <class Input, class Use>
HWY_INLINE void ForEachStripOf(Input& input, const Block& block, Ahead<Input>&, const float*,
                               Use use) {
  input.EnterBlock(block.index);
  ForEachStrip(block.length, [&](size_t i, auto count)
                                 STRIP_BODY { use(i, count, input(block.begin + i, count)); });
}

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
  MomentumRates rates;
  const float* gradient;
  const float* momentum;
  const float* error;

  size_t Passes() const { return 2; }

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
        Map([beta1](Vector m) STRIP_BODY { return hn::Mul(beta1, m); }, Load(momentum + i, count));
    return AddGradientAndError(decayed, rates.one_minus_beta1, gradient + i, error + i, count);
  }
};

struct OneBitMomentumInput {
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

  size_t Passes() const { return 2; }

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
  float inverse_count;
  const float* error;

  // Not in those between the first and the last, which are bound by arithmetic anyway.
  size_t Passes() const { return contributions.size() > kRankGroup ? 3 : 2; }

  HWY_INLINE void Prefetch(size_t i) const { hwy::Prefetch(error + i); }

  template <class Count>
  HWY_INLINE Strip MeanAndError(const Strip& sum, size_t i, Count count) const {
    const Vector inverse = hn::Set(Floats(), inverse_count);
    const auto mean_and_error = [inverse](Vector s, Vector e)
                                    STRIP_BODY { return hn::Add(hn::Mul(s, inverse), e); };
    return Map(mean_and_error, sum, Load(error + i, count));
  }

  // Calls use(i, count, sum) for each strip of a block, with the sum of a group of ranks.
  template <class Use>
  HWY_INLINE void ForEachSum(size_t group, const Block& block, Use use) const {
    const auto ranks = contributions.subspan(group * kRankGroup, kRankGroup);
    const bool is_last = (group + 1) * kRankGroup >= contributions.size();
    const GroupBits bits(ranks, block.begin / 8);
    // What is read next: only four ranks' bits are under way at a time, however many there are.
    const GroupBits next(contributions.subspan(is_last ? 0 : (group + 1) * kRankGroup, kRankGroup),
                         (is_last ? block.begin + block.length : block.begin) / 8);
    GroupSum(ranks, block.index).ForEachStrip(bits, next, block.length, use);
  }
};

// Goes over the block once for each group of ranks. All sums but the last are kept in the scratch.
template <class Use>
HWY_INLINE void ForEachStripOf(RankSumInput& input, const Block& block, Ahead<RankSumInput>& ahead,
                               float* scratch, Use use) {
  const auto keep = [&](size_t i, auto, const Strip& sum) STRIP_BODY {
    ahead.Fetch();
    Store(sum, scratch + i, Full());
  };
  const auto add = [&](size_t i, auto, const Strip& sum) STRIP_BODY {
    Store(Add(Load(scratch + i, Full()), sum), scratch + i, Full());
  };
  const auto use_only = [&](size_t i, auto count, const Strip& sum) STRIP_BODY {
    use(i, count, input.MeanAndError(sum, block.begin + i, count));
  };
  const auto use_last = [&](size_t i, auto count, const Strip& sum)
                            STRIP_BODY { use_only(i, count, Add(Load(scratch + i, Full()), sum)); };
  const size_t last = (input.contributions.size() - 1) / kRankGroup;
  if (last == 0) return input.ForEachSum(0, block, use_only);
  input.ForEachSum(0, block, keep);
  for (size_t group = 1; group < last; ++group) input.ForEachSum(group, block, add);
  input.ForEachSum(last, block, use_last);
}

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
  // What no cache of a core's own holds is better not read from memory to be written.
  constexpr size_t kStreamedElements = size_t{64} << 10;
  const bool is_large = values.size() >= kStreamedElements;
  const size_t blocks = BlockCount(values.size(), rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    float* const out = values.data() + begin;
    const Magnitude scale(compressed.scales[block]);
    const size_t length = std::min(rule.block_elements, values.size() - begin);
    const auto strip_at = [&](size_t i, auto count) STRIP_BODY {
      return Signed(scale, LoadSigns(compressed.bits + (begin + i) / 8, count));
    };
    if (is_large && AreVectorsAligned(out)) {
      ForEachStrip(length, [&](size_t i, auto count)
                               STRIP_BODY { Stream(strip_at(i, count), out + i, count); });
    } else {
      ForEachStrip(length, [&](size_t i, auto count)
                               STRIP_BODY { Store(strip_at(i, count), out + i, count); });
    }
  }
  if (is_large) hwy::FlushStream();
}

size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out) {
  const RankSumInput input = {contributions, inverse_count, error.data()};
  return Compress(rule, input, error, out);
}

void ApplyMomentum(const BlockRule& rule, OneBitView momentum, float learning_rate,
                   float weight_decay, absl::Span<const float> inverse_denominator,
                   absl::Span<float> parameters) {
  const Vector rate = hn::Set(Floats(), learning_rate);
  const Vector decay = hn::Set(Floats(), weight_decay);
  const auto step = [rate, decay](Vector m, Vector inverse, Vector x) STRIP_BODY {
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
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
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
