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
using WordIndices = hn::Repartition<uint32_t, Floats>;
using Quads = hn::Repartition<uint64_t, Floats>;

// Groups whose sums are looked up in one pass over a block: their sum goes through memory once.
inline constexpr size_t kGroupsPerPass = 2;
inline constexpr size_t kRanksPerPass = kGroupsPerPass * kRankGroup;

// A pass's ranks are walked in pieces of as many bits as a vector has.
inline constexpr size_t kPieceBytes = hn::MaxLanes(Bytes());
inline constexpr size_t kPieceElements = 8 * kPieceBytes;
inline constexpr size_t kPieceStrips = kPieceElements / kStripElements;

// kPieceBytes of sign bits of each of a pass's ranks; those that no element has are zero.
struct Piece {
  const uint8_t* bits[kRanksPerPass];
};

template <class Body>
HWY_INLINE void ForEachRank(Body body) {
  ForEachVector(body, std::make_index_sequence<kRanksPerPass>());
}

// The sign bits of a pass's ranks from byte `begin` on.
class RankBits {
 public:
  HWY_INLINE RankBits(absl::Span<const OneBitView> ranks, size_t begin) {
    // An absent rank is in no sum, so its bits do not matter.
    for (size_t rank = 0; rank < kRanksPerPass; ++rank) {
      bits_[rank] = ranks[rank < ranks.size() ? rank : 0].bits + begin;
    }
  }

  // The piece of the elements from i on.
  HWY_INLINE Piece WholePiece(size_t i) const {
    Piece piece;
    ForEachRank([&](size_t r) STRIP_BODY { piece.bits[r] = bits_[r] + i / 8; });
    return piece;
  }

  // The piece of the last `count` elements, in memory of the caller's.
  HWY_INLINE Piece ShortPiece(size_t i, size_t count,
                              uint8_t (&memory)[kRanksPerPass][kPieceBytes]) const {
    Piece piece;
    ForEachRank([&](size_t r) STRIP_BODY {
      std::memcpy(memory[r], bits_[r] + i / 8, SignBytes(count));
      piece.bits[r] = memory[r];
    });
    return piece;
  }

  HWY_INLINE void Prefetch(size_t i) const {
    ForEachRank([&](size_t r) STRIP_BODY { PrefetchFar(bits_[r] + i / 8); });
  }

 private:
  const uint8_t* bits_[kRanksPerPass];
};

// The sums of a block of one to kRankGroup ranks.
class GroupSum {
 public:
#if HWY_TARGET == HWY_AVX2
  // A byte for each element of a strip, in whose lower half are its ranks' bits. Byte q of the
  // lower half of the vector is for element 8 * (q / 4) + q % 4, of the upper half for the element
  // 4 behind it: the order that Interleave undoes.
  using Signs = hn::Vec<Bytes>;
#else
  // A word for each element, in whose lowest four bits are its ranks'.
  struct Signs {
    hn::Vec<WordIndices> v[kStripVectors];
  };
#endif

  HWY_INLINE GroupSum(absl::Span<const OneBitView> ranks, size_t block) {
    // Bit c of kSigns[r] is bit r of c: element c of this strip is the sum that has the signs c.
    static constexpr uint32_t kSigns[kRankGroup] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
    Strip sums = Signed(Magnitude(ranks[0].scales[block]), kSigns[0]);
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      sums = Add(sums, Signed(Magnitude(ranks[rank].scales[block]), kSigns[rank]));
    }
    Keep(sums);
  }

  // The sums of a strip's elements.
  HWY_INLINE Strip At(const Signs& signs) const;

 private:
  HWY_INLINE void Keep(const Strip& sums);

#if HWY_TARGET == HWY_AVX2
  static HWY_INLINE Strip Interleave(Signs byte0, Signs byte1, Signs byte2, Signs byte3);

  // The first bytes of all sums, and so on: AVX2 looks up bytes.
  alignas(16) uint8_t tables_[4][16];
