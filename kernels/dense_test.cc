#include "kernels/dense.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
using Payload = std::vector<uint8_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DenseType kTypes[] = {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16};

// What the words of dense.h say, as naively as they can be said.
namespace model {

// The nearest number of so many significant bits that is a multiple of the least denormal, ties to
// even, which is how nearbyint rounds.
double Round(int bits, int least_exponent, float value) {
  int exponent;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - bits, least_exponent));
  return std::nearbyint(value / unit) * unit;
}

float Round(DenseType type, float value) {
  switch (type) {
    case DenseType::kFloat32:
      return value;
    case DenseType::kBfloat16:
      return static_cast<float>(Round(/*bits=*/8, /*least_exponent=*/-133, value));
    case DenseType::kFloat16:
      return static_cast<float>(
          std::clamp(Round(/*bits=*/11, /*least_exponent=*/-24, value), -65504.0, 65504.0));
  }
  return kNan;
}

// IEEE 754's binary16: a sign, five bits of exponent and ten of mantissa.
uint16_t EncodeFloat16(float value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign + 0x7c00;
  if (magnitude < 0x1p-14f) return sign + static_cast<int>(std::ldexp(magnitude, 24));
  int exponent;
  const int significand = static_cast<int>(std::ldexp(std::frexp(magnitude, &exponent), 11));
  return sign + ((exponent - 1 + 15) * 1024) + (significand - 1024);
}

// Of values that `type` represents.
Payload Encode(DenseType type, const Values& values) {
  Payload payload;
  for (float value : values) {
    uint8_t bytes[4];
    std::memcpy(bytes, &value, 4);
    const uint16_t half = EncodeFloat16(value);
    if (type == DenseType::kFloat16) std::memcpy(bytes + 2, &half, 2);
    payload.insert(payload.end(), type == DenseType::kFloat32 ? bytes : bytes + 2, bytes + 4);
  }
  return payload;
}

Values Round(DenseType type, Values values) {
  for (float& value : values) value = Round(type, value);
  return values;
}

Values Error(const Values& u, const Values& rounded) {
  Values error(u.size());
  for (size_t i = 0; i < u.size(); ++i) error[i] = u[i] - rounded[i];
  return error;
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

}  // namespace model

// The two bytes of a bf16 or fp16, little-endian.
Payload Half(uint16_t bits) {
  return {static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8)};
}

struct Rounding {
  float value;
  uint16_t bits;
};

TEST(Dense, Bfloat16RoundsToNearestTiesToEven) {
  const Rounding goldens[] = {
      {1.0f, 0x3f80},
      {0x1.01p0f, 0x3f80},         // a tie, down to even
      {0x1.03p0f, 0x3f82},         // a tie, up to even
      {0x1.010002p0f, 0x3f81},     // just above a tie
      {0x1.02fffep0f, 0x3f81},     // just below a tie
      {-0x1.03p0f, 0xbf82},        // the sign does not matter
      {0x1.ffp0f, 0x4000},         // the carry goes into the exponent
      {0.0f, 0x0000},              //
      {-0.0f, 0x8000},             // zero keeps its sign
      {0x1p-149f, 0x0000},         // the least denormal is lost
      {-0x1p-149f, 0x8000},        //
      {0x1p-134f, 0x0000},         // denormals: half a unit is a tie
      {0x1.8p-133f, 0x0002},       // one and a half units
      {0x1.fffffep-127f, 0x0080},  // up to the least normal number
      {0x1p60f, 0x5d80},           // kMaxDense
  };
  OnEveryTarget([&] {
    for (const Rounding& golden : goldens) {
      SCOPED_TRACE(golden.value);
      Values error = {-0.0f};  // which changes no gradient, not even a zero
      Guarded<uint8_t> out(2);
      EXPECT_EQ(CompressDense(BlockRule(), DenseType::kBfloat16, {golden.value},
                              absl::MakeSpan(error), out.data()),
                1u);
      EXPECT_TRUE(SameBytes(out, Half(golden.bits)));
      const float rounded = std::ldexp(
          static_cast<float>((golden.bits & 0x7f) + ((golden.bits & 0x7f80) != 0 ? 0x80 : 0)),
          std::max((golden.bits >> 7 & 0xff), 1) - 127 - 7);
      EXPECT_EQ(error[0], golden.value - std::copysign(rounded, golden.value));
    }
  });
}

