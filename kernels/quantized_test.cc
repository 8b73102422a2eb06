#include "kernels/quantized.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "kernels/every_target.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;
using Codes = std::vector<uint8_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr IntegerType kTypes[] = {IntegerType::kInt8, IntegerType::kInt4};

// What the equations of quantized.h say, as naively as they can be said.
namespace model {

// The codes as the numbers that they are; scales, and what is lost.
struct Compressed {
  Values scales;
  std::vector<int> codes;
  Values error;
};

int Most(IntegerType type) { return type == IntegerType::kInt8 ? 127 : 7; }

// Eight elements take eight bytes, or four.
Codes Encode(IntegerType type, const std::vector<int>& codes) {
  Codes bytes;
  const size_t padded = (codes.size() + 7) / 8 * 8;
  const auto unsigned_code = [&](size_t i) {
    const int code = i < codes.size() ? codes[i] : 0;
    const int numbers = type == IntegerType::kInt8 ? 256 : 16;
    return code < 0 ? code + numbers : code;
  };
  if (type == IntegerType::kInt8) {
    for (size_t i = 0; i < padded; ++i) bytes.push_back(unsigned_code(i));
  } else {
    for (size_t i = 0; i < padded; i += 2) {
      bytes.push_back(unsigned_code(i) + 16 * unsigned_code(i + 1));
    }
  }
  return bytes;
}

Compressed Compress(IntegerType type, const BlockRule& rule, const Values& u) {
  const auto most = static_cast<float>(Most(type));
  Compressed result;
  for (size_t begin = 0; begin < u.size(); begin += rule.block_elements) {
    const size_t end = std::min(begin + rule.block_elements, u.size());
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(u[i]));
    const bool is_small = largest < std::ldexp(1.0f, -100);
    const float scale = is_small ? 0 : largest / most;
    result.scales.push_back(scale);
    for (size_t i = begin; i < end; ++i) {
      const float inverse = is_small ? 0 : most / largest;
      const float product = u[i] * inverse;
      const int code = static_cast<int>(std::nearbyint(product));
      const float sent = static_cast<float>(code) * scale;
      result.codes.push_back(code);
      result.error.push_back(u[i] - sent);
    }
  }
  return result;
}

Values Decompress(const BlockRule& rule, const Compressed& c) {
  Values values;
  for (size_t i = 0; i < c.codes.size(); ++i) {
    values.push_back(static_cast<float>(c.codes[i]) * c.scales[i / rule.block_elements]);
  }
  return values;
}

// Ranks 0 to 3 first, then 4 to 7, and so on; then these sums.
float RankSum(const std::vector<Values>& of_rank, size_t i) {
  Values groups;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    if (rank % 4 == 0) {
      groups.push_back(of_rank[rank][i]);
    } else {
      groups.back() += of_rank[rank][i];
    }
  }
  float sum = groups[0];
  for (size_t group = 1; group < groups.size(); ++group) sum += groups[group];
  return sum;
}

Values Add(const Values& a, const Values& b) {
  Values sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  return sum;
}

}  // namespace model

// A compressed span of n elements that a kernel writes to; what it leaves alone stays 0x5a.
struct Output {
  Output(const BlockRule& rule, IntegerType type, size_t n)
      : scales(Values(BlockCount(n, rule.block_elements), kUntouchedScale)),
        codes(Codes(CodeBytes(type, n), kUntouchedCodes)) {}

  QuantizedSpan span() { return {scales.data(), codes.data()}; }

  static constexpr float kUntouchedScale = 12345;
  static constexpr uint8_t kUntouchedCodes = 0x5a;
  Guarded<float> scales;
  Guarded<uint8_t> codes;
};

// A compressed span with any codes, and scales as they come.
model::Compressed RandomCompressed(Random& random, const BlockRule& rule, IntegerType type,
                                   size_t n) {
  model::Compressed compressed = {
      random.PositiveValues(BlockCount(n, rule.block_elements)), {}, {}};
  const int numbers = 2 * model::Most(type) + 2;
  for (const uint8_t byte : random.Bytes(n)) {
    compressed.codes.push_back(byte % numbers - numbers / 2);
  }
  return compressed;
}

