// The sums over groups of ranks (block.h), a strip at a time and without going from rank to rank:
// as each rank can only add its scale or take it off, a group has 16 different sums in a block,
// which are looked up by the four ranks' bits. Included once per Highway target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
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

using Bytes = hn::Repartition<uint8_t, Floats>;
using Halves = hn::Repartition<uint16_t, Floats>;

// A group's ranks are walked in pieces of as many bits as a vector has.
inline constexpr size_t kPieceBytes = hn::MaxLanes(Bytes());
inline constexpr size_t kPieceElements = 8 * kPieceBytes;

// kPieceBytes of sign bits of each of a group's ranks; those that no element has are zero.
struct Piece {
  const uint8_t* bits[kRankGroup];
};

template <class Body>
HWY_INLINE void ForEachRank(Body body) {
  ForEachVector(body, std::make_index_sequence<kRankGroup>());
}

// Groups whose sums are looked up in one pass over a block: their sum goes through memory once.
inline constexpr size_t kGroupsPerPass = 2;
inline constexpr size_t kRanksPerPass = kGroupsPerPass * kRankGroup;

// The sign bits of a pass's ranks from byte `begin` on.
class RankBits {
 public:
  HWY_INLINE RankBits(absl::Span<const OneBitView> ranks, size_t begin) {
    // An absent rank is in no sum, so its bits do not matter.
    for (size_t rank = 0; rank < kRanksPerPass; ++rank) {
      bits_[rank] = ranks[rank < ranks.size() ? rank : 0].bits + begin;
    }
  }

  // A group's piece of the elements from i on.
  HWY_INLINE Piece WholePiece(size_t group, size_t i) const {
    Piece piece;
    ForEachRank([&](size_t r) STRIP_BODY { piece.bits[r] = BitsOf(group, r) + i / 8; });
    return piece;
  }

  // The piece of the last `count` elements, in memory of the caller's.
  HWY_INLINE Piece ShortPiece(size_t group, size_t i, size_t count,
                              uint8_t (&memory)[kRankGroup][kPieceBytes]) const {
    Piece piece;
    ForEachRank([&](size_t r) STRIP_BODY {
      std::memcpy(memory[r], BitsOf(group, r) + i / 8, SignBytes(count));
      piece.bits[r] = memory[r];
    });
    return piece;
  }

  HWY_INLINE void Prefetch(size_t i) const {
    for (const uint8_t* bits : bits_) PrefetchFar(bits + i / 8);
  }

 private:
  HWY_INLINE const uint8_t* BitsOf(size_t group, size_t rank) const {
    return bits_[group * kRankGroup + rank];
  }

  const uint8_t* bits_[kRanksPerPass];
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

  // A piece's sign bits, the four of each element next to each other.
  struct Signs;
  static HWY_INLINE void MakeSigns(const Piece& piece, Signs& signs);

  // The sums of strip s of the piece.
  HWY_INLINE Strip At(const Signs& signs, size_t s) const;

 private:
  using HalfVector = hn::Vec<Halves>;

  // Where a field of kBits bits stands at an odd place of a half word of `a`, it changes places
  // with the one before it in `b`.
  template <int kBits>
  static HWY_INLINE void ExchangeBits(HalfVector& a, HalfVector& b) {
    const auto even_places = hn::Set(Halves(), kBits == 1 ? 0x5555 : 0x3333);
    const auto differing = hn::And(hn::Xor(hn::ShiftRight<kBits>(a), b), even_places);
    a = hn::Xor(a, hn::ShiftLeft<kBits>(differing));
    b = hn::Xor(b, differing);
  }

  // Vector k has the four bits of element k of each four elements.
  struct Nibbles {
    HalfVector v[4];
  };

  static HWY_INLINE Nibbles NibblesOf(const Piece& piece) {
    const auto load = [&](size_t rank) STRIP_BODY {
      return hn::BitCast(Halves(), hn::LoadU(Bytes(), piece.bits[rank]));
    };
    Nibbles nibbles = {{load(0), load(1), load(2), load(3)}};
    ExchangeBits<1>(nibbles.v[0], nibbles.v[1]);
    ExchangeBits<1>(nibbles.v[2], nibbles.v[3]);
    ExchangeBits<2>(nibbles.v[0], nibbles.v[2]);
    ExchangeBits<2>(nibbles.v[1], nibbles.v[3]);
    return nibbles;
  }

