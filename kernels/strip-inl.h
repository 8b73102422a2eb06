// Strips: the unit in which the SIMD kernels walk a span. A strip is 32 elements, one 32-bit word
// of sign bits: four vectors of AVX2 or two of AVX-512. Included once per Highway target.
//
// The last strip of a span or block may be short. Then only its own elements are read and written
// in memory, and the lanes behind them are zero when loaded.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/formulas.h"

#if defined(SIGNPOST_KERNELS_STRIP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_KERNELS_STRIP_INL_H_
#undef SIGNPOST_KERNELS_STRIP_INL_H_
#else
#define SIGNPOST_KERNELS_STRIP_INL_H_
#endif

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToSigned<Floats>;
using Vector = hn::Vec<Floats>;

inline constexpr size_t kLanes = hn::MaxLanes(Floats());
inline constexpr size_t kStripElements = 32;
inline constexpr size_t kStripVectors = kStripElements / kLanes;

struct Strip {
  Vector v[kStripVectors];
};

struct WordStrip {
  hn::Vec<Words> v[kStripVectors];
};

// The number of a strip's elements: either all, known when compiling, or a size_t below that.
using Full = std::integral_constant<size_t, kStripElements>;

// For what is handed to a loop below: unless it is inlined, what it keeps from one strip to the
// next goes through memory.
#undef STRIP_BODY
#define STRIP_BODY HWY_ATTR __attribute__((always_inline))

// A block of a span: elements [begin, begin + length).
struct Block {
  size_t index;
  size_t begin;
  size_t length;
};

// Calls body(i, count) for each strip of a span: i is where it begins.
template <class Body>
HWY_INLINE void ForEachStrip(size_t elements, Body body) {
  size_t i = 0;
  for (; i + kStripElements <= elements; i += kStripElements) body(i, Full());
  if (i < elements) body(i, elements - i);
}

// Index sequences rather than loops: a strip must live in registers, which compilers do not grant
// to an array that a loop goes over.
using VectorIndices = std::make_index_sequence<kStripVectors>;

template <class Body, size_t... k>
HWY_INLINE void ForEachVector(Body body, std::index_sequence<k...>) {
  (body(k), ...);
}

template <class Result, class Make, size_t... k>
HWY_INLINE Result MakeStrip(Make make, std::index_sequence<k...>) {
  return {{make(k)...}};
}

// Calls body(k) for each vector k of a strip.
template <class Body>
HWY_INLINE void ForEachVector(Body body) {
  ForEachVector(body, VectorIndices());
}

// The strip of the vectors make(0), make(1), ...
template <class Result = Strip, class Make>
HWY_INLINE Result MakeStrip(Make make) {
  return MakeStrip<Result>(make, VectorIndices());
}

// result[lane] = operation(strips[lane]...): one vector operation for the whole strip.
template <class Operation, class... Strips>
HWY_INLINE Strip Map(Operation operation, const Strips&... strips) {
  return MakeStrip([&](size_t k) STRIP_BODY { return operation(strips.v[k]...); });
}

// Fetches what is needed only some thousand cycles later, into the second-level cache: it has room,
// and more lines can be on their way to it than to the first level.
HWY_INLINE void PrefetchFar(const void* p) { __builtin_prefetch(p, /*rw=*/0, /*locality=*/2); }

// The processor's own prefetchers stop at the end of a 4 KiB page.
inline constexpr size_t kPrefetchElements = 512;

HWY_INLINE void PrefetchStrip(const float* p) {
  static_assert(kStripElements * sizeof(float) == 128, "two cache lines");
  hwy::Prefetch(p + kPrefetchElements);
  hwy::Prefetch(p + kPrefetchElements + kStripElements / 2);
}

HWY_INLINE void PrefetchStripFar(const float* p) {
  PrefetchFar(p + kPrefetchElements);
  PrefetchFar(p + kPrefetchElements + kStripElements / 2);
}

// Where bytes are written that have not been read: stores wait for each other when one of them has
// no cache line.
HWY_INLINE void PrefetchWritten(const uint8_t* p) {
  constexpr size_t kBytesAhead = 2048;
  PrefetchFar(p + kBytesAhead);
}

// The lanes of vector k that belong to a strip of `count` elements.
HWY_INLINE hn::Mask<Floats> LanesOf(size_t k, size_t count) {
  const size_t before = k * kLanes;
  return hn::FirstN(Floats(), std::min(kLanes, count - std::min(before, count)));
}

HWY_INLINE Strip Load(const float* p, Full) {
  return MakeStrip([=](size_t k) STRIP_BODY { return hn::LoadU(Floats(), p + k * kLanes); });
}

HWY_INLINE Strip Load(const float* p, size_t count) {
  return MakeStrip([=](size_t k) STRIP_BODY {
    return hn::MaskedLoad(LanesOf(k, count), Floats(), p + k * kLanes);
  });
}

HWY_INLINE void Store(const Strip& strip, float* p, Full) {
  ForEachVector([&](size_t k) STRIP_BODY { hn::StoreU(strip.v[k], Floats(), p + k * kLanes); });
}

