// How the SIMD kernels compress with error feedback, block by block and in one pass over main
// memory: a block's u is made and measured, and then packed, while the next block is fetched.
// Included once per Highway target.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/container/fixed_array.h"
#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/strip-inl.h"

#if defined(SIGNPOST_KERNELS_COMPRESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_KERNELS_COMPRESS_INL_H_
#undef SIGNPOST_KERNELS_COMPRESS_INL_H_
#else
#define SIGNPOST_KERNELS_COMPRESS_INL_H_
#endif

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

// A block's u, or a part of the sum that it is made of, from one pass over the block to the next.
// Blocks of the usual size lie on the stack and stay in the first-level cache.
class Scratch {
 public:
  explicit Scratch(size_t elements) : strips_(BlockCount(elements, kStripElements)) {}
  float* data() { return strips_.data()->elements; }

 private:
  struct alignas(64) AlignedStrip {
    float elements[kStripElements];
  };
  static constexpr size_t kStackElements = 4096;
  absl::FixedArray<AlignedStrip, kStackElements / kStripElements> strips_;
};

// Fetches the next block while one is worked on, a part of it with each strip of each pass over the
// block, so that memory is never idle. The pass that makes u takes longer than others, and fetches
// the rest.
template <class Input>
class Ahead {
 public:
  explicit HWY_INLINE Ahead(const Input& input)
      : input_(input),
        share_(std::min(kMaxShare, kStripElements / input.Passes())),
        rest_(kStripElements - share_ * (input.Passes() - 1)) {}

  HWY_INLINE void EnterBlock(const Block& block) { next_ = block.begin + block.length; }

  HWY_INLINE void Fetch() {
    input_.Prefetch(next_);
    next_ += share_;
  }

  HWY_INLINE void FetchRest() {
    input_.Prefetch(next_);
    input_.Prefetch(next_ + kCacheLine);
    next_ += rest_;
  }

 private:
  static constexpr size_t kCacheLine = 16;  // in elements, as all here
  static constexpr size_t kMaxShare = 12;

  const Input& input_;
  // As steps, neither leaves out a cache line.
  const size_t share_;
  const size_t rest_;
  size_t next_ = 0;
};

// Calls use(i, count, u) for each strip of a block, with what an input makes of it at once.
template <class Input, class Use>
HWY_INLINE void ForEachStripOf(Input& input, const Block& block, Ahead<Input>&, const float*,
                               Use use) {
  input.EnterBlock(block.index);
  ForEachStrip(block.length, [&](size_t i, auto count)
                                 STRIP_BODY { use(i, count, input(block.begin + i, count)); });
}

// Measures the input's u of a block, and keeps it in the scratch unless the input can make it
// again.
template <class Input, class Measure>
HWY_INLINE void MeasureBlock(Input& input, const Block& block, Ahead<Input>& ahead, float* scratch,
                             Measure& measure) {
  ForEachStripOf(input, block, ahead, scratch, [&](size_t i, auto count, Strip u) STRIP_BODY {
    ahead.FetchRest();
    u = ZeroBeyond(u, count);
    if constexpr (!Input::kIsMadeTwice) Store(u, scratch + i, Full());
    measure.Add(i, u);
  });
}

// Packs a block, and writes what that loses.
template <class Input, class Packer>
HWY_INLINE void PackBlock(const Input& input, const Block& block, Ahead<Input>& ahead,
                          const float* scratch, const Packer& pack, float* error) {
  const auto u = [&](size_t i, auto count) STRIP_BODY {
    if constexpr (Input::kIsMadeTwice) {
      return ZeroBeyond(input(block.begin + i, count), count);
    } else {
      return Load(scratch + i, Full());
    }
  };
  ForEachStrip(block.length, [&](size_t i, auto count) STRIP_BODY {
    ahead.Fetch();
    Store(pack(u(i, count), block.begin + i, count), error + block.begin + i, count);
  });
}