#else
  Vector sums_;
#endif
};

// How a pass's sign bits become what its GroupSums look up: ForEachStrip calls body(s, signs...) for
// each strip s of a piece with the signs of each group. Strips that add to the same lanes of a sum
// of squares (block.h) come in their order. This way is for any processor: a group's four ranks
// exchange bits.
template <size_t kGroups>
class ExchangedSigns {
 public:
  template <class Body>
  static HWY_INLINE void ForEachStrip(const Piece& piece, Body body) {
    ForEachStripOf(std::make_index_sequence<kGroups>(), piece, body);
  }

 private:
  using HalfVector = hn::Vec<Halves>;

  // Vector k has the four bits of element k of each four elements.
  struct Nibbles {
    HalfVector v[4];
  };

  template <size_t... group, class Body>
  static HWY_INLINE void ForEachStripOf(std::index_sequence<group...>, const Piece& piece,
                                        Body body) {
    // Where strips come at once, they need no arithmetic of addresses, but more code.
    constexpr size_t kStripsAtOnce = HWY_TARGET == HWY_AVX2 ? 8 : 4;
    Group groups[kGroups];
    (MakeGroup(NibblesOf(&piece.bits[group * kRankGroup]), groups[group]), ...);
    for (size_t first = 0; first < kPieceStrips; first += kStripsAtOnce) {
#pragma GCC unroll kStripsAtOnce
      for (size_t s = first; s < first + kStripsAtOnce; ++s) body(s, SignsOf(groups[group], s)...);
    }
  }

  static HWY_INLINE Nibbles NibblesOf(const uint8_t* const* bits) {
    const auto load = [&](size_t rank) STRIP_BODY {
      return hn::BitCast(Halves(), hn::LoadU(Bytes(), bits[rank]));
    };
    Nibbles nibbles = {{load(0), load(1), load(2), load(3)}};
    ExchangeBits<1>(nibbles.v[0], nibbles.v[1]);
    ExchangeBits<1>(nibbles.v[2], nibbles.v[3]);
    ExchangeBits<2>(nibbles.v[0], nibbles.v[2]);
    ExchangeBits<2>(nibbles.v[1], nibbles.v[3]);
    return nibbles;
  }

  // Where a field of kBits bits stands at an odd place of a half word of `a`, it changes places
  // with the one before it in `b`.
  template <int kBits>
  static HWY_INLINE void ExchangeBits(HalfVector& a, HalfVector& b) {
    const auto even_places = hn::Set(Halves(), kBits == 1 ? 0x5555 : 0x3333);
    const auto differing = hn::And(hn::Xor(hn::ShiftRight<kBits>(a), b), even_places);
    a = hn::Xor(a, hn::ShiftLeft<kBits>(differing));
    b = hn::Xor(b, differing);
  }

#if HWY_TARGET == HWY_AVX2
  struct Group {
    alignas(32) uint8_t of_strip[kPieceStrips][kStripElements];
  };

  static HWY_INLINE void StorePair(HalfVector words, size_t s, Group& group);
#else
  // Four bits for each element of a vector of floats, the even elements in the lower half of its
  // word. As interleaving works within 128 bits, strip s is in vector s % 4, words 2 * (s / 4) and
  // the next.
  struct Group {
    alignas(64) uint64_t of_vector[4][kPieceBytes / sizeof(uint64_t)];
  };

  static HWY_INLINE hn::Vec<WordIndices> IndicesOf(uint64_t nibbles);
#endif

  static HWY_INLINE void MakeGroup(const Nibbles& nibbles, Group& group);
  static HWY_INLINE GroupSum::Signs SignsOf(const Group& group, size_t s);
};