HWY_INLINE void Store(const Strip& strip, float* p, size_t count) {
  ForEachVector([&](size_t k) STRIP_BODY {
    hn::BlendedStore(strip.v[k], LanesOf(k, count), Floats(), p + k * kLanes);
  });
}

// Stores past the caches, to where vectors are aligned.
HWY_INLINE void Stream(const Strip& strip, float* p, Full) {
  ForEachVector([&](size_t k) STRIP_BODY { hn::Stream(strip.v[k], Floats(), p + k * kLanes); });
}

HWY_INLINE void Stream(const Strip& strip, float* p, size_t count) { Store(strip, p, count); }

// What no cache of a core's own holds is better not read from memory to be written.
inline constexpr size_t kStreamedElements = size_t{64} << 10;

// The elements from p to where a vector is aligned.
HWY_INLINE size_t ElementsBeforeAligned(const float* p) {
  return -(reinterpret_cast<uintptr_t>(p) / sizeof(float)) % kLanes;
}

// Streams to where vectors are not aligned: strips become vectors that are, in the first-level
// cache.
template <class StripAt>
HWY_INLINE void StreamUnaligned(float* span, size_t length, StripAt strip_at) {
  constexpr size_t kStagedElements = 1024;
  HWY_ALIGN float staged[kStagedElements];
  for (size_t begin = 0; begin < length; begin += kStagedElements) {
    const size_t end = std::min(kStagedElements, length - begin);
    ForEachStrip(end, [&](size_t i, auto count)
                          STRIP_BODY { Store(strip_at(begin + i, count), staged + i, count); });
    float* const to = span + begin;
    size_t i = std::min(ElementsBeforeAligned(to), end);
    std::copy_n(staged, i, to);
    for (; i + kLanes <= end; i += kLanes) {
      hn::Stream(hn::LoadU(Floats(), staged + i), Floats(), to + i);
    }
    std::copy(staged + i, staged + end, to + i);
  }
}

// Writes the strips that strip_at(i, count) gives of a span of `length` elements, which is a part
// of a span of `whole`. When all parts are written, FinishStrips(whole). A span in a payload may
// begin at any byte; then no vector of it is aligned.
template <class StripAt>
HWY_INLINE void WriteStrips(float* span, size_t length, size_t whole, StripAt strip_at) {
  const bool has_aligned_vectors = reinterpret_cast<uintptr_t>(span) % sizeof(float) == 0;
  if (whole < kStreamedElements || !has_aligned_vectors) {
    ForEachStrip(length, [&](size_t i, auto count)
                             STRIP_BODY { Store(strip_at(i, count), span + i, count); });
  } else if (ElementsBeforeAligned(span) == 0) {
    ForEachStrip(length, [&](size_t i, auto count)
                             STRIP_BODY { Stream(strip_at(i, count), span + i, count); });
  } else {
    StreamUnaligned(span, length, strip_at);
  }
}

HWY_INLINE void FinishStrips(size_t whole) {
  if (whole >= kStreamedElements) hwy::FlushStream();
}

HWY_INLINE Strip Zeros() {
  return MakeStrip([](size_t) STRIP_BODY { return hn::Zero(Floats()); });
}

HWY_INLINE Strip ZeroBeyond(const Strip& strip, Full) { return strip; }

HWY_INLINE Strip ZeroBeyond(const Strip& strip, size_t count) {
  return MakeStrip([&](size_t k)
                       STRIP_BODY { return hn::IfThenElseZero(LanesOf(k, count), strip.v[k]); });
}

HWY_INLINE Strip Add(const Strip& a, const Strip& b) {
  return Map([](Vector x, Vector y) STRIP_BODY { return hn::Add(x, y); }, a, b);
}

// From the first to the last.
template <class... More>
HWY_INLINE Strip Sum(Strip sum, const More&... more) {
  ((sum = Add(sum, more)), ...);
  return sum;
}

// The largest magnitude of what was added, or NaN if that was among it.
class LargestMagnitude {
 public:
  HWY_INLINE LargestMagnitude() : largest_(hn::Zero(Words())) {}

  HWY_INLINE void Add(const Strip& strip) {
    ForEachVector([&](size_t k) STRIP_BODY {
      largest_ = hn::Max(largest_, hn::BitCast(Words(), hn::Abs(strip.v[k])));
    });
  }

  HWY_INLINE float Get() const {
    return formulas::BitsToFloat(hn::GetLane(hn::MaxOfLanes(Words(), largest_)));
  }

 private:
  // As bits, which come in the order of the numbers, and NaN behind them.
  hn::Vec<Words> largest_;
};

// The sign bits of a strip, which begin at a whole byte; those beyond `count` are zero.
HWY_INLINE uint32_t LoadSigns(const uint8_t* bits, Full) {
  uint32_t signs;
  std::memcpy(&signs, bits, sizeof signs);
  return signs;
}

