// The SIMD variants of dense.h, in strips; dense.cc includes this once per Highway target. No guard
// of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/dense_reference.h"
#include "kernels/dense_strip-inl.h"
#include "kernels/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AddDense;
using reference::AggregateDense;
using reference::CompressDense;
using reference::DenseWithinRange;
using reference::Scale;

#else

// Whether every lane is finite and at most kMaxDense in magnitude.
HWY_INLINE bool IsWithinRange(const Strip& strip) {
  const Vector limit = hn::Set(Floats(), kMaxDense);
  bool within = true;
  ForEachVector([&](size_t k) STRIP_BODY {
    within &= hn::AllTrue(Floats(), hn::Le(hn::Abs(strip.v[k]), limit));
  });
  return within;
}

HWY_INLINE bool SumIsWithinRange(const float* gradient, const float* error, size_t length) {
  bool within = true;
  ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
    PrefetchStrip(gradient + i);
    PrefetchStrip(error + i);
    within &= IsWithinRange(Add(Load(gradient + i, count), Load(error + i, count)));
  });
  return within;
}

template <class Codec>
HWY_INLINE size_t CompressDenseAs(const BlockRule& rule, absl::Span<const float> gradient,
                                  absl::Span<float> error, uint8_t* out) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  size_t first_not_packed = blocks;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t length = std::min(rule.block_elements, error.size() - begin);
    const float* const g = gradient.data() + begin;
    float* const e = error.data() + begin;
    if (!SumIsWithinRange(g, e, length)) {
      reference::StoreDense(Codec::kType, kNotPacked, out, begin);
      first_not_packed = std::min(first_not_packed, block);
      continue;
    }
    ForEachStrip(length, [&](size_t i, auto count) STRIP_BODY {
      const Strip u = Add(Load(g + i, count), Load(e + i, count));
      Store(Codec::Encode(u, out, begin + i, count), e + i, count);
    });
  }
  return first_not_packed;
}

size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out) {
  return WithCodec(type, [&](auto codec) STRIP_BODY {
    return CompressDenseAs<decltype(codec)>(rule, gradient, error, out);
  });
}

// The strip of the sum over ranks that begins at element i, in the order of block.h.
template <class Codec, class Count>
HWY_INLINE Strip SumOverRanks(absl::Span<const uint8_t* const> contributions, size_t i,
                              Count count) {
  Strip sum;
  for (size_t group = 0; group < contributions.size(); group += kRankGroup) {
    Strip partial = Codec::Decode(contributions[group], i, count);
    const size_t end = std::min(group + kRankGroup, contributions.size());
    for (size_t rank = group + 1; rank < end; ++rank) {
      partial = Add(partial, Codec::Decode(contributions[rank], i, count));
    }
    sum = group == 0 ? partial : Add(sum, partial);
  }
  return sum;
}

template <class Codec>
HWY_INLINE void AggregateDenseAs(absl::Span<const uint8_t* const> contributions,
                                 float inverse_count, absl::Span<float> error, uint8_t* out) {
  const Vector inverse = hn::Set(Floats(), inverse_count);
  const auto mean_and_error = [inverse](Vector sum, Vector e)
                                  STRIP_BODY { return hn::Add(hn::Mul(sum, inverse), e); };
  ForEachStrip(error.size(), [&](size_t i, auto count) STRIP_BODY {
    float* const e = error.data() + i;
    PrefetchStrip(e);
    const Strip u =
        Map(mean_and_error, SumOverRanks<Codec>(contributions, i, count), Load(e, count));
    Store(Codec::Encode(u, out, i, count), e, count);
  });
}

void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions,
                    float inverse_count, absl::Span<float> error, uint8_t* out) {
  WithCodec(type, [&](auto codec) STRIP_BODY {
    AggregateDenseAs<decltype(codec)>(contributions, inverse_count, error, out);
  });
}

void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator) {
  const Vector f = hn::Set(Floats(), factor);
  const auto add = [f](Vector sum, Vector a) STRIP_BODY { return hn::Add(sum, hn::Mul(f, a)); };
  WithCodec(type, [&](auto codec) STRIP_BODY {
    ForEachStrip(accumulator.size(), [&](size_t i, auto count) STRIP_BODY {
      float* const sum = accumulator.data() + i;
      PrefetchStrip(sum);
      Store(Map(add, Load(sum, count), codec.Decode(addend, i, count)), sum, count);
    });
  });
}

void Scale(float factor, absl::Span<float> values) {
  const Vector f = hn::Set(Floats(), factor);
  const auto scale = [f](Vector v) STRIP_BODY { return hn::Mul(f, v); };
  ForEachStrip(values.size(), [&](size_t i, auto count) STRIP_BODY {
    PrefetchStrip(values.data() + i);
    Store(Map(scale, Load(values.data() + i, count)), values.data() + i, count);
  });
}

bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements) {
  bool within = true;
  WithCodec(type, [&](auto codec) STRIP_BODY {
    ForEachStrip(elements, [&](size_t i, auto count) STRIP_BODY {
      within &= IsWithinRange(codec.Decode(payload, i, count));
    });
  });
  return within;
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
