// The sum over a group of ranks (block.h), a strip at a time and without going from rank to rank:
// as each rank can only add its scale or take it off, a block has 16 different sums, which are
// looked up by the four ranks' bits. Included once per Highway target.

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

class GroupSum {
 public:
  // Makes the sums of a block of one to kRankGroup ranks.
  HWY_INLINE void EnterBlock(absl::Span<const OneBitView> ranks, size_t block) {
    // Bit c of kSigns[r] is bit r of c: element c of this strip is the sum that has the signs c.
    static constexpr uint32_t kSigns[kRankGroup] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
    Strip sums = Signed(Magnitude(ranks[0].scales[block]), kSigns[0]);
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      sums = Add(sums, Signed(Magnitude(ranks[rank].scales[block]), kSigns[rank]));
    }
    Keep(sums);
    // An absent rank is in no sum, so its bits do not matter.
    for (size_t rank = 0; rank < kRankGroup; ++rank) {
      bits_[rank] = ranks[rank < ranks.size() ? rank : 0].bits;
    }
  }

  // The sums of the strip that begins at element i of the span.
  template <class Count>
  HWY_INLINE Strip operator()(size_t i, Count count) const {
    return LookUp(LoadSigns(bits_[0] + i / 8, count), LoadSigns(bits_[1] + i / 8, count),
                  LoadSigns(bits_[2] + i / 8, count), LoadSigns(bits_[3] + i / 8, count));
  }

 private:
#if HWY_TARGET == HWY_AVX2
  using Bytes = hn::Repartition<uint8_t, Floats>;
  using Halves = hn::Repartition<uint16_t, Floats>;

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

  // Byte q of the lower half of the result is 2^r where element 8 * (q / 4) + q % 4 has its bit
  // set, and in the upper half that of the element 4 behind it: the order that Interleave undoes.
  template <uint8_t kRank>
  static HWY_INLINE hn::Vec<Bytes> SpreadSigns(uint32_t signs) {
    alignas(16) static constexpr uint8_t kByte[16] = {0, 0, 0, 0, 1, 1, 1, 1,
                                                      2, 2, 2, 2, 3, 3, 3, 3};
    alignas(32) static constexpr uint32_t kBit[8] = {0x08040201, 0x08040201, 0x08040201,
                                                     0x08040201, 0x80402010, 0x80402010,
                                                     0x80402010, 0x80402010};
    const auto all = hn::BitCast(Bytes(), hn::Set(Words(), static_cast<int32_t>(signs)));
    const auto bytes = hn::TableLookupBytes(all, hn::LoadDup128(Bytes(), kByte));
    const auto bit = hn::BitCast(Bytes(), hn::Load(hn::RebindToUnsigned<Floats>(), kBit));
    return hn::IfThenElseZero(hn::TestBit(bytes, bit), hn::Set(Bytes(), 1 << kRank));
  }

  HWY_INLINE Strip LookUp(uint32_t signs0, uint32_t signs1, uint32_t signs2,
                          uint32_t signs3) const {
    const auto index = hn::Or(hn::Or(SpreadSigns<0>(signs0), SpreadSigns<1>(signs1)),
                              hn::Or(SpreadSigns<2>(signs2), SpreadSigns<3>(signs3)));
    const auto byte = [&](size_t b) HWY_ATTR {
      return hn::TableLookupBytes(hn::LoadDup128(Bytes(), tables_[b]), index);
    };
    return Interleave(byte(0), byte(1), byte(2), byte(3));
  }

  // Floats from their four bytes, in the order that interleaving within 128 bits gives.
  static HWY_INLINE Strip Interleave(hn::Vec<Bytes> byte0, hn::Vec<Bytes> byte1,
                                     hn::Vec<Bytes> byte2, hn::Vec<Bytes> byte3) {
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

  HWY_INLINE void Keep(const Strip& sums) { sums_ = sums.v[0]; }

  HWY_INLINE Strip LookUp(uint32_t signs0, uint32_t signs1, uint32_t signs2,
                          uint32_t signs3) const {
    return MakeStrip([&](size_t k) HWY_ATTR {
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
  const uint8_t* bits_[kRankGroup];
};

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_RANK_SUM_INL_H_
