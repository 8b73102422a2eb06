// The sum over a group of ranks (block.h), a strip at a time and without going from rank to rank:
// as each rank can only add its scale or take it off, a block has 16 different sums, which are
// looked up by the four ranks' bits. Included once per Highway target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/onebit.h"
#include "kernels/strip-inl.h"

#if defined(SIGNPOST_KERNELS_RANK_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_KERNELS_RANK_SUM_INL_H_
#undef SIGNPOST_KERNELS_RANK_SUM_INL_H_
#else
#define SIGNPOST_KERNELS_RANK_SUM_INL_H_
#endif

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

// A group's ranks are walked in pieces of as many bits as a vector of AVX2 has.
inline constexpr size_t kPieceElements = 256;
inline constexpr size_t kPieceBytes = kPieceElements / 8;

// kPieceBytes of sign bits of each of a group's ranks; those that no element has are zero.
struct Piece {
  const uint8_t* bits[kRankGroup];
};

template <class Body>
HWY_INLINE void ForEachRank(Body body) {
  ForEachVector(body, std::make_index_sequence<kRankGroup>());
}

// The sign bits of a group of ranks from byte `begin` on.
class GroupBits {
 public:
  HWY_INLINE GroupBits(absl::Span<const OneBitView> ranks, size_t begin) {
    // An absent rank is in no sum, so its bits do not matter.
    for (size_t rank = 0; rank < kRankGroup; ++rank) {
      bits_[rank] = ranks[rank < ranks.size() ? rank : 0].bits + begin;
    }
  }

  // The piece of the elements from i on.
  HWY_INLINE Piece WholePiece(size_t i) const {
    Piece piece;
    ForEachRank([&](size_t rank) STRIP_BODY { piece.bits[rank] = bits_[rank] + i / 8; });
    return piece;
  }

  // The piece of the last `count` elements, in memory of the caller's.
  HWY_INLINE Piece ShortPiece(size_t i, size_t count,
                              uint8_t (&memory)[kRankGroup][kPieceBytes]) const {
    Piece piece;
    ForEachRank([&](size_t rank) STRIP_BODY {
      std::memcpy(memory[rank], bits_[rank] + i / 8, SignBytes(count));
      piece.bits[rank] = memory[rank];
    });
    return piece;
  }

  HWY_INLINE void Prefetch(size_t i) const {
    ForEachRank([&](size_t rank) STRIP_BODY { hwy::Prefetch(bits_[rank] + i / 8); });
  }

 private:
  const uint8_t* bits_[kRankGroup];
};

// The sums of a block of one to kRankGroup ranks.
class GroupSum {
 public:
  HWY_INLINE GroupSum(absl::Span<const OneBitView> ranks, size_t block) {
    // Bit c of kSigns[r] is bit r of c: element c of this strip is the sum that has the signs c.
    static constexpr uint32_t kSigns[kRankGroup] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
    Strip sums = Signed(Magnitude(ranks[0].scales[block]), kSigns[0]);
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      sums = Add(sums, Signed(Magnitude(ranks[rank].scales[block]), kSigns[rank]));
    }
    Keep(sums);
  }

  // Calls use(i, count, sums) for each strip of a block of `length` elements, whose bits are given;
  // meanwhile fetches as many bits of `next`. Strips that share the lanes of block.h come in their
  // order, others in any.
  template <class Use>
  HWY_INLINE void ForEachStrip(const GroupBits& bits, const GroupBits& next, size_t length,
                               Use use) const {
    size_t i = 0;
    for (; i + kPieceElements <= length; i += kPieceElements) {
      next.Prefetch(i);
      UsePiece(bits.WholePiece(i), [&](size_t s, const Strip& sums)
                                       STRIP_BODY { use(i + s * kStripElements, Full(), sums); });
    }
    if (i == length) return;
    uint8_t memory[kRankGroup][kPieceBytes] = {};
    UsePiece(bits.ShortPiece(i, length - i, memory), [&](size_t s, const Strip& sums) STRIP_BODY {
      const size_t begin = i + s * kStripElements;
      if (begin < length) use(begin, std::min(length - begin, kStripElements), sums);
    });
  }

 private:
