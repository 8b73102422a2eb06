// The SIMD variants of quantized.h, in strips; quantized.cc includes this once per Highway target.
// No guard of its own: Highway's foreach_target.h relies on that.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/compress-inl.h"
#include "kernels/formulas.h"
#include "kernels/quantized.h"
#include "kernels/quantized_reference.h"
#include "kernels/strip-inl.h"
#include "kernels/target.h"

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using reference::AddQuantized;
using reference::AggregateQuantized;
using reference::CompressQuantized;
using reference::DecompressQuantized;

#else

// How a strip's codes lie in memory: Store writes them from words, and Values reads them as what
// they stand for in a block, vector by vector.
struct Int8Codes {
  static constexpr IntegerType kType = IntegerType::kInt8;

  static HWY_INLINE void Store(const WordStrip& words, uint8_t* codes) {
    hn::StoreU(ByteOfEach(words), StripBytes(), reinterpret_cast<int8_t*>(codes));
  }

  class Values {
   public:
    explicit HWY_INLINE Values(float scale) : scale_(hn::Set(Floats(), scale)) {}

    HWY_INLINE Vector operator()(const uint8_t* codes, size_t k) const {
      const hn::Rebind<int8_t, Floats> bytes;
      const auto* const p = reinterpret_cast<const int8_t*>(codes) + k * kLanes;
      const auto words = hn::PromoteTo(Words(), hn::LoadU(bytes, p));
      return hn::Mul(hn::ConvertTo(Floats(), words), scale_);
    }

   private:
    Vector scale_;
  };
};

struct Int4Codes {
  static constexpr IntegerType kType = IntegerType::kInt4;

  static HWY_INLINE void Store(const WordStrip& words, uint8_t* codes) {
    const hn::Full256<uint16_t> pairs;
    const auto pair = hn::BitCast(pairs, ByteOfEach(words));
    const auto even = hn::And(pair, hn::Set(pairs, 0x0f));
    const auto odd = hn::And(hn::ShiftRight<4>(pair), hn::Set(pairs, 0xf0));
    const auto both = hn::BitCast(hn::RebindToSigned<decltype(pairs)>(), hn::Or(even, odd));
    hn::StoreU(hn::DemoteTo(hn::Full128<uint8_t>(), both), hn::Full128<uint8_t>(), codes);
  }

#if HWY_TARGET == HWY_AVX2
  class Values {
   public:
    explicit HWY_INLINE Values(float scale) : scale_(hn::Set(Floats(), scale)) {}

    HWY_INLINE Vector operator()(const uint8_t* codes, size_t k) const {
      // Moves each lane's four bits to the top of its word, and back with their sign.
      alignas(32) static constexpr int32_t kShifts[8] = {28, 24, 20, 16, 12, 8, 4, 0};
      const auto eight = hn::Set(Words(), EightCodes(codes + 4 * k));
      const auto words = hn::ShiftRight<28>(hn::Shl(eight, hn::Load(Words(), kShifts)));
      return hn::Mul(hn::ConvertTo(Floats(), words), scale_);
    }

   private:
    Vector scale_;
  };
#else
  // AVX-512 looks up what the 16 codes stand for.
  class Table {
   public:
    explicit HWY_INLINE Table(float scale) {
      alignas(64) static constexpr float kCodes[16] = {0,  1,  2,  3,  4,  5,  6,  7,
                                                       -8, -7, -6, -5, -4, -3, -2, -1};
      values_ = hn::Mul(hn::Load(Floats(), kCodes), hn::Set(Floats(), scale));
    }

    // Of the indices only the lowest four bits count, for which Highway does not ask.
    HWY_INLINE Vector Look(hn::Vec<hn::RebindToUnsigned<Words> > indices) const {
      return Vector{_mm512_permutexvar_ps(indices.raw, values_.raw)};
    }

   private:
    Vector values_;
  };