  HWY_INLINE void Keep(const Strip& sums);

#if HWY_TARGET == HWY_AVX2
  using ByteVector = hn::Vec<Bytes>;

  static HWY_INLINE void StorePair(HalfVector words, size_t s, Signs& signs);
  static HWY_INLINE Strip Interleave(ByteVector byte0, ByteVector byte1, ByteVector byte2,
                                     ByteVector byte3);

  // The first bytes of all sums, and so on: AVX2 looks up bytes.
  alignas(16) uint8_t tables_[4][16];
#else
  using Words = hn::Repartition<uint32_t, Floats>;
  using Quads = hn::Repartition<uint64_t, Floats>;

  HWY_INLINE Vector LookUp(uint64_t nibbles) const;

  Vector sums_;
#endif
};

#if HWY_TARGET == HWY_AVX2
// A byte for each element. Byte q of the lower half of a strip's is for its element
// 8 * (q / 4) + q % 4, of the upper half for the element 4 behind it, the order that Interleave
// undoes.
struct GroupSum::Signs {
  alignas(32) uint8_t of_strip[kPieceElements / kStripElements][kStripElements];
};

HWY_INLINE void GroupSum::MakeSigns(const Piece& piece, Signs& signs) {
  // Next to each other, a byte of each vector of nibbles makes a word of eight consecutive
  // elements: byte k has element k in its lower half and k + 4 in the upper.
  const Nibbles nibbles = NibblesOf(piece);
  const auto bytes = [&](size_t k) STRIP_BODY { return hn::BitCast(Bytes(), nibbles.v[k]); };
  const auto low01 = hn::BitCast(Halves(), hn::InterleaveLower(Bytes(), bytes(0), bytes(1)));
  const auto low23 = hn::BitCast(Halves(), hn::InterleaveLower(Bytes(), bytes(2), bytes(3)));
  const auto high01 = hn::BitCast(Halves(), hn::InterleaveUpper(Bytes(), bytes(0), bytes(1)));
  const auto high23 = hn::BitCast(Halves(), hn::InterleaveUpper(Bytes(), bytes(2), bytes(3)));
  StorePair(hn::InterleaveLower(Halves(), low01, low23), 0, signs);
  StorePair(hn::InterleaveUpper(Halves(), low01, low23), 1, signs);
  StorePair(hn::InterleaveLower(Halves(), high01, high23), 2, signs);
  StorePair(hn::InterleaveUpper(Halves(), high01, high23), 3, signs);
}

// Of strips s and s + 4, the lower and the upper half of `words`.
HWY_INLINE void GroupSum::StorePair(HalfVector words, size_t s, Signs& signs) {
  const auto half = hn::Set(Bytes(), 0xf);
  const auto first = hn::And(hn::BitCast(Bytes(), words), half);
  const auto second = hn::And(hn::BitCast(Bytes(), hn::ShiftRight<4>(words)), half);
  hn::Store(hn::ConcatLowerLower(Bytes(), second, first), Bytes(), signs.of_strip[s]);
  hn::Store(hn::ConcatUpperUpper(Bytes(), second, first), Bytes(), signs.of_strip[s + 4]);
}