// Compresses the input block by block, and leaves what that loses in `error`; what is not finite,
// and what it returns, as onebit.h says of CompressMomentum.
//
// An input gives the strip of u that begins at element i; EnterBlock comes before the strips of
// each block; Prefetch(i) fetches the cache line of element i from each array that it reads;
// Passes() is how often it fetches ahead of a whole block, packing included. With kIsMadeTwice it
// gives the strips once more when they are packed, which pays where it reads two arrays: the first-
// level cache holds a block of two, but not its u besides.
//
// A format has a Measure, whose Add(i, u) takes in a block's u strip by strip, zeros behind its
// end. ScaleOf(measure, length) is the scale that they make, and PackerOf(measure, scale) a
// function that writes the strip that begins at element i of the span and returns what that loses.
template <class Input, class Format>
HWY_INLINE size_t Compress(const BlockRule& rule, Input input, absl::Span<float> error,
                           const Format& format, float* scales) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  Scratch scratch(Input::kIsMadeTwice ? 0 : std::min(rule.block_elements, error.size()));
  size_t first_not_packed = blocks;
  Ahead ahead(input);
  for (size_t index = 0; index < blocks; ++index) {
    const size_t begin = index * rule.block_elements;
    const Block block = {index, begin, std::min(rule.block_elements, error.size() - begin)};
    ahead.EnterBlock(block);
    typename Format::Measure measure;
    MeasureBlock(input, block, ahead, scratch.data(), measure);
    const float scale = format.ScaleOf(measure, block.length);
    if (HWY_LIKELY(scale <= kMaxScale)) {
      scales[index] = scale;
      PackBlock(input, block, ahead, scratch.data(), format.PackerOf(measure, scale), error.data());
    } else {  // also when it is not a number
      scales[index] = kNotPacked;
      first_not_packed = std::min(first_not_packed, index);
    }
  }
  return first_not_packed;
}

// u = value + error
struct ValueInput {
  static constexpr bool kIsMadeTwice = true;

  const float* values;
  const float* error;

  size_t Passes() const { return 2; }

  void EnterBlock(size_t block) {}

  HWY_INLINE void Prefetch(size_t i) const {
    PrefetchFar(values + i);
    PrefetchFar(error + i);
  }

  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return Add(Load(values + i, count), Load(error + i, count));
  }
};

// What is read after one pass over a block's ranks: the elements from `begin` on of another's. Only
// one pass's ranks are under way at a time, however many there are.
struct NextPass {
  HWY_INLINE NextPass(size_t ranks, size_t ranks_per_pass, size_t this_pass, const Block& block) {
    const bool is_last = (this_pass + 1) * ranks_per_pass >= ranks;
    index = is_last ? 0 : this_pass + 1;
    begin = is_last ? block.begin + block.length : block.begin;
  }
  size_t index;
  size_t begin;
};

// u = (sum over ranks) * inverse_count + error. `ranks` are so many, and kPerPass of them, whole
// groups (block.h), are added up at a time: ForEachSum(pass, block, use) calls use(i, count,
// sum...) for each strip of a block with the sums of a pass's groups, and ForEachLastSum with those
// of the last, which may have fewer ranks.
template <class Ranks>
struct RankSumInput {
  static constexpr bool kIsMadeTwice = false;

  Ranks ranks;
  float inverse_count;
  const float* error;

  size_t LastSum() const { return (ranks.size() - 1) / Ranks::kPerPass; }
  size_t Passes() const { return LastSum() + 2; }

  HWY_INLINE void Prefetch(size_t i) const { PrefetchFar(error + i); }

  template <class Count>
  HWY_INLINE Strip MeanAndError(const Strip& sum, size_t i, Count count) const {
    const Vector inverse = hn::Set(Floats(), inverse_count);
    const auto mean_and_error = [inverse](Vector s, Vector e)
                                    STRIP_BODY { return hn::Add(hn::Mul(s, inverse), e); };
    return Map(mean_and_error, sum, Load(error + i, count));
  }
};

// Goes over the block once for each pass. All sums but the last are kept in the scratch.
template <class Ranks, class Use>
HWY_INLINE void ForEachStripOf(RankSumInput<Ranks>& input, const Block& block,
                               Ahead<RankSumInput<Ranks>>& ahead, float* scratch, Use use) {
  const auto keep = [&](size_t i, auto, const auto&... sums) STRIP_BODY {
    ahead.Fetch();
    Store(Sum(sums...), scratch + i, Full());
  };
  const auto add = [&](size_t i, auto, const auto&... sums) STRIP_BODY {
    ahead.Fetch();
    Store(Sum(Load(scratch + i, Full()), sums...), scratch + i, Full());
  };
  const auto use_only = [&](size_t i, auto count, const auto&... sums) STRIP_BODY {
    use(i, count, input.MeanAndError(Sum(sums...), block.begin + i, count));
  };
  const auto use_last = [&](size_t i, auto count, const auto&... sums)
                            STRIP_BODY { use_only(i, count, Load(scratch + i, Full()), sums...); };
  const size_t last = input.LastSum();
  if (last == 0) return input.ranks.ForEachLastSum(0, block, use_only);
  input.ranks.ForEachSum(0, block, keep);
  for (size_t pass = 1; pass < last; ++pass) input.ranks.ForEachSum(pass, block, add);
  input.ranks.ForEachLastSum(last, block, use_last);
}

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_COMPRESS_INL_H_
