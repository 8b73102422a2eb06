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
#include "kernels/formulas.h"
#include "kernels/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AddDense;
using reference::AggregateDense;
using reference::CompressDense;
using reference::DecompressDense;
using reference::DenseWithinRange;
using reference::Scale;

#else

// The strips of an error, or of the zeros that stand for none.
struct SomeError {
  static constexpr bool kIsNone = false;
  float* data;

  void Prefetch(size_t i) const { PrefetchStrip(data + i); }
  void PrefetchFar(size_t i) const { PrefetchStripFar(data + i); }
  template <class Count>
  HWY_INLINE Strip Load(size_t i, Count count) const {
    return HWY_NAMESPACE::Load(data + i, count);
  }
  template <class Count>
  HWY_INLINE void Store(const Strip& strip, size_t i, Count count) const {
    HWY_NAMESPACE::Store(strip, data + i, count);
  }
};
struct NoError {
  static constexpr bool kIsNone = true;
  HWY_INLINE Strip Load(size_t i, size_t count) const { return Zeros(); }
};

// Calls body(codec, error) with those that they are.
template <class Body>
HWY_INLINE auto WithCodecAndError(DenseType type, absl::Span<float> error, Body body) {
  const SomeError some = {error.data()};
  if (error.empty() && type == DenseType::kFloat32) return body(Float32Codec(), NoError());
  return WithCodec(type, [&](auto codec) STRIP_BODY { return body(codec, some); });
}

// Packs a block, and returns whether it is within range; if it is not, its errors are as they were.
// The first half, or as much of a larger block, is packed as it is read, and its old errors are
// kept; the rest is looked at first and packed then. Of a block of the usual size the first-level
// cache has room for that, and not for all of its old errors, or to come back to all of it.
template <class Codec>
HWY_INLINE bool PackBlock(absl::Span<const float> gradient, SomeError error, const Block& block,
                          uint8_t* out) {
  constexpr size_t kMostKept = 2048;
  HWY_ALIGN float kept[kMostKept];
  const size_t first_half = std::min(kMostKept, block.length / 2 / kStripElements * kStripElements);
  LargestMagnitude largest;
  const auto fetch = [&](size_t i) STRIP_BODY {
    PrefetchStripFar(gradient.data() + i);
    error.PrefetchFar(i);
  };
  const auto pack = [&](const Strip& u, size_t i, auto count) STRIP_BODY {
    PrefetchWritten(out + DenseBytes(Codec::kType, i));
    error.Store(Codec::Encode(u, out, i, count), i, count);
  };
  ForEachStrip(first_half, [&](size_t i, auto count) STRIP_BODY {
    fetch(block.begin + i);
    const Strip e = error.Load(block.begin + i, count);
    Store(e, kept + i, count);
    const Strip u = Add(Load(gradient.data() + block.begin + i, count), e);
    largest.Add(u);
    pack(u, block.begin + i, count);
  });
  const size_t rest = block.begin + first_half, rest_length = block.length - first_half;
  const auto u = [&](size_t i, auto count) STRIP_BODY {
    return Add(Load(gradient.data() + rest + i, count), error.Load(rest + i, count));
  };
  ForEachStrip(rest_length, [&](size_t i, auto count) STRIP_BODY {
    fetch(rest + i);
    largest.Add(u(i, count));
  });
  if (!formulas::IsWithinRange(largest.Get())) {
    std::copy_n(kept, first_half, error.data + block.begin);
    return false;
  }
  ForEachStrip(rest_length,
               [&](size_t i, auto count) STRIP_BODY { pack(u(i, count), rest + i, count); });
  return true;
}

// A copy, and no more: of what is written, nothing should be read first. Errors of zero are added
// still: -0 becomes 0.
template <class Codec>
HWY_INLINE bool PackBlock(absl::Span<const float> gradient, NoError, const Block& block,
                          uint8_t* out) {
  static_assert(Codec::kType == DenseType::kFloat32);
  const float* const from = gradient.data() + block.begin;
  LargestMagnitude largest;
  ForEachStrip(block.length, [&](size_t i, auto count) STRIP_BODY {
    PrefetchStripFar(from + i);
    largest.Add(Load(from + i, count));
  });
  if (!formulas::IsWithinRange(largest.Get())) return false;
  WriteStrips(reinterpret_cast<float*>(out) + block.begin, block.length, gradient.size(),
              [&](size_t i, auto count) STRIP_BODY { return Add(Load(from + i, count), Zeros()); });
  return true;
}