struct Float16Rounding {
  float value;
  uint16_t bits;
  float rounded;
};

TEST(Dense, Float16RoundsToNearestTiesToEvenAndClips) {
  const Float16Rounding goldens[] = {
      {1.0f, 0x3c00, 1.0f},
      {0x1.002p0f, 0x3c00, 1.0f},            // a tie, down to even
      {0x1.006p0f, 0x3c02, 0x1.008p0f},      // a tie, up to even
      {0x1.002002p0f, 0x3c01, 0x1.004p0f},   // just above a tie
      {0x1.005ffep0f, 0x3c01, 0x1.004p0f},   // just below a tie
      {-0x1.006p0f, 0xbc02, -0x1.008p0f},    // the sign does not matter
      {0x1.ffep0f, 0x4000, 2.0f},            // the carry goes into the exponent
      {0.0f, 0x0000, 0.0f},                  //
      {-0.0f, 0x8000, -0.0f},                // zero keeps its sign
      {0x1p-149f, 0x0000, 0.0f},             // the least denormal of fp32 is lost
      {-0x1p-149f, 0x8000, -0.0f},           //
      {0x1p-24f, 0x0001, 0x1p-24f},          // the least of fp16 is not
      {0x1p-25f, 0x0000, 0.0f},              // half a unit is a tie
      {0x1.000002p-25f, 0x0001, 0x1p-24f},   // just above it
      {0x1.8p-24f, 0x0002, 0x1p-23f},        // one and a half units
      {-0x1.8p-24f, 0x8002, -0x1p-23f},      //
      {0x1.ff8p-15f, 0x03ff, 0x1.ff8p-15f},  // a denormal
      {0x1.ffcp-15f, 0x0400, 0x1p-14f},      // up to the least normal number
      {65504.0f, 0x7bff, 65504.0f},          // kMaxFloat16
      {0x1.ffdffep15f, 0x7bff, 65504.0f},    // nearer to it than to 65536
      {65520.0f, 0x7bff, 65504.0f},          // as near: IEEE 754 would go to infinity
      {-70000.0f, 0xfbff, -65504.0f},        //
      {kMaxDense, 0x7bff, 65504.0f},         //
      {-kMaxDense, 0xfbff, -65504.0f},       //
  };
  OnEveryTarget([&] {
    for (const Float16Rounding& golden : goldens) {
      SCOPED_TRACE(golden.value);
      Values error = {-0.0f};
      Guarded<uint8_t> out(2);
      EXPECT_EQ(CompressDense(BlockRule(), DenseType::kFloat16, {golden.value},
                              absl::MakeSpan(error), out.data()),
                1u);
      EXPECT_TRUE(SameBytes(out, Half(golden.bits)));
      EXPECT_EQ(error[0], golden.value - golden.rounded);
      Values back(1);
      DecompressDense(DenseType::kFloat16, out.data(), absl::MakeSpan(back));
      EXPECT_TRUE(SameBytes<float>(back, Values{golden.rounded}));
    }
  });
}