#if HWY_TARGET == HWY_AVX2
template <size_t kGroups>
HWY_INLINE void ExchangedSigns<kGroups>::MakeGroup(const Nibbles& nibbles, Group& group) {
  // Next to each other, a byte of each vector of nibbles makes a word of eight consecutive
  // elements: byte k has element k in its lower half and k + 4 in the upper.
  const auto bytes = [&](size_t k) STRIP_BODY { return hn::BitCast(Bytes(), nibbles.v[k]); };
  const auto low01 = hn::BitCast(Halves(), hn::InterleaveLower(Bytes(), bytes(0), bytes(1)));
  const auto low23 = hn::BitCast(Halves(), hn::InterleaveLower(Bytes(), bytes(2), bytes(3)));
  const auto high01 = hn::BitCast(Halves(), hn::InterleaveUpper(Bytes(), bytes(0), bytes(1)));
  const auto high23 = hn::BitCast(Halves(), hn::InterleaveUpper(Bytes(), bytes(2), bytes(3)));
  StorePair(hn::InterleaveLower(Halves(), low01, low23), 0, group);
  StorePair(hn::InterleaveUpper(Halves(), low01, low23), 1, group);
  StorePair(hn::InterleaveLower(Halves(), high01, high23), 2, group);
  StorePair(hn::InterleaveUpper(Halves(), high01, high23), 3, group);
}

// Of strips s and s + 4, the lower and the upper half of `words`.
template <size_t kGroups>
HWY_INLINE void ExchangedSigns<kGroups>::StorePair(HalfVector words, size_t s, Group& group) {
  const auto half = hn::Set(Bytes(), 0xf);
  const auto first = hn::And(hn::BitCast(Bytes(), words), half);
  const auto second = hn::And(hn::BitCast(Bytes(), hn::ShiftRight<4>(words)), half);
  hn::Store(hn::ConcatLowerLower(Bytes(), second, first), Bytes(), group.of_strip[s]);
  hn::Store(hn::ConcatUpperUpper(Bytes(), second, first), Bytes(), group.of_strip[s + 4]);
}