  class Values {
   public:
    explicit HWY_INLINE Values(float scale) : table_(scale) {}

    HWY_INLINE Vector operator()(const uint8_t* codes, size_t k) const {
      alignas(64) static constexpr uint32_t kShifts[16] = {0, 4, 8, 12, 16, 20, 24, 28,
                                                           0, 4, 8, 12, 16, 20, 24, 28};
      const auto words =
          hn::IfThenElse(hn::FirstN(Words(), 8), hn::Set(Words(), EightCodes(codes + 8 * k)),
                         hn::Set(Words(), EightCodes(codes + 8 * k + 4)));
      return table_.Look(hn::Shr(hn::BitCast(hn::RebindToUnsigned<Words>(), words),
                                 hn::Load(hn::RebindToUnsigned<Words>(), kShifts)));
    }

   private:
    Table table_;
  };
#endif

 private:
  static HWY_INLINE int32_t EightCodes(const uint8_t* codes) {
    int32_t word;
    std::memcpy(&word, codes, sizeof word);
    return word;
  }
};

#if HWY_TARGET != HWY_AVX2
// With AVX-512 of bytes, one instruction gives each word any eight bits of 64. On Zen 4 it does not
// wait for additions, as shifts do. Highway 1.0 does not have it.
struct MultishiftInt4Codes : Int4Codes {
  class Values {
   public:
    explicit HWY_INLINE Values(float scale) : table_(scale) {}

    HWY_INLINE Vector operator()(const uint8_t* codes, size_t k) const {
      using Indices = hn::RebindToUnsigned<Words>;
      alignas(64) static constexpr uint32_t kShifts[16] = {0,  4,  8,  12, 16, 20, 24, 28,
                                                           32, 36, 40, 44, 48, 52, 56, 60};
      hn::Vec<Indices> indices;
      asm("vpmultishiftqb %2%{1to8%}, %1, %0"
          : "=v"(indices.raw)
          : "v"(hn::Load(Indices(), kShifts).raw),
            "m"(*reinterpret_cast<const uint8_t(*)[8]>(codes + 8 * k)));
      return table_.Look(indices);
    }

   private:
    Table table_;
  };
};
#endif

template <class Codes>
HWY_INLINE void StoreCodes(const WordStrip& words, uint8_t* codes, Full) {
  Codes::Store(words, codes);
}

template <class Codes>
HWY_INLINE void StoreCodes(const WordStrip& words, uint8_t* codes, size_t count) {
  uint8_t all[kStripElements];
  Codes::Store(words, all);
  std::memcpy(codes, all, CodeBytes(Codes::kType, count));
}

// To the nearest integer, ties to even. Highway's own looks after what no word holds, too.
HWY_INLINE hn::Vec<Words> Nearest(Vector v) {
#if HWY_TARGET == HWY_AVX2
  return hn::Vec<Words>{_mm256_cvtps_epi32(v.raw)};
#else
  return hn::Vec<Words>{_mm512_cvtps_epi32(v.raw)};
#endif
}

// What Compress makes of a block: codes, and the scale of its largest magnitude.
template <class Codes>
struct IntegerFormat {
  uint8_t* codes;

  class Measure {
   public:
    HWY_INLINE Measure() {}  // an implicit one is for no target
    HWY_INLINE void Add(size_t, const Strip& u) { largest_.Add(u); }
    HWY_INLINE float Largest() const { return largest_.Get(); }

   private:
    LargestMagnitude largest_;
  };

  class Packer {
   public:
    HWY_INLINE Packer(float inverse, float scale, uint8_t* codes)
        : inverse_(hn::Set(Floats(), inverse)), scale_(hn::Set(Floats(), scale)), codes_(codes) {}