#if HWY_TARGET == HWY_AVX2
  // Calls use(s, sums) for each strip s of a piece.
  template <class Use>
  HWY_INLINE void UsePiece(const Piece& piece, Use use) const {
    // The bytes of each rank hold eight elements. Of four such bytes, one per rank, two exchanges
    // of bits make four bytes that hold two elements: k in the lower half and k + 4 in the upper.
    auto signs0 = LoadBits(piece.bits[0]), signs1 = LoadBits(piece.bits[1]);
    auto signs2 = LoadBits(piece.bits[2]), signs3 = LoadBits(piece.bits[3]);
    ExchangeBits<1>(signs0, signs1);
    ExchangeBits<1>(signs2, signs3);
    ExchangeBits<2>(signs0, signs2);
    ExchangeBits<2>(signs1, signs3);
    // Now signs0, ..., signs3 have k = 0, ..., 3: next to each other, they are 32-bit words that
    // hold eight consecutive elements.
    const Bytes bytes;
    const Halves halves;
    const auto low01 = hn::BitCast(halves, hn::InterleaveLower(bytes, signs0, signs1));
    const auto low23 = hn::BitCast(halves, hn::InterleaveLower(bytes, signs2, signs3));
    const auto high01 = hn::BitCast(halves, hn::InterleaveUpper(bytes, signs0, signs1));
    const auto high23 = hn::BitCast(halves, hn::InterleaveUpper(bytes, signs2, signs3));
    UseStripPair<0>(hn::InterleaveLower(halves, low01, low23), use);
    UseStripPair<1>(hn::InterleaveUpper(halves, low01, low23), use);
    UseStripPair<2>(hn::InterleaveLower(halves, high01, high23), use);
    UseStripPair<3>(hn::InterleaveUpper(halves, high01, high23), use);
  }

  using Bytes = hn::Repartition<uint8_t, Floats>;
  using Halves = hn::Repartition<uint16_t, Floats>;
  using ByteVector = hn::Vec<Bytes>;

  // AVX2 looks up bytes: the first bytes of all sums make one table of 16, and so on.
  HWY_INLINE void Keep(const Strip& sums) {
    HWY_ALIGN float all[kStripElements];
    Store(sums, all, Full());
    const hn::Full128<uint8_t> table;
    hn::Vec<hn::Full128<uint8_t>> byte0, byte1, byte2, byte3;
    hn::LoadInterleaved4(table, reinterpret_cast<const uint8_t*>(all), byte0, byte1, byte2, byte3);
    hn::Store(byte0, table, tables_[0]);
    hn::Store(byte1, table, tables_[1]);
    hn::Store(byte2, table, tables_[2]);
    hn::Store(byte3, table, tables_[3]);
  }

  static HWY_INLINE ByteVector LoadBits(const uint8_t* bits) { return hn::LoadU(Bytes(), bits); }

  // Where a field of kBits bits stands at an odd place of a byte of `a`, it changes places with the
  // one before it in `b`.
  template <int kBits>
  static HWY_INLINE void ExchangeBits(ByteVector& a, ByteVector& b) {
    const auto even_places = hn::Set(Halves(), kBits == 1 ? 0x5555 : 0x3333);
    const auto wide_a = hn::BitCast(Halves(), a);
    const auto wide_b = hn::BitCast(Halves(), b);
    const auto differing = hn::And(hn::Xor(hn::ShiftRight<kBits>(wide_a), wide_b), even_places);
    a = hn::BitCast(Bytes(), hn::Xor(wide_a, hn::ShiftLeft<kBits>(differing)));
    b = hn::BitCast(Bytes(), hn::Xor(wide_b, differing));
  }

  // Uses the sums of strips `kStrip` and `kStrip + 4` of a piece, the lower and the upper half of
  // `signs`: eight elements in each word, those of the first four in the lower halves of its bytes.
  template <size_t kStrip, class Use>
  HWY_INLINE void UseStripPair(hn::Vec<Halves> signs, Use use) const {
    const auto half = hn::Set(Bytes(), 0xf);
    const auto first = hn::And(hn::BitCast(Bytes(), signs), half);
    const auto second = hn::And(hn::BitCast(Bytes(), hn::ShiftRight<4>(signs)), half);
    use(kStrip, LookUp(hn::ConcatLowerLower(Bytes(), second, first)));
    use(kStrip + 4, LookUp(hn::ConcatUpperUpper(Bytes(), second, first)));
  }

  // The sums whose signs stand in bytes: byte q of the lower half is for element
  // 8 * (q / 4) + q % 4, of the upper half for the element 4 behind it, the order that Interleave
  // undoes.
  HWY_INLINE Strip LookUp(ByteVector signs) const {
    const auto byte = [&](size_t b) STRIP_BODY {
      return hn::TableLookupBytes(hn::LoadDup128(Bytes(), tables_[b]), signs);
    };
    return Interleave(byte(0), byte(1), byte(2), byte(3));
  }

  // Floats from their four bytes, in the order that interleaving within 128 bits gives.
  static HWY_INLINE Strip Interleave(ByteVector byte0, ByteVector byte1, ByteVector byte2,
                                     ByteVector byte3) {
    const Bytes bytes;
    const Halves halves;
    const auto low01 = hn::BitCast(halves, hn::InterleaveLower(bytes, byte0, byte1));
    const auto low23 = hn::BitCast(halves, hn::InterleaveLower(bytes, byte2, byte3));
    const auto high01 = hn::BitCast(halves, hn::InterleaveUpper(bytes, byte0, byte1));
    const auto high23 = hn::BitCast(halves, hn::InterleaveUpper(bytes, byte2, byte3));
    return {{hn::BitCast(Floats(), hn::InterleaveLower(halves, low01, low23)),
             hn::BitCast(Floats(), hn::InterleaveUpper(halves, low01, low23)),
             hn::BitCast(Floats(), hn::InterleaveLower(halves, high01, high23)),
             hn::BitCast(Floats(), hn::InterleaveUpper(halves, high01, high23))}};
  }

  alignas(16) uint8_t tables_[4][16];