// Each fp16, and around the middle between it and the next one.
TEST(Dense, Float16RoundsAroundEachOfItsNumbers) {
  Values values;
  for (int half = 0; half < 0x7bff; ++half) {
    const int exponent = std::max(half >> 10, 1), mantissa = half % 1024 + (half < 1024 ? 0 : 1024);
    const auto number = static_cast<float>(std::ldexp(mantissa, exponent - 25));
    const auto middle = static_cast<float>(std::ldexp(2 * mantissa + 1, exponent - 26));
    for (const float value :
         {number, std::nextafter(middle, 0.0f), middle, std::nextafter(middle, kInfinity)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  const Values rounded = model::Round(DenseType::kFloat16, values);
  const Payload expected = model::Encode(DenseType::kFloat16, rounded);
  OnEveryTarget([&] {
    Values error(values.size(), -0.0f);
    Payload out(expected.size());
    CompressDense(BlockRule(), DenseType::kFloat16, values, absl::MakeSpan(error), out.data());
    EXPECT_TRUE(SameBytes<uint8_t>(out, expected));
    EXPECT_TRUE(SameBytes<float>(error, model::Error(values, rounded)));
  });
}

// What does not fit waits in the error, however many rounds it takes.
TEST(Dense, WhatFloat16ClipsIsSentLater) {
  OnEveryTarget([&] {
    Values error = {0.0f};
    double sent = 0;
    for (int round = 0; round < 4; ++round) {
      uint8_t out[2];
      const Values gradient = {round == 0 ? -200'000.0f : 0.0f};
      CompressDense(BlockRule(), DenseType::kFloat16, gradient, absl::MakeSpan(error), out);
      Values received(1);
      DecompressDense(DenseType::kFloat16, out, absl::MakeSpan(received));
      EXPECT_GE(received[0], -65504);
      sent += received[0];
    }
    EXPECT_EQ(sent + error[0], -200'000.0);
    EXPECT_LT(std::abs(error[0]), 1);
  });
}

TEST(Dense, AnAggregatorClipsFloat16Too) {
  const Payload most = Half(0x7bff);
  OnEveryTarget([&] {
    Values error = {100.0f};
    Guarded<uint8_t> out(2);
    AggregateDense(DenseType::kFloat16, std::vector<const uint8_t*>(4, most.data()), /*n=*/1,
                   /*inverse_count=*/0.25f, absl::MakeSpan(error), out.data());
    EXPECT_TRUE(SameBytes(out, most));
    EXPECT_EQ(error[0], 100);
  });
}

TEST(Dense, Float32LosesNothing) {
  const Values gradient = {1.5f, -0x1p-149f, 1e18f};
  OnEveryTarget([&] {
    Values error = {0.25f, 0.0f, 1.0f};
    Guarded<uint8_t> out(12);
    EXPECT_EQ(CompressDense(BlockRule(), DenseType::kFloat32, gradient, absl::MakeSpan(error),
                            out.data()),
              1u);
    EXPECT_TRUE(SameBytes(out, model::Encode(DenseType::kFloat32, {1.75f, -0x1p-149f, 1e18f})));
    EXPECT_TRUE(SameBytes<float>(error, Values(3, 0.0f)));
  });
}

TEST(Dense, CompressedMatchesTheModel) {
  Random random;
  for (DenseType type : kTypes) {
    for (size_t block : kBlocks) {
      for (size_t n : kLengths) {
        SCOPED_TRACE(testing::Message() << n << " elements in blocks of " << block);
        const Values gradient = random.Values(n), error = random.Values(n);
        Values u(n);
        for (size_t i = 0; i < n; ++i) u[i] = gradient[i] + error[i];
        const Values rounded = model::Round(type, u);
        const Guarded<float> g = gradient;
        OnEveryTarget([&] {
          Guarded<float> e = error;
          Guarded<uint8_t> out(DenseBytes(type, n));
          EXPECT_EQ(CompressDense(BlockRule{block}, type, g.span(), e.span(), out.data()),
                    BlockCount(n, block));
          EXPECT_TRUE(SameBytes(out, model::Encode(type, rounded)));
          EXPECT_TRUE(SameBytes(e, model::Error(u, rounded)));
        });
      }
    }
  }
}

TEST(Dense, BlocksOutOfRangeAreNotPackedAndKeepTheirErrorsAndNoOthers) {
  const float above = std::nextafter(kMaxDense, kInfinity);
  Random random;
  for (DenseType type : kTypes) {
    for (const size_t block : {256, 10000}) {
      const size_t n = 3 * block + 3;
      const Values clean = random.Values(n), error = random.Values(n);
      Values u(n);
      for (size_t i = 0; i < n; ++i) u[i] = clean[i] + error[i];
      const Values rounded = model::Round(type, u);
      const Payload payload = model::Encode(type, rounded);
      const Values lost = model::Error(u, rounded);
      for (float poison : {kNan, kInfinity, -kInfinity, above, -above}) {
        for (size_t at : {size_t{0}, block - 1, block, block + block * 3 / 4, 3 * block, n - 1}) {
          SCOPED_TRACE(testing::Message() << poison << " at " << at << " of blocks of " << block);
          // The last block too, in every case.
          Values gradient = clean;
          gradient[at] = gradient[n - 1] = poison;
          Payload bytes = payload;
          Values left = lost;
          for (const size_t bad : {at / block, (n - 1) / block}) {
            const size_t begin = bad * block, end = std::min(n, begin + block);
            std::fill(bytes.begin() + DenseBytes(type, begin),
                      bytes.begin() + DenseBytes(type, end), 0);
            const Payload mark = model::Encode(type, {kNotPacked});
            std::copy(mark.begin(), mark.end(), bytes.begin() + DenseBytes(type, begin));
            std::copy(error.begin() + begin, error.begin() + end, left.begin() + begin);
          }
          OnEveryTarget([&] {
            Guarded<float> e = error;
            Guarded<uint8_t> out = Payload(DenseBytes(type, n), 0x5a);
            EXPECT_EQ(CompressDense(BlockRule{block}, type, gradient, e.span(), out.data()),
                      at / block);
            EXPECT_TRUE(SameBytes(out, bytes));
            EXPECT_TRUE(SameBytes(e, left));
          });
        }
      }
    }
  }
}

TEST(Dense, AggregateOfAnyWorldSizeMatchesTheModel) {
  Random random;
  for (DenseType type : kTypes) {
    for (size_t ranks : {1, 2, 3, 4, 5, 8, 9, 16}) {
      for (size_t n : kLengths) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << n << " elements");
        const float inverse_count = 1 / static_cast<float>(ranks);
        std::vector<Values> sent;
        std::vector<Guarded<uint8_t>> payloads;
        for (size_t rank = 0; rank < ranks; ++rank) {
          sent.push_back(model::Round(type, random.Values(n)));
          payloads.emplace_back(model::Encode(type, sent.back()));
        }
        std::vector<const uint8_t*> contributions;
        for (const Guarded<uint8_t>& payload : payloads) contributions.push_back(payload.data());
        const Values error = random.Values(n);
        Values u(n);
        for (size_t i = 0; i < n; ++i) u[i] = model::RankSum(sent, i) * inverse_count + error[i];
        const Values rounded = model::Round(type, u);
        OnEveryTarget([&] {
          Guarded<float> e = error;
          Guarded<uint8_t> out(DenseBytes(type, n));
          AggregateDense(type, contributions, n, inverse_count, e.span(), out.data());
          EXPECT_TRUE(SameBytes(out, model::Encode(type, rounded)));
          EXPECT_TRUE(SameBytes(e, model::Error(u, rounded)));
        });
      }
    }
  }
}

// -0 + 0 is +0.
TEST(Dense, WithoutAnErrorFloat32IsAsWithZeros) {
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    Values gradient = random.Values(n);
    if (n > 0) gradient[n / 2] = -0.0f;
    const Guarded<float> g = gradient;
    const Guarded<uint8_t> payload = model::Encode(DenseType::kFloat32, gradient);
    const std::vector<const uint8_t*> contributions(3, payload.data());
    OnEveryTarget([&] {
      Values zeros(n, 0.0f);
      std::vector<uint8_t> expected(4 * n), mean(4 * n);
      CompressDense(BlockRule{8}, DenseType::kFloat32, gradient, absl::MakeSpan(zeros),
                    expected.data());
      AggregateDense(DenseType::kFloat32, contributions, n, 0.25f, absl::MakeSpan(zeros),
                     mean.data());
      for (const BlockRule& rule : {BlockRule{8}, BlockRule()}) {
        Guarded<uint8_t> out(4 * n);  // at no multiple of four
        EXPECT_EQ(CompressDense(rule, DenseType::kFloat32, g.span(), {}, out.data()),
                  BlockCount(n, rule.block_elements));
        EXPECT_TRUE(SameBytes(out, expected));
      }
      Guarded<uint8_t> mean_out(4 * n);
      AggregateDense(DenseType::kFloat32, contributions, n, 0.25f, {}, mean_out.data());
      EXPECT_TRUE(SameBytes(mean_out, mean));
    });
  }
  OnEveryTarget([&] {
    Guarded<uint8_t> out(64);
    Values gradient(16, 1.0f);
    gradient[9] = kNan;
    EXPECT_EQ(CompressDense(BlockRule{8}, DenseType::kFloat32, gradient, {}, out.data()), 1u);
  });
}

// 2^24 + 1 is 2^24 in fp32. So ranks 1 to 3 vanish beside rank 0, but ranks 4 to 7, added up first,
// do not: plain rank order would give 2^24.
TEST(Dense, RanksAreAddedInGroupsOfFour) {
  const Payload first = model::Encode(DenseType::kFloat32, {0x1p24f});
  const Payload other = model::Encode(DenseType::kFloat32, {1.0f});
  std::vector<const uint8_t*> contributions(8, other.data());
  contributions[0] = first.data();
  OnEveryTarget([&] {
    Values error = {0.0f};
    Guarded<uint8_t> out(4);
    AggregateDense(DenseType::kFloat32, contributions, /*n=*/1, /*inverse_count=*/0.125f,
                   absl::MakeSpan(error), out.data());
    EXPECT_TRUE(SameBytes(out, model::Encode(DenseType::kFloat32, {(0x1p24f + 4) / 8})));
  });
}

TEST(Dense, DecompressedNumbersAreThePayloads) {
  Random random;
  for (DenseType type : kTypes) {
    for (size_t n : kLengths) {
      SCOPED_TRACE(n);
      const Values sent = model::Round(type, random.Values(n));
      const Guarded<uint8_t> payload = model::Encode(type, sent);
      OnEveryTarget([&] {
        Guarded<float> values = Values(n, kNan);
        DecompressDense(type, payload.data(), values.span());
        EXPECT_TRUE(SameBytes(values, sent));
      });
    }
  }
}

// Large spans are written past the caches.
TEST(Dense, DecompressedLargeSpansAreThePayloadsWhereverTheyBegin) {
  Random random;
  constexpr size_t kElements = (size_t{64} << 10) + 4099;
  for (DenseType type : kTypes) {
    const Values sent = model::Round(type, random.Values(kElements));
    const Payload payload = model::Encode(type, sent);
    for (size_t offset : {0, 1, 8, 15}) {
      SCOPED_TRACE(offset);
      OnEveryTarget([&] {
        Values memory(kElements + 64, kNan);
        const size_t aligned = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
        const absl::Span<float> values =
            absl::MakeSpan(memory).subspan(aligned + offset, kElements);
        DecompressDense(type, payload.data(), values);
        EXPECT_TRUE(SameBytes<float>(values, sent));
        EXPECT_TRUE(std::isnan(values.data()[-1]));
        EXPECT_TRUE(std::isnan(values.data()[kElements]));
      });
    }
  }
}

// So are fp32 payloads without an error.
TEST(Dense, LargePayloadsThatLoseNothingAreTheGradientsWhereverTheyBegin) {
  constexpr size_t kElements = (size_t{64} << 10) + 4099, kBad = 5000;
  Random random;
  Values gradient = random.Values(kElements);
  for (size_t offset : {0, 1, 8, 15}) {
    for (const bool is_finite : {true, false}) {
      gradient[kBad] = is_finite ? 1.0f : std::numeric_limits<float>::infinity();
      Values doubled = gradient;
      for (float& value : doubled) value *= 2;
      SCOPED_TRACE(testing::Message() << offset << (is_finite ? "" : ", with a bad block"));
      OnEveryTarget([&] {
        constexpr BlockRule kRule;
        constexpr size_t kBadBlock = kBad / kRule.block_elements;
        Values memory(kElements + 64, kNan);
        const size_t aligned = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
        float* const out = memory.data() + aligned + offset;
        const size_t packed = CompressDense(kRule, DenseType::kFloat32, gradient, /*error=*/{},
                                            reinterpret_cast<uint8_t*>(out));
        EXPECT_EQ(packed, is_finite ? BlockCount(kElements, kRule.block_elements) : kBadBlock);
        for (size_t i = 0; i < kElements; ++i) {
          const bool is_there = is_finite || i / kRule.block_elements != kBadBlock;
          const float mark = i % kRule.block_elements == 0 ? kNotPacked : 0.0f;
          const float wanted = is_there ? gradient[i] + 0.0f : mark;
          ASSERT_EQ(std::memcmp(&out[i], &wanted, sizeof wanted), 0) << i;
        }
        EXPECT_TRUE(std::isnan(out[-1]));
        EXPECT_TRUE(std::isnan(out[kElements]));
        if (!is_finite) return;
        const Values compressed(out, out + kElements);
        std::fill_n(out, kElements, kNan);
        const auto* const gradient_bytes = reinterpret_cast<const uint8_t*>(gradient.data());
        AggregateDense(DenseType::kFloat32, {gradient_bytes}, kElements, /*inverse_count=*/1,
                       /*error=*/{}, reinterpret_cast<uint8_t*>(out));
        EXPECT_EQ(std::memcmp(out, compressed.data(), kElements * sizeof(float)), 0);
        const auto* const doubled_bytes = reinterpret_cast<const uint8_t*>(doubled.data());
        AggregateDense(DenseType::kFloat32, {gradient_bytes, gradient_bytes, doubled_bytes},
                       kElements, /*inverse_count=*/0.25f, /*error=*/{},
                       reinterpret_cast<uint8_t*>(out));
        // Doubling twice rounds nothing.
        EXPECT_EQ(std::memcmp(out, compressed.data(), kElements * sizeof(float)), 0);
        EXPECT_TRUE(std::isnan(out[-1]));
        EXPECT_TRUE(std::isnan(out[kElements]));
      });
    }
  }
}

TEST(Dense, AddMatchesTheModel) {
  constexpr float kFactor = -0.3f;
  Random random;
  for (DenseType type : kTypes) {
    for (size_t n : kLengths) {
      SCOPED_TRACE(n);
      const Values addend = model::Round(type, random.Values(n)), before = random.Values(n);
      const Guarded<uint8_t> payload = model::Encode(type, addend);
      Values expected(n);
      for (size_t i = 0; i < n; ++i) expected[i] = before[i] + (kFactor * addend[i]);
      OnEveryTarget([&] {
        Guarded<float> accumulator = before;
        AddDense(type, payload.data(), kFactor, accumulator.span());
        EXPECT_TRUE(SameBytes(accumulator, expected));
      });
    }
  }
}

TEST(Dense, ScaleMultipliesEachValueOnce) {
  constexpr float kFactor = 0.7f;
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    const Values before = random.Values(n);
    Values expected(n);
    for (size_t i = 0; i < n; ++i) expected[i] = kFactor * before[i];
    OnEveryTarget([&] {
      Guarded<float> values = before;
      Scale(kFactor, values.span());
      EXPECT_TRUE(SameBytes(values, expected));
    });
  }
}

TEST(Dense, WithinRangeFindsTheOneElementThatIsNot) {
  const float above = std::nextafter(kMaxDense, kInfinity);
  OnEveryTarget([&] {
    for (size_t n : {1, 7, 8, 31, 32, 33, 100}) {
      for (size_t at = 0; at < n; ++at) {
        SCOPED_TRACE(testing::Message() << at << " of " << n);
        const auto within = [&](DenseType type, float value) {
          Values values(n, type == DenseType::kFloat16 ? -kMaxFloat16 : -kMaxDense);
          values[at] = value;
          const Guarded<uint8_t> payload = model::Encode(type, values);
          return DenseWithinRange(type, payload.data(), n);
        };
        EXPECT_TRUE(within(DenseType::kFloat32, kMaxDense));
        EXPECT_FALSE(within(DenseType::kFloat32, above));
        EXPECT_FALSE(within(DenseType::kFloat32, -above));
        for (DenseType type : kTypes) {
          EXPECT_TRUE(within(type, -0.0f));
          EXPECT_FALSE(within(type, kNan));
          EXPECT_FALSE(within(type, -kInfinity));
          if (type == DenseType::kFloat16) continue;  // it has no such numbers
          EXPECT_FALSE(within(type, 0x1.02p100f));
        }
      }
    }
    EXPECT_TRUE(DenseWithinRange(DenseType::kFloat32, nullptr, 0));
  });
}

}  // namespace
}  // namespace signpost::kernels