HWY_INLINE void GroupSum::Keep(const Strip& sums) {
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

HWY_INLINE Strip GroupSum::At(const Signs& signs, size_t s) const {
  const auto of_strip = hn::Load(Bytes(), signs.of_strip[s]);
  const auto byte = [&](size_t b) STRIP_BODY {
    return hn::TableLookupBytes(hn::LoadDup128(Bytes(), tables_[b]), of_strip);
  };
  return Interleave(byte(0), byte(1), byte(2), byte(3));
}

// Floats from their four bytes, in the order that interleaving within 128 bits gives.
HWY_INLINE Strip GroupSum::Interleave(ByteVector byte0, ByteVector byte1, ByteVector byte2,
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
#else
// Four bits for each element of a vector of floats, the even elements in the lower half of its
// word. As interleaving works within 128 bits, strip s is in vector s % 4, words 2 * (s / 4) and
// the next.
struct GroupSum::Signs {
  alignas(64) uint64_t of_vector[4][kPieceBytes / sizeof(uint64_t)];
};

HWY_INLINE void GroupSum::MakeSigns(const Piece& piece, Signs& signs) {
  const Nibbles nibbles = NibblesOf(piece);
  const auto& v = nibbles.v;
  const auto low02 = hn::BitCast(Words(), hn::InterleaveLower(Halves(), v[0], v[2]));
  const auto low13 = hn::BitCast(Words(), hn::InterleaveLower(Halves(), v[1], v[3]));
  const auto high02 = hn::BitCast(Words(), hn::InterleaveUpper(Halves(), v[0], v[2]));
  const auto high13 = hn::BitCast(Words(), hn::InterleaveUpper(Halves(), v[1], v[3]));
  const auto store = [&](hn::Vec<Words> words, size_t k) STRIP_BODY {
    hn::Store(hn::BitCast(Quads(), words), Quads(), signs.of_vector[k]);
  };
  store(hn::InterleaveLower(Words(), low02, low13), 0);
  store(hn::InterleaveUpper(Words(), low02, low13), 1);
  store(hn::InterleaveLower(Words(), high02, high13), 2);
  store(hn::InterleaveUpper(Words(), high02, high13), 3);
}

HWY_INLINE void GroupSum::Keep(const Strip& sums) {
  static_assert(kLanes == 16, "AVX-512 looks up all 16 sums at once");
  sums_ = sums.v[0];
}

HWY_INLINE Strip GroupSum::At(const Signs& signs, size_t s) const {
  const uint64_t* const nibbles = &signs.of_vector[s % 4][s / 4 * 2];
  return {{LookUp(nibbles[0]), LookUp(nibbles[1])}};
}

HWY_INLINE Vector GroupSum::LookUp(uint64_t nibbles) const {
  HWY_ALIGN static constexpr uint32_t kShifts[kLanes] = {0, 0, 16, 16, 4,  4,  20, 20,
                                                         8, 8, 24, 24, 12, 12, 28, 28};
  const auto halves = hn::BitCast(Words(), hn::Set(Quads(), nibbles));
  const auto indices = hn::Shr(halves, hn::Load(Words(), kShifts));
  // Only the lowest four bits of an index count, which Highway does not promise.
  return Vector{_mm512_permutexvar_ps(indices.raw, sums_.raw)};
}
#endif

// Calls use(i, count, sum...) for each strip of a block of `length` elements, with the sums of its
// groups, whose ranks' bits are given; meanwhile fetches as many bits of `next`.
template <class Use, size_t... group>
HWY_INLINE void ForEachStripOfGroups(std::index_sequence<group...>,
                                     const GroupSum (&sums)[sizeof...(group)], const RankBits& bits,
                                     const RankBits& next, size_t length, Use use) {
  // Where strips come at once, they need no arithmetic of addresses, but more code.
  constexpr size_t kStripsAtOnce = HWY_TARGET == HWY_AVX2 ? 8 : 1;
  GroupSum::Signs signs[sizeof...(group)];
  size_t i = 0;
  for (; i + kPieceElements <= length; i += kPieceElements) {
    (GroupSum::MakeSigns(bits.WholePiece(group, i), signs[group]), ...);
    next.Prefetch(i);
#pragma GCC unroll kStripsAtOnce
    for (size_t s = 0; s < kPieceElements / kStripElements; ++s) {
      use(i + s * kStripElements, Full(), sums[group].At(signs[group], s)...);
    }
  }
  if (i == length) return;
  uint8_t memory[kRankGroup][kPieceBytes] = {};
  (GroupSum::MakeSigns(bits.ShortPiece(group, i, length - i, memory), signs[group]), ...);
  for (size_t s = 0; i < length; ++s, i += kStripElements) {
    use(i, std::min(length - i, kStripElements), sums[group].At(signs[group], s)...);
  }
}

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_RANK_SUM_INL_H_