#else
  static_assert(kLanes == 16, "AVX-512 looks up all 16 sums at once");

  template <class Use>
  HWY_INLINE void UsePiece(const Piece& piece, Use use) const {
    for (size_t s = 0; s < kPieceElements / kStripElements; ++s) {
      const auto signs = [&](size_t rank) STRIP_BODY {
        return LoadSigns(piece.bits[rank] + s * (kStripElements / 8), Full());
      };
      use(s, LookUp(signs(0), signs(1), signs(2), signs(3)));
    }
  }

  HWY_INLINE void Keep(const Strip& sums) { sums_ = sums.v[0]; }

  HWY_INLINE Strip LookUp(uint32_t signs0, uint32_t signs1, uint32_t signs2,
                          uint32_t signs3) const {
    return MakeStrip([&](size_t k) STRIP_BODY {
      const auto index = hn::Or(hn::Or(Index<0>(signs0, k), Index<1>(signs1, k)),
                                hn::Or(Index<2>(signs2, k), Index<3>(signs3, k)));
      return hn::TableLookupLanes(sums_, hn::IndicesFromVec(Floats(), index));
    });
  }

  // 2^r in the lanes of vector k that have their bit set.
  template <int kRank>
  static HWY_INLINE hn::Vec<Words> Index(uint32_t signs, size_t k) {
    return hn::IfThenElseZero(hn::RebindMask(Words(), SignMask(signs, k)),
                              hn::Set(Words(), 1 << kRank));
  }

  Vector sums_;
#endif
};

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_RANK_SUM_INL_H_