HWY_INLINE uint32_t LoadSigns(const uint8_t* bits, size_t count) {
  uint32_t signs = 0;
  std::memcpy(&signs, bits, SignBytes(count));
  return signs;
}

// A byte for each element of a strip.
using StripBytes = hn::Full256<int8_t>;

// The words' numbers; those that no byte holds become the nearest that one does.
#if HWY_TARGET == HWY_AVX2
HWY_INLINE hn::Vec<StripBytes> ByteOfEach(const WordStrip& words) {
  // Both halves of vectors are packed apart, so that words of four bytes must go back.
  const hn::Repartition<int16_t, Floats> halves;
  const auto low = hn::ReorderDemote2To(halves, words.v[0], words.v[1]);
  const auto high = hn::ReorderDemote2To(halves, words.v[2], words.v[3]);
  alignas(32) static constexpr int32_t kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const hn::Vec<StripBytes> packed{_mm256_packs_epi16(low.raw, high.raw)};  // not in Highway
  const auto ordered =
      hn::TableLookupLanes(hn::BitCast(Words(), packed), hn::SetTableIndices(Words(), kOrder));
  return hn::BitCast(StripBytes(), ordered);
}
#else
HWY_INLINE hn::Vec<StripBytes> ByteOfEach(const WordStrip& words) {
  const hn::Half<StripBytes> half;
  return hn::Combine(StripBytes(), hn::DemoteTo(half, words.v[1]), hn::DemoteTo(half, words.v[0]));
}
#endif

// Packs a strip's sign bits; the lanes beyond `count` must be zero.
#if HWY_TARGET == HWY_AVX2
HWY_INLINE void StoreSigns(const Strip& strip, uint8_t* bits, Full) {
  const auto bytes = ByteOfEach(
      MakeStrip<WordStrip>([&](size_t k) STRIP_BODY { return hn::BitCast(Words(), strip.v[k]); }));
  hn::StoreMaskBits(StripBytes(), hn::MaskFromVec(bytes), bits);
}
#else
HWY_INLINE void StoreSigns(const Strip& strip, uint8_t* bits, Full) {
  // A mask is made of the words' sign bits alone.
  ForEachVector([&](size_t k) STRIP_BODY {
    const auto negative = hn::MaskFromVec(hn::BitCast(Words(), strip.v[k]));
    hn::StoreMaskBits(Words(), negative, bits + k * (kLanes / 8));
  });
}
#endif

HWY_INLINE void StoreSigns(const Strip& strip, uint8_t* bits, size_t count) {
  uint8_t all[kStripElements / 8];
  StoreSigns(strip, all, Full());
  std::memcpy(bits, all, SignBytes(count));
}

// A value of either sign, to be picked by sign bits.
struct Magnitude {
  explicit HWY_INLINE Magnitude(float value)
      : positive(hn::Set(Floats(), value)), negative(hn::Set(Floats(), -value)) {}
  Vector positive, negative;
};

// The magnitude with the signs of v.
HWY_INLINE Vector SignedLike(Vector v, const Magnitude& magnitude) {
  return hn::IfNegativeThenElse(v, magnitude.negative, magnitude.positive);
}

// max(-most, min(m * d, most)), as formulas::Bounded.
class BoundedUpdate {
 public:
  explicit HWY_INLINE BoundedUpdate(float most)
      : most_(hn::Set(Floats(), most)), least_(hn::Set(Floats(), -most)) {}

  HWY_INLINE Vector operator()(Vector m, Vector d) const {
    return hn::Max(hn::Min(hn::Mul(m, d), most_), least_);
  }

 private:
  Vector most_, least_;
};

#if HWY_TARGET == HWY_AVX2
// Vector k of a strip: the magnitude with the strip's signs.
HWY_INLINE Vector Signed(const Magnitude& magnitude, uint32_t signs, size_t k) {
  // Moves each lane's bit to its sign position.
  const auto shift =
      hn::Sub(hn::Set(Words(), static_cast<int32_t>(31 - k * kLanes)), hn::Iota(Words(), 0));
  const auto selector = hn::Shl(hn::Set(Words(), static_cast<int32_t>(signs)), shift);
  return SignedLike(hn::BitCast(Floats(), selector), magnitude);
}
#else
// The lanes of vector k of a strip that have their bit set.
HWY_INLINE hn::Mask<Floats> SignMask(uint32_t signs, size_t k) {
  const uint16_t bits = static_cast<uint16_t>(signs >> (k * kLanes));
  return hn::LoadMaskBits(Floats(), reinterpret_cast<const uint8_t*>(&bits));
}

// Vector k of a strip: the magnitude with the strip's signs.
HWY_INLINE Vector Signed(const Magnitude& magnitude, uint32_t signs, size_t k) {
  return hn::IfThenElse(SignMask(signs, k), magnitude.negative, magnitude.positive);
}
#endif

HWY_INLINE Strip Signed(const Magnitude& magnitude, uint32_t signs) {
  return MakeStrip([&](size_t k) STRIP_BODY { return Signed(magnitude, signs, k); });
}

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_STRIP_INL_H_