    template <class Count>
    HWY_INLINE Strip operator()(const Strip& u, size_t i, Count count) const {
      PrefetchWritten(codes_ + CodeBytes(Codes::kType, i));
      const auto words = MakeStrip<WordStrip>(
          [&](size_t k) STRIP_BODY { return Nearest(hn::Mul(u.v[k], inverse_)); });
      StoreCodes<Codes>(words, codes_ + CodeBytes(Codes::kType, i), count);
      return MakeStrip([&](size_t k) STRIP_BODY {
        return hn::Sub(u.v[k], hn::Mul(hn::ConvertTo(Floats(), words.v[k]), scale_));
      });
    }

   private:
    Vector inverse_, scale_;
    uint8_t* codes_;
  };

  HWY_INLINE float ScaleOf(const Measure& measure, size_t) const {
    return formulas::ScaleOf(Codes::kType, measure.Largest());
  }

  HWY_INLINE Packer PackerOf(const Measure& measure, float scale) const {
    return {formulas::InverseScale(Codes::kType, measure.Largest()), scale, codes};
  }
};

// Strips of what the codes of a block of a span stand for.
template <class Codes>
class BlockValues {
 public:
  HWY_INLINE BlockValues(QuantizedView view, const Block& block)
      : values_(view.scales[block.index]),
        codes_(view.codes + CodeBytes(Codes::kType, block.begin)) {}

  // The strip that begins at element i of the block.
  HWY_INLINE Strip operator()(size_t i, Full) const {
    const uint8_t* const codes = codes_ + CodeBytes(Codes::kType, i);
    return MakeStrip([=, this](size_t k) STRIP_BODY { return values_(codes, k); });
  }
  // Out of line: there is one in a span, and many places that want it.
  HWY_NOINLINE Strip operator()(size_t i, size_t count) const {
    uint8_t all[kStripElements] = {};
    std::memcpy(all, codes_ + CodeBytes(Codes::kType, i), CodeBytes(Codes::kType, count));
    return MakeStrip([&](size_t k) STRIP_BODY { return values_(all, k); });
  }

 private:
  typename Codes::Values values_;
  const uint8_t* codes_;
};

// What all ranks sent, for RankSumInput.
template <class Codes>
struct IntegerRanks {
  static constexpr size_t kPerPass = kRankGroup;

  absl::Span<const QuantizedView> contributions;

  size_t size() const { return contributions.size(); }

  template <class Use>
  HWY_INLINE void ForEachSum(size_t pass, const Block& block, Use use) const {
    ForEachSumOf(std::make_index_sequence<kRankGroup - 1>(), pass, block, use);
  }

  template <class Use>
  HWY_INLINE void ForEachLastSum(size_t pass, const Block& block, Use use) const {
    static_assert(kRankGroup == 4);
    switch (contributions.size() - pass * kPerPass) {
      case 1:
        return ForEachSumOf(std::make_index_sequence<0>(), pass, block, use);
      case 2:
        return ForEachSumOf(std::make_index_sequence<1>(), pass, block, use);
      case 3:
        return ForEachSumOf(std::make_index_sequence<2>(), pass, block, use);
      default:
        return ForEachSumOf(std::make_index_sequence<3>(), pass, block, use);
    }
  }

 private:
  // The same of a group of a first and so many more ranks.
  template <class Use, size_t... more>
  HWY_INLINE void ForEachSumOf(std::index_sequence<more...>, size_t pass, const Block& block,
                               Use use) const {
    const QuantizedView* const ranks = &contributions[pass * kPerPass];
    const BlockValues<Codes> values[] = {{ranks[0], block}, {ranks[1 + more], block}...};
    const NextPass next(size(), kPerPass, pass, block);
    ForEachStrip(block.length, [&](size_t i, auto count) STRIP_BODY {
      Prefetch(next, i);
      Strip sum = values[0](i, count);  // one after the other: AVX2 has no registers for all
      ((sum = Add(sum, values[1 + more](i, count))), ...);
      use(i, count, sum);
    });
  }