template <class Codec, class Error>
HWY_INLINE size_t CompressDenseAs(const BlockRule& rule, absl::Span<const float> gradient,
                                  Error error, uint8_t* out) {
  const size_t blocks = BlockCount(gradient.size(), rule.block_elements);
  size_t first_not_packed = blocks;
  for (size_t index = 0; index < blocks; ++index) {
    const size_t begin = index * rule.block_elements;
    const Block block = {index, begin, std::min(rule.block_elements, gradient.size() - begin)};
    if (PackBlock<Codec>(gradient, error, block, out)) continue;
    reference::StoreNotPacked(Codec::kType, out, block.begin, block.length);
    first_not_packed = std::min(first_not_packed, index);
  }
  if constexpr (Error::kIsNone) FinishStrips(gradient.size());
  return first_not_packed;
}

size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out) {
  return WithCodecAndError(type, error, [&](auto codec, auto error_strips) STRIP_BODY {
    return CompressDenseAs<decltype(codec)>(rule, gradient, error_strips, out);
  });
}

// Fetches what a strip takes, so far ahead that it has come when the strip is decoded.
template <class Codec>
HWY_INLINE void PrefetchPayload(const uint8_t* payload, size_t i) {
  constexpr size_t kLine = 64;
  const uint8_t* const ahead = payload + DenseBytes(Codec::kType, i + kPrefetchElements);
  for (size_t line = 0; line < DenseBytes(Codec::kType, kStripElements); line += kLine) {
    PrefetchFar(ahead + line);
  }
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

template <class Codec, class Error>
HWY_INLINE void AggregateDenseAs(absl::Span<const uint8_t* const> contributions, size_t n,
                                 float inverse_count, Error error, uint8_t* out) {
  const Vector inverse = hn::Set(Floats(), inverse_count);
  const auto mean_and_error = [inverse](Vector sum, Vector e)
                                  STRIP_BODY { return hn::Add(hn::Mul(sum, inverse), e); };
  const auto u = [&](size_t i, auto count) STRIP_BODY {
    return Map(mean_and_error, SumOverRanks<Codec>(contributions, i, count), error.Load(i, count));
  };
  if constexpr (Error::kIsNone) {
    static_assert(Codec::kType == DenseType::kFloat32);
    WriteStrips(reinterpret_cast<float*>(out), n, n, [&](size_t i, auto count) STRIP_BODY {
      for (const uint8_t* contribution : contributions) PrefetchPayload<Codec>(contribution, i);
      return u(i, count);
    });
    FinishStrips(n);
  } else {
    ForEachStrip(n, [&](size_t i, auto count) STRIP_BODY {
      error.Prefetch(i);
      error.Store(Codec::Encode(u(i, count), out, i, count), i, count);
    });
  }
}

void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out) {
  WithCodecAndError(type, error, [&](auto codec, auto error_strips) STRIP_BODY {
    AggregateDenseAs<decltype(codec)>(contributions, n, inverse_count, error_strips, out);
  });
}

void DecompressDense(DenseType type, const uint8_t* payload, absl::Span<float> values) {
  WithCodec(type, [&](auto codec) STRIP_BODY {
    const auto strip_at = [&](size_t i, auto count) STRIP_BODY {
      PrefetchPayload<decltype(codec)>(payload, i);
      return codec.Decode(payload, i, count);
    };
    WriteStrips(values.data(), values.size(), values.size(), strip_at);
  });
  FinishStrips(values.size());
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
  LargestMagnitude largest;
  WithCodec(type, [&](auto codec) STRIP_BODY {
    ForEachStrip(elements, [&](size_t i, auto count)
                               STRIP_BODY { largest.Add(codec.Decode(payload, i, count)); });
  });
  return formulas::IsWithinRange(largest.Get());
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