template <size_t kGroups>
HWY_INLINE GroupSum::Signs ExchangedSigns<kGroups>::SignsOf(const Group& group, size_t s) {
  return hn::Load(Bytes(), group.of_strip[s]);
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

HWY_INLINE Strip GroupSum::At(const Signs& signs) const {
  const auto byte = [&](size_t b) STRIP_BODY {
    return hn::TableLookupBytes(hn::LoadDup128(Bytes(), tables_[b]), signs);
  };
  return Interleave(byte(0), byte(1), byte(2), byte(3));
}

// Floats from their four bytes, in the order that interleaving within 128 bits gives.
HWY_INLINE Strip GroupSum::Interleave(Signs byte0, Signs byte1, Signs byte2, Signs byte3) {
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
template <size_t kGroups>
HWY_INLINE void ExchangedSigns<kGroups>::MakeGroup(const Nibbles& nibbles, Group& group) {
  const auto& v = nibbles.v;
  const auto low02 = hn::BitCast(WordIndices(), hn::InterleaveLower(Halves(), v[0], v[2]));
  const auto low13 = hn::BitCast(WordIndices(), hn::InterleaveLower(Halves(), v[1], v[3]));
  const auto high02 = hn::BitCast(WordIndices(), hn::InterleaveUpper(Halves(), v[0], v[2]));
  const auto high13 = hn::BitCast(WordIndices(), hn::InterleaveUpper(Halves(), v[1], v[3]));
  const auto store = [&](hn::Vec<WordIndices> words, size_t k) STRIP_BODY {
    hn::Store(hn::BitCast(Quads(), words), Quads(), group.of_vector[k]);
  };
  store(hn::InterleaveLower(WordIndices(), low02, low13), 0);
  store(hn::InterleaveUpper(WordIndices(), low02, low13), 1);
  store(hn::InterleaveLower(WordIndices(), high02, high13), 2);
  store(hn::InterleaveUpper(WordIndices(), high02, high13), 3);
}

template <size_t kGroups>
HWY_INLINE GroupSum::Signs ExchangedSigns<kGroups>::SignsOf(const Group& group, size_t s) {
  const uint64_t* const nibbles = &group.of_vector[s % 4][s / 4 * 2];
  return {{IndicesOf(nibbles[0]), IndicesOf(nibbles[1])}};
}

template <size_t kGroups>
HWY_INLINE hn::Vec<WordIndices> ExchangedSigns<kGroups>::IndicesOf(uint64_t nibbles) {
  HWY_ALIGN static constexpr uint32_t kShifts[kLanes] = {0, 0, 16, 16, 4,  4,  20, 20,
                                                         8, 8, 24, 24, 12, 12, 28, 28};
  const auto halves = hn::BitCast(WordIndices(), hn::Set(Quads(), nibbles));
  return hn::Shr(halves, hn::Load(WordIndices(), kShifts));
}

// The same for processors with GFNI, which transposes the bits of eight bytes at once: each element
// has a byte, with the bits of a pass's ranks, whatever those of absent ones are. Highway 1.0 has
// neither of the instructions that are spelt out here.
template <size_t kGroups>
class TransposedSigns {
 public:
  template <class Body>
  static HWY_INLINE void ForEachStrip(const Piece& piece, Body body) {
    const auto rank = [&](size_t r) STRIP_BODY { return hn::LoadU(Bytes(), piece.bits[r]); };
    const auto lower = [&](size_t r) STRIP_BODY {
      return hn::BitCast(Halves(), hn::InterleaveLower(Bytes(), rank(r), rank(r - 1)));
    };
    const auto upper = [&](size_t r) STRIP_BODY {
      return hn::BitCast(Halves(), hn::InterleaveUpper(Bytes(), rank(r), rank(r - 1)));
    };
    ForEachStripOfHalf<0>(lower(7), lower(5), lower(3), lower(1), body);
    ForEachStripOfHalf<2>(upper(7), upper(5), upper(3), upper(1), body);
  }

 private:
  using Words = hn::Vec<WordIndices>;

  // A vector has four runs of 16 elements. Byte k of word w is for element w of run k.
  static constexpr size_t kRuns = 4;

  // The bytes of ranks 7 to 0, of each two ranks next to each other, in four vectors. As
  // interleaving works within 128 bits, run k of each is in strips from 4 * k on.
  template <size_t first, class Body>
  static HWY_INLINE void ForEachStripOfHalf(hn::Vec<Halves> r76, hn::Vec<Halves> r54,
                                            hn::Vec<Halves> r32, hn::Vec<Halves> r10, Body body) {
    const WordIndices words;
    const auto runs = std::make_index_sequence<kRuns>();
    const auto low7654 = hn::BitCast(words, hn::InterleaveLower(Halves(), r76, r54));
    const auto low3210 = hn::BitCast(words, hn::InterleaveLower(Halves(), r32, r10));
    ForEachRun<first>(runs, Transpose(hn::InterleaveLower(words, low7654, low3210)),
                      Transpose(hn::InterleaveUpper(words, low7654, low3210)), body);
    const auto high7654 = hn::BitCast(words, hn::InterleaveUpper(Halves(), r76, r54));
    const auto high3210 = hn::BitCast(words, hn::InterleaveUpper(Halves(), r32, r10));
    ForEachRun<first + 1>(runs, Transpose(hn::InterleaveLower(words, high7654, high3210)),
                          Transpose(hn::InterleaveUpper(words, high7654, high3210)), body);
  }

  // Of each eight bytes: byte e gets bit e of the last byte as its lowest bit, of the first as its
  // highest. Then bytes change places as kRuns says.
  static HWY_INLINE Words Transpose(Words ranks) {
    // The instruction multiplies the matrix that eight bytes are with the bytes of its other
    // operand: with unit vectors that is the matrix's columns.
    const auto unit_vectors = hn::Set(Quads(), 0x8040201008040201);
    Words columns;
    asm("vgf2p8affineqb $0, %2, %1, %0"
        : "=v"(columns.raw)
        : "v"(unit_vectors.raw), "v"(ranks.raw));
    alignas(64) static constexpr uint8_t kOrder[64] = {
        0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
        37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
        11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
    Words ordered;
    asm("vpermb %2, %1, %0"
        : "=v"(ordered.raw)
        : "v"(hn::Load(Bytes(), kOrder).raw), "v"(columns.raw));
    return ordered;
  }

  template <size_t first, size_t... run, class Body>
  static HWY_INLINE void ForEachRun(std::index_sequence<run...>, Words even, Words odd, Body body) {
    const Runs of_even(even), of_odd(odd);
    (ForEachGroup<run>(std::make_index_sequence<kGroups>(), first + 4 * run, of_even, of_odd, body),
     ...);
  }

  class Runs {
   public:
    explicit HWY_INLINE Runs(Words words) : lower_(words), upper_(hn::ShiftRight<16>(words)) {}

    // In the lowest four bits of words, the bits of a group's ranks.
    template <size_t run, size_t group>
    HWY_INLINE Words SignsOf() const {
      constexpr size_t kShift = 8 * run + kRankGroup * group;
      const Words half = kShift < 16 ? lower_ : upper_;
      if constexpr (kShift % 16 == 0) return half;
      // A shift to the right, but not with what adds floats on Zen 4.
      const auto factor = hn::Set(WordIndices(), 1u << (16 - kShift % 16));
      return hn::BitCast(WordIndices(), hn::MulHigh(hn::BitCast(Halves(), half),
                                                    hn::BitCast(Halves(), factor)));
    }

   private:
    Words lower_, upper_;  // upper: runs 2 and 3
  };

  template <size_t run, size_t... group, class Body>
  static HWY_INLINE void ForEachGroup(std::index_sequence<group...>, size_t s, const Runs& even,
                                      const Runs& odd, Body body) {
    body(s, GroupSum::Signs{{even.template SignsOf<run, group>(),
                             odd.template SignsOf<run, group>()}}...);
  }
};

HWY_INLINE void GroupSum::Keep(const Strip& sums) {
  static_assert(kLanes == 16, "AVX-512 looks up all 16 sums at once");
  sums_ = sums.v[0];
}

HWY_INLINE Strip GroupSum::At(const Signs& signs) const {
  // Only the lowest four bits of an index count, which Highway does not promise.
  return MakeStrip([&](size_t k) STRIP_BODY {
    return Vector{_mm512_permutexvar_ps(signs.v[k].raw, sums_.raw)};
  });
}
#endif

// Calls use(i, count, sum...) for each strip of a block of `length` elements, with the sums of its
// groups, whose ranks' bits are given; meanwhile fetches as many bits of `next`.
template <class Signs, class Use, size_t... group>
HWY_INLINE void ForEachStripOfGroups(std::index_sequence<group...>,
                                     const GroupSum (&sums)[sizeof...(group)], const RankBits& bits,
                                     const RankBits& next, size_t length, Use use) {
  size_t i = 0;
  for (; i + kPieceElements <= length; i += kPieceElements) {
    next.Prefetch(i);
    Signs::ForEachStrip(bits.WholePiece(i), [&](size_t s, const auto&... signs) STRIP_BODY {
      use(i + s * kStripElements, Full(), sums[group].At(signs)...);
    });
  }
  if (i == length) return;
  uint8_t memory[kRanksPerPass][kPieceBytes] = {};
  Signs::ForEachStrip(bits.ShortPiece(i, length - i, memory),
                      [&](size_t s, const auto&... signs) STRIP_BODY {
                        const size_t begin = i + s * kStripElements;
                        if (begin >= length) return;
                        use(begin, std::min(length - begin, kStripElements),
                            sums[group].At(signs)...);
                      });
}

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_RANK_SUM_INL_H_