  // What is as far on in the next pass; a cache line at a time.
  HWY_INLINE void Prefetch(const NextPass& next, size_t i) const {
    constexpr size_t kCacheLine = 64;
    if (CodeBytes(Codes::kType, i) % kCacheLine != 0) return;
    for (const QuantizedView& rank : contributions.subspan(next.index * kPerPass, kPerPass)) {
      PrefetchFar(rank.codes + CodeBytes(Codes::kType, next.begin + i));
    }
  }
};

// body(codes) with those of `type`.
template <class Body>
HWY_INLINE auto WithCodes(IntegerType type, Body body) {
  if (type == IntegerType::kInt8) return body(Int8Codes());
#if HWY_TARGET == HWY_AVX3
  if (CurrentTarget() == Target::kAvx512Gfni) return body(MultishiftInt4Codes());
#endif
  return body(Int4Codes());
}

template <class Codes, class Input>
HWY_INLINE size_t CompressToCodes(const BlockRule& rule, const Input& input,
                                  absl::Span<float> error, QuantizedSpan out) {
  return Compress(rule, input, error, IntegerFormat<Codes>{out.codes}, out.scales);
}

size_t CompressQuantized(const BlockRule& rule, IntegerType type, absl::Span<const float> values,
                         absl::Span<float> error, QuantizedSpan out) {
  const ValueInput input = {values.data(), error.data()};
  return WithCodes(type, [&](auto codes) STRIP_BODY {
    return CompressToCodes<decltype(codes)>(rule, input, error, out);
  });
}

size_t AggregateQuantized(const BlockRule& rule, IntegerType type,
                          absl::Span<const QuantizedView> contributions, float inverse_count,
                          absl::Span<float> error, QuantizedSpan out) {
  return WithCodes(type, [&](auto codes) STRIP_BODY {
    using Codes = decltype(codes);
    const RankSumInput<IntegerRanks<Codes> > input = {{contributions}, inverse_count, error.data()};
    return CompressToCodes<Codes>(rule, input, error, out);
  });
}

// Calls body(block, values) for each block of a span, with the strips of what its codes stand for.
template <class Codes, class Body>
HWY_INLINE void ForEachBlock(const BlockRule& rule, QuantizedView view, size_t elements,
                             Body body) {
  const size_t blocks = BlockCount(elements, rule.block_elements);
  for (size_t index = 0; index < blocks; ++index) {
    const size_t begin = index * rule.block_elements;
    const Block block = {index, begin, std::min(rule.block_elements, elements - begin)};
    body(block, BlockValues<Codes>(view, block));
  }
}

void DecompressQuantized(const BlockRule& rule, IntegerType type, QuantizedView compressed,
                         absl::Span<float> values) {
  WithCodes(type, [&](auto codes) STRIP_BODY {
    ForEachBlock<decltype(codes)>(rule, compressed, values.size(),
                                  [&](const Block& block, const auto& values_of_block) STRIP_BODY {
                                    WriteStrips(values.data() + block.begin, block.length,
                                                values.size(), values_of_block);
                                  });
  });
  FinishStrips(values.size());
}

void AddQuantized(const BlockRule& rule, IntegerType type, QuantizedView addend, float factor,
                  absl::Span<float> accumulator) {
  const Vector f = hn::Set(Floats(), factor);
  const auto add = [f](Vector sum, Vector a) STRIP_BODY { return hn::Add(sum, hn::Mul(f, a)); };
  WithCodes(type, [&](auto codes) STRIP_BODY {
    ForEachBlock<decltype(codes)>(
        rule, addend, accumulator.size(),
        [&](const Block& block, const auto& values_of_block) STRIP_BODY {
          float* const sum = accumulator.data() + block.begin;
          ForEachStrip(block.length, [&](size_t i, auto count) STRIP_BODY {
            PrefetchStrip(sum + i);
            Store(Map(add, Load(sum + i, count), values_of_block(i, count)), sum + i, count);
          });
        });
  });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