// body(type, rule, n)
template <class Body>
void ForEachShape(Body body) {
  for (IntegerType type : kTypes) {
    for (size_t block : {8, 16, 40, 256, 4096, 10000, 65536}) {
      for (size_t n : kLengths) {
        SCOPED_TRACE(testing::Message()
                     << n << " elements in blocks of " << block << ", " << BitsOf(type) << " bits");
        body(type, BlockRule{block}, n);
      }
    }
  }
}

TEST(Quantized, CodesTakeWholeGroupsOfEight) {
  EXPECT_EQ(CodeBytes(IntegerType::kInt8, 0), 0);
  EXPECT_EQ(CodeBytes(IntegerType::kInt8, 1), 8);
  EXPECT_EQ(CodeBytes(IntegerType::kInt8, 8), 8);
  EXPECT_EQ(CodeBytes(IntegerType::kInt8, 9), 16);
  EXPECT_EQ(CodeBytes(IntegerType::kInt4, 0), 0);
  EXPECT_EQ(CodeBytes(IntegerType::kInt4, 1), 4);
  EXPECT_EQ(CodeBytes(IntegerType::kInt4, 8), 4);
  EXPECT_EQ(CodeBytes(IntegerType::kInt4, 9), 8);
}

TEST(Quantized, NineElementsInInt8GiveTheBytesComputedByHand) {
  // A = 127, so S = r = 1; ties go to even. The second block is short: A = 63.5, S = 0.5.
  const Values values = {127, -127, 0.5f, 1.5f, -0.5f, -1.5f, -2.5f, 0.75f, -63.5f};
  OnEveryTarget([&] {
    Values error(9, 0.0f);
    Output out({8}, IntegerType::kInt8, 9);
    EXPECT_EQ(CompressQuantized({8}, IntegerType::kInt8, values, absl::MakeSpan(error), out.span()),
              2u);
    EXPECT_TRUE(SameBytes(out.scales, Values{1, 0.5f}));
    EXPECT_TRUE(SameBytes(out.codes, Codes{0x7f, 0x81, 0, 2, 0, 0xfe, 0xfe, 1,  //
                                           0x81, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(error, (Values{0, 0, 0.5f, -0.5f, -0.5f, 0.5f, -0.5f, -0.25f, 0}));
  });
}

TEST(Quantized, NineElementsInInt4GiveTheBytesComputedByHand) {
  // A = 14: S = 2, r = 0.5, codes 7, -7, 1 (from 0.8), -1, 0 (a tie), 2 (a tie), 3, -6.
  const Values values = {14, -14, 1.6f, -1.6f, 1, 3, 6.5f, -12, 7};
  OnEveryTarget([&] {
    Values error(9, 0.0f);
    Output out({8}, IntegerType::kInt4, 9);
    EXPECT_EQ(CompressQuantized({8}, IntegerType::kInt4, values, absl::MakeSpan(error), out.span()),
              2u);
    EXPECT_TRUE(SameBytes(out.scales, Values{2, 1}));
    EXPECT_TRUE(SameBytes(out.codes, Codes{0x97, 0xf1, 0x20, 0xa3, 0x07, 0, 0, 0}));
    EXPECT_EQ(error, (Values{0, 0, 1.6f - 2, 2 - 1.6f, 1, -1, 0.5f, 0, 0}));
  });
}

TEST(Quantized, CompressedValuesMatchTheModel) {
  Random random;
  ForEachShape([&](IntegerType type, BlockRule rule, size_t n) {
    const Values values = random.Values(n), error = random.Values(n);
    const model::Compressed expected = model::Compress(type, rule, model::Add(values, error));
    const Guarded<float> v = values;
    OnEveryTarget([&] {
      Guarded<float> e = error;
      Output out(rule, type, n);
      EXPECT_EQ(CompressQuantized(rule, type, v.span(), e.span(), out.span()),
                BlockCount(n, rule.block_elements));
      EXPECT_TRUE(SameBytes(out.scales, expected.scales));
      EXPECT_TRUE(SameBytes(out.codes, model::Encode(type, expected.codes)));
      EXPECT_TRUE(SameBytes(e, expected.error));
    });
  });
}

// Every code, and around the middle between it and the next one; blocks whose scale is a power of
// two and of which it is not.
TEST(Quantized, CodesAreTheNearestTiesToEven) {
  for (IntegerType type : kTypes) {
    const int most = model::Most(type);
    for (const float unit : {1.0f, 0x1p-90f, 0.1f, 3e-5f, 1e9f}) {
      Values u;
      for (int code = -most; code < most; ++code) {
        const float middle = (static_cast<float>(code) + 0.5f) * unit;
        u.insert(u.end(), {static_cast<float>(code) * unit, std::nextafter(middle, -kInfinity),
                           middle, std::nextafter(middle, kInfinity)});
      }
      u.push_back(static_cast<float>(most) * unit);
      const BlockRule rule = {BlockCount(u.size(), 8) * 8};
      const model::Compressed expected = model::Compress(type, rule, u);
      EXPECT_EQ(*std::max_element(expected.codes.begin(), expected.codes.end()), most);
      OnEveryTarget([&] {
        Values error(u.size(), -0.0f);
        Output out(rule, type, u.size());
        CompressQuantized(rule, type, u, absl::MakeSpan(error), out.span());
        EXPECT_TRUE(SameBytes(out.scales, expected.scales));
        EXPECT_TRUE(SameBytes(out.codes, model::Encode(type, expected.codes)));
        EXPECT_TRUE(SameBytes<float>(error, expected.error));
      });
    }
  }
}

// Each A has other roundings of S and r, but A * r is never as far as Q + 0.5.
TEST(Quantized, TheLargestMagnitudeIsTheMostCode) {
  Random random;
  constexpr size_t kBlocksOfOne = 100'000;
  Values u(8 * kBlocksOfOne, 0.0f);
  const std::vector<uint8_t> bytes = random.Bytes(5 * kBlocksOfOne);
  for (size_t b = 0; b < kBlocksOfOne; ++b) {
    const uint8_t* const of_block = &bytes[5 * b];
    const int mantissa = of_block[0] + 256 * of_block[1] + 65536 * (of_block[2] | 0x80);
    u[8 * b] = std::ldexp(static_cast<float>(mantissa), of_block[3] % 120 - 100);
    if (of_block[4] % 2 == 1) u[8 * b] = -u[8 * b];
  }
  for (IntegerType type : kTypes) {
    OnEveryTarget([&] {
      Values error(u.size(), 0.0f);
      Output out({8}, type, u.size());
      CompressQuantized({8}, type, u, absl::MakeSpan(error), out.span());
      for (size_t b = 0; b < kBlocksOfOne; ++b) {
        std::vector<int> codes(8);
        codes[0] = u[8 * b] < 0 ? -model::Most(type) : model::Most(type);
        const Codes expected = model::Encode(type, codes);
        ASSERT_TRUE(SameBytes<uint8_t>(
            out.codes.span().subspan(expected.size() * b, expected.size()), expected))
            << u[8 * b];
      }
    });
  }
}

TEST(Quantized, WhatIsTooSmallToScaleStaysInTheError) {
  const float least = 0x1p-100f, below = std::nextafter(least, 0.0f);
  const Values u = {below, -below, 0x1p-149f, -0x1p-149f, 0.0f, -0.0f, 0x1p-126f, 1e-35f};
  const Values enough = {least, -least, 0x1p-149f, -0.0f};
  for (IntegerType type : kTypes) {
    const model::Compressed expected = model::Compress(type, {8}, enough);
    OnEveryTarget([&] {
      Values error(8, -0.0f);
      Output out({8}, type, 8);
      EXPECT_EQ(CompressQuantized({8}, type, u, absl::MakeSpan(error), out.span()), 1u);
      EXPECT_TRUE(SameBytes(out.scales, Values{0}));
      EXPECT_TRUE(SameBytes(out.codes, Codes(BitsOf(type), 0)));
      EXPECT_TRUE(SameBytes<float>(error, u)) << "the signs of zeros included";

      Values rest(4, -0.0f);
      Output packed({8}, type, 4);
      CompressQuantized({8}, type, enough, absl::MakeSpan(rest), packed.span());
      EXPECT_GT(packed.scales.span()[0], 0);
      EXPECT_TRUE(SameBytes(packed.codes, model::Encode(type, expected.codes)));
      EXPECT_TRUE(SameBytes<float>(rest, expected.error));
    });
  }
}

TEST(Quantized, NonFiniteBlocksAreLeftUntouchedAndNoOthers) {
  const BlockRule rule = {.block_elements = 256};
  const size_t n = 5 * 256 + 3;
  Random random;
  const Values clean = random.Values(n), error = random.Values(n);
  for (IntegerType type : kTypes) {
    const model::Compressed packed = model::Compress(type, rule, model::Add(clean, error));
    for (float poison : {kNan, -kNan, kInfinity, -kInfinity, 1e30f}) {
      for (size_t at : {0, 255, 256, 700, 1279, 1282}) {
        SCOPED_TRACE(testing::Message() << poison << " at " << at);
        // The last block too, in every case.
        Values values = clean;
        values[at] = values[n - 1] = poison;
        Values scales = packed.scales, left = packed.error;
        Codes codes = model::Encode(type, packed.codes);
        for (const size_t bad : {at / 256, (n - 1) / 256}) {
          const size_t begin = bad * 256, end = std::min(n, begin + 256);
          scales[bad] = kNotPacked;
          std::fill_n(codes.begin() + begin * BitsOf(type) / 8, CodeBytes(type, end - begin),
                      Output::kUntouchedCodes);
          std::copy(error.begin() + begin, error.begin() + end, left.begin() + begin);
        }
        OnEveryTarget([&] {
          Guarded<float> e = error;
          Output out(rule, type, n);
          EXPECT_EQ(CompressQuantized(rule, type, values, e.span(), out.span()), at / 256);
          for (size_t block = 0; block < scales.size(); ++block) {
            EXPECT_EQ(IsPacked(out.span(), block), block != at / 256 && block != (n - 1) / 256);
          }
          EXPECT_TRUE(SameBytes(out.scales, scales));
          EXPECT_TRUE(SameBytes(out.codes, codes));
          EXPECT_TRUE(SameBytes(e, left));
        });
      }
    }
  }
}

TEST(Quantized, ScaleAboveItsLimitIsRefused) {
  for (IntegerType type : kTypes) {
    const float limit = kMaxScale * static_cast<float>(model::Most(type));
    OnEveryTarget([&] {
      Values error = {0.0f};
      Output out({8}, type, 1);
      EXPECT_EQ(CompressQuantized({8}, type, {std::nextafter(limit, kInfinity)},
                                  absl::MakeSpan(error), out.span()),
                0u);
      EXPECT_EQ(error, Values{0});
      EXPECT_EQ(CompressQuantized({8}, type, {limit}, absl::MakeSpan(error), out.span()), 1u);
      EXPECT_TRUE(SameBytes(out.scales, Values{kMaxScale}));
    });
  }
}

TEST(Quantized, AggregateOfAnyWorldSizeMatchesTheModel) {
  Random random;
  for (size_t ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 35}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    const float inverse_count = 1 / static_cast<float>(ranks);
    ForEachShape([&](IntegerType type, BlockRule rule, size_t n) {
      if (n > 12389 || rule.block_elements > 10000) return;  // times this many ranks
      std::vector<model::Compressed> sent;
      std::vector<Values> values;
      std::vector<Guarded<uint8_t>> codes;
      for (size_t rank = 0; rank < ranks; ++rank) {
        sent.push_back(RandomCompressed(random, rule, type, n));
        values.push_back(model::Decompress(rule, sent.back()));
        codes.emplace_back(model::Encode(type, sent.back().codes));
      }
      std::vector<QuantizedView> contributions;
      for (size_t rank = 0; rank < ranks; ++rank) {
        contributions.push_back({sent[rank].scales.data(), codes[rank].data()});
      }
      const Values error = random.Values(n);
      Values u(n);
      for (size_t i = 0; i < n; ++i) u[i] = model::RankSum(values, i) * inverse_count + error[i];
      const model::Compressed expected = model::Compress(type, rule, u);
      OnEveryTarget([&] {
        Guarded<float> e = error;
        Output out(rule, type, n);
        EXPECT_EQ(
            AggregateQuantized(rule, type, contributions, inverse_count, e.span(), out.span()),
            BlockCount(n, rule.block_elements));
        EXPECT_TRUE(SameBytes(out.scales, expected.scales));
        EXPECT_TRUE(SameBytes(out.codes, model::Encode(type, expected.codes)));
        EXPECT_TRUE(SameBytes(e, expected.error));
      });
    });
  }
}

// 2^24 + 1 is 2^24 in fp32. So ranks 1 to 3 vanish beside rank 0, but ranks 4 to 7, added up first,
// do not: plain rank order would give 2^24.
TEST(Quantized, RanksAreAddedInGroupsOfFour) {
  const Values scales = {0x1p24f, 1, 1, 1, 1, 1, 1, 1};
  for (IntegerType type : kTypes) {
    const Codes one = model::Encode(type, {1});
    std::vector<QuantizedView> contributions;
    for (const float& scale : scales) contributions.push_back({&scale, one.data()});
    OnEveryTarget([&] {
      Values error = {0.0f};
      Output out({8}, type, 1);
      AggregateQuantized({8}, type, contributions, /*inverse_count=*/0.125f, absl::MakeSpan(error),
                         out.span());
      EXPECT_EQ(out.scales.span()[0], (0x1p24f + 4) / 8 / static_cast<float>(model::Most(type)));
    });
  }
}

// With p = 1 + 2^-23, p * p rounds to r = 1 + 2^-22 and leaves 2^-46, which a fused multiply-add
// would keep. This is what goes red when the build loses -ffp-contract=off.
TEST(Quantized, ProductsAreRoundedBeforeTheyAreAdded) {
  constexpr float p = 0x1.000002p0f, r = 0x1.000004p0f;
  for (IntegerType type : kTypes) {
    const Codes ones = model::Encode(type, std::vector<int>(32, 1));
    OnEveryTarget([&] {
      Values sum(32, -r);
      AddQuantized({32}, type, {&p, ones.data()}, /*factor=*/p, absl::MakeSpan(sum));
      EXPECT_TRUE(SameBytes<float>(sum, Values(32, 0.0f)));

      Values error(32, -r);
      Output out({32}, type, 32);
      AggregateQuantized({32}, type, {{&p, ones.data()}}, /*inverse_count=*/p,
                         absl::MakeSpan(error), out.span());
      EXPECT_TRUE(SameBytes(out.scales, Values{0.0f})) << "u = p*p - r";
    });
  }
}

TEST(Quantized, DecompressedValuesMatchTheModelWhateverTheCodes) {
  Random random;
  ForEachShape([&](IntegerType type, BlockRule rule, size_t n) {
    const model::Compressed compressed = RandomCompressed(random, rule, type, n);
    const Values expected = model::Decompress(rule, compressed);
    const Guarded<float> scales = compressed.scales;
    const Guarded<uint8_t> codes = model::Encode(type, compressed.codes);
    OnEveryTarget([&] {
      Guarded<float> values = Values(n, kNan);
      DecompressQuantized(rule, type, {scales.data(), codes.data()}, values.span());
      EXPECT_TRUE(SameBytes(values, expected));
    });
  });
}

TEST(Quantized, EachCodeStandsForItself) {
  const float scale = 0.5f;
  for (IntegerType type : kTypes) {
    const int least = -model::Most(type) - 1;
    std::vector<int> codes;
    Values expected;
    for (int code = least; code < -least; ++code) {
      codes.push_back(code);
      expected.push_back(static_cast<float>(code) / 2);
    }
    const Codes bytes = model::Encode(type, codes);
    OnEveryTarget([&] {
      Values values(codes.size());
      DecompressQuantized({1024}, type, {&scale, bytes.data()}, absl::MakeSpan(values));
      EXPECT_TRUE(SameBytes<float>(values, expected));
    });
  }
}

// Large spans are written past the caches.
TEST(Quantized, DecompressedLargeSpansMatchTheModelWhereverTheyBegin) {
  Random random;
  constexpr size_t kElements = (size_t{64} << 10) + 4099;
  for (IntegerType type : kTypes) {
    for (size_t block : {size_t{24}, size_t{4096}}) {
      const BlockRule rule = {block};
      const model::Compressed compressed = RandomCompressed(random, rule, type, kElements);
      const Values expected = model::Decompress(rule, compressed);
      const Codes codes = model::Encode(type, compressed.codes);
      for (size_t offset : {0, 1, 8, 15}) {
        SCOPED_TRACE(testing::Message() << "blocks of " << block << ", offset " << offset);
        OnEveryTarget([&] {
          Values memory(kElements + 64, kNan);
          const size_t aligned = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
          const absl::Span<float> values =
              absl::MakeSpan(memory).subspan(aligned + offset, kElements);
          DecompressQuantized(rule, type, {compressed.scales.data(), codes.data()}, values);
          EXPECT_TRUE(SameBytes<float>(values, expected));
          EXPECT_TRUE(std::isnan(values.data()[-1]));
          EXPECT_TRUE(std::isnan(values.data()[kElements]));
        });
      }
    }
  }
}

TEST(Quantized, AddMatchesTheModelForEitherSignOfTheFactor) {
  Random random;
  ForEachShape([&](IntegerType type, BlockRule rule, size_t n) {
    const model::Compressed addend = RandomCompressed(random, rule, type, n);
    const Values values = model::Decompress(rule, addend), before = random.Values(n);
    const Guarded<uint8_t> codes = model::Encode(type, addend.codes);
    for (float factor : {1.0f, -1.0f, 0.3f}) {
      Values expected(n);
      for (size_t i = 0; i < n; ++i) {
        const float product = factor * values[i];
        expected[i] = before[i] + product;
      }
      OnEveryTarget([&] {
        Guarded<float> accumulator = before;
        AddQuantized(rule, type, {addend.scales.data(), codes.data()}, factor, accumulator.span());
        EXPECT_TRUE(SameBytes(accumulator, expected));
      });
    }
  });
}

TEST(Quantized, AddTakesAContributionBack) {
  const BlockRule rule = {.block_elements = 256};
  const size_t n = 10007;
  Random random;
  const Values values = random.Values(n), error = random.Values(n);
  const Values u = model::Add(values, error);
  for (IntegerType type : kTypes) {
    OnEveryTarget([&] {
      Values e = error;
      Output out(rule, type, n);
      CompressQuantized(rule, type, values, absl::MakeSpan(e), out.span());
      AddQuantized(rule, type, out.span(), /*factor=*/1, absl::MakeSpan(e));
      for (size_t i = 0; i < n; ++i) {
        // With s = code * S, e = u - s and e + s are each off by at most half a unit in the last
        // place of their result, and neither result exceeds |u| + S: 2 * 2^-24 * (|u| + S).
        const float bound = 0x1p-23f * (std::abs(u[i]) + out.scales.span()[i / 256]);
        ASSERT_NEAR(e[i], u[i], bound) << i;
      }
    });
  }
}

}  // namespace
}  // namespace signpost::kernels
