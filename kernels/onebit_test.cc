#include "kernels/onebit.h"

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

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MomentumRates kRates = {/*beta1=*/0.9f, /*one_minus_beta1=*/0.1f};

// What the equations of onebit.h say, as naively as they can be said.
namespace model {

struct Compressed {
  Values scales;
  std::vector<uint8_t> bits;
  Values error;
};

float Sign(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

bool Bit(const std::vector<uint8_t>& bits, size_t i) { return bits[i / 8] / (1 << i % 8) % 2 == 1; }

// What lane l holds once `lanes` lanes are left.
float Fold(const Values& u, size_t l, size_t lanes) {
  if (lanes < 128) return Fold(u, l, 2 * lanes) + Fold(u, l + lanes, 2 * lanes);
  float sum = 0;
  for (size_t i = l; i < u.size(); i += 128) sum += u[i] * u[i];
  return sum;
}

float ScaleOf(const BlockRule& rule, const Values& u) {
  return rule.gamma * std::sqrt(Fold(u, /*l=*/0, /*lanes=*/1) / static_cast<float>(u.size()));
}

Compressed Compress(const BlockRule& rule, const Values& u) {
  Compressed result;
  result.bits.resize((u.size() + 7) / 8);
  for (size_t i = 0; i < u.size(); ++i) {
    if (i % rule.block_elements == 0) {
      const size_t end = std::min(i + rule.block_elements, u.size());
      result.scales.push_back(ScaleOf(rule, Values(u.begin() + i, u.begin() + end)));
    }
    if (std::signbit(u[i])) result.bits[i / 8] += 1 << i % 8;
    result.error.push_back(u[i] - Sign(result.scales.back(), std::signbit(u[i])));
  }
  return result;
}

Values Decompress(const BlockRule& rule, const Compressed& c, size_t n) {
  Values values(n);
  for (size_t i = 0; i < n; ++i)
    values[i] = Sign(c.scales[i / rule.block_elements], Bit(c.bits, i));
  return values;
}

Values MomentumAndError(MomentumRates rates, const Values& m, const Values& g, const Values& e) {
  Values u(g.size());
  for (size_t i = 0; i < u.size(); ++i) {
    u[i] = ((rates.beta1 * m[i]) + (rates.one_minus_beta1 * g[i])) + e[i];
  }
  return u;
}

// Ranks 0 to 3 first, then 4 to 7, and so on; then these sums.
float RankSum(const Values& of_rank) {
  Values groups;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    if (rank % 4 == 0) {
      groups.push_back(of_rank[rank]);
    } else {
      groups.back() += of_rank[rank];
    }
  }
  float sum = groups[0];
  for (size_t group = 1; group < groups.size(); ++group) sum += groups[group];
  return sum;
}

}  // namespace model

// A compressed span of n elements that a kernel writes to; what it leaves alone stays 0x5a.
struct Output {
  Output(const BlockRule& rule, size_t n)
      : scales(Values(BlockCount(n, rule.block_elements), kUntouchedScale)),
        bits(std::vector<uint8_t>(SignBytes(n), kUntouchedBits)) {}

  OneBitSpan span() { return {scales.data(), bits.data()}; }

  static constexpr float kUntouchedScale = 12345;
  static constexpr uint8_t kUntouchedBits = 0x5a;
  Guarded<float> scales;
  Guarded<uint8_t> bits;
};

// A compressed span with random signs, and scales as they come.
model::Compressed RandomCompressed(Random& random, const BlockRule& rule, size_t n) {
  return {
      random.PositiveValues(BlockCount(n, rule.block_elements)), random.Bytes(SignBytes(n)), {}};
}

template <class Body>
void ForEachShape(Body body) {
  for (size_t block : kBlocks) {
    for (size_t n : kLengths) {
      SCOPED_TRACE(testing::Message() << n << " elements in blocks of " << block);
      body(BlockRule{block}, n);
    }
  }
}

TEST(OneBit, EightElementsGiveTheBytesComputedByHand) {
  // u = 0.5 * g: sum of squares 25 + 7 = 32; S = 1.5 * sqrt(32 / 8) = 3; elements 2 and 5 negative.
  const BlockRule rule = {.block_elements = 8, .gamma = 1.5f};
  const MomentumRates rates = {.beta1 = 0.5f, .one_minus_beta1 = 0.5f};
  const Values gradient = {10, 2, -2, 2, 2, -2, 2, 2};
  const Values momentum(8, 0.0f);
  OnEveryTarget([&] {
    Values error(8, 0.0f);
    Output out(rule, 8);
    EXPECT_EQ(
        CompressMomentum(rule, rates, gradient, momentum.data(), absl::MakeSpan(error), out.span()),
        1u);
    EXPECT_TRUE(SameBytes(out.scales, Values{3.0f}));
    EXPECT_TRUE(SameBytes(out.bits, std::vector<uint8_t>{0b00100100}));
    EXPECT_EQ(error, (Values{2, -2, 2, -2, -2, 2, -2, -2}));
  });
}

TEST(OneBit, MinusZeroIsNegativeAndUnusedBitsAreZero) {
  const BlockRule rule = {.block_elements = 8, .gamma = 1.0f};
  const MomentumRates rates = {.beta1 = 1.0f, .one_minus_beta1 = 1.0f};
  const Values momentum = {0.0f, -0.0f, 2.0f};
  const Values gradient = {0.0f, -0.0f, 0.0f};
  OnEveryTarget([&] {
    Values error = {0.0f, -0.0f, 0.0f};
    Output out(rule, 3);
    CompressMomentum(rule, rates, gradient, momentum.data(), absl::MakeSpan(error), out.span());
    EXPECT_TRUE(SameBytes(out.bits, std::vector<uint8_t>{0b010}));
    const float scale = std::sqrt(4.0f / 3);
    EXPECT_EQ(error, (Values{-scale, scale, 2 - scale}));
  });
}

// With p = 1 + 2^-23, p * p rounds to r = 1 + 2^-22 and leaves 2^-46, which a fused multiply-add
// would keep. This is what goes red when the build loses -ffp-contract=off.
TEST(OneBit, ProductsAreRoundedBeforeTheyAreAdded) {
  constexpr float p = 0x1.000002p0f, r = 0x1.000004p0f;
  const BlockRule rule = {.block_elements = 32};
  const MomentumRates rates = {.beta1 = p, .one_minus_beta1 = p};
  Values momentum(32, p), gradient(32, -p);
  OnEveryTarget([&] {
    Values error(32, 0.0f);
    Output out(rule, 32);
    CompressMomentum(rule, rates, gradient, momentum.data(), absl::MakeSpan(error), out.span());
    EXPECT_TRUE(SameBytes(out.scales, Values{0.0f})) << "u = p*p - p*p";

    // x - lr * (m * inverse + wd * x) with m * inverse = -r, wd * x = r; then lr * ... = r.
    const uint8_t negative[] = {0xff, 0xff, 0xff, 0xff};
    const float scale = p;
    const Values inverse(32, p);
    Values parameters(32, p);
    ApplyMomentum(rule, {&scale, negative}, {.learning_rate = 1, .weight_decay = p}, inverse,
                  absl::MakeSpan(parameters));
    EXPECT_TRUE(SameBytes<float>(parameters, Values(32, p)));
    const uint8_t positive[] = {0, 0, 0, 0};
    Values back(32, r);
    ApplyMomentum(rule, {&scale, positive}, {.learning_rate = p, .weight_decay = 0},
                  Values(32, 1.0f), absl::MakeSpan(back));
    EXPECT_TRUE(SameBytes<float>(back, Values(32, 0.0f))) << "r - p*p";
  });
}

TEST(OneBit, CompressedDenseMomentumMatchesTheModel) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Values gradient = random.Values(n), momentum = random.Values(n);
    const Values error = random.Values(n);
    const model::Compressed expected =
        model::Compress(rule, model::MomentumAndError(kRates, momentum, gradient, error));
    const Guarded<float> g = gradient, m = momentum;
    OnEveryTarget([&] {
      Guarded<float> e = error;
      Output out(rule, n);
      EXPECT_EQ(CompressMomentum(rule, kRates, g.span(), m.data(), e.span(), out.span()),
                BlockCount(n, rule.block_elements));
      EXPECT_TRUE(SameBytes(out.scales, expected.scales));
      EXPECT_TRUE(SameBytes(out.bits, expected.bits));
      EXPECT_TRUE(SameBytes(e, expected.error));
    });
  });
}

TEST(OneBit, CompressedOneBitMomentumMatchesTheModel) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Values gradient = random.Values(n), error = random.Values(n);
    const model::Compressed momentum = RandomCompressed(random, rule, n);
    const Values u =
        model::MomentumAndError(kRates, model::Decompress(rule, momentum, n), gradient, error);
    const model::Compressed expected = model::Compress(rule, u);
    const Guarded<float> g = gradient, scales = momentum.scales;
    const Guarded<uint8_t> bits = momentum.bits;
    OnEveryTarget([&] {
      Guarded<float> e = error;
      Output out(rule, n);
      EXPECT_EQ(CompressMomentum(rule, kRates, g.span(), OneBitView{scales.data(), bits.data()},
                                 e.span(), out.span()),
                BlockCount(n, rule.block_elements));
      EXPECT_TRUE(SameBytes(out.scales, expected.scales));
      EXPECT_TRUE(SameBytes(out.bits, expected.bits));
      EXPECT_TRUE(SameBytes(e, expected.error));
    });
  });
}

TEST(OneBit, CompressedValuesMatchTheModel) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Values values = random.Values(n), error = random.Values(n);
    Values u(n);
    for (size_t i = 0; i < n; ++i) u[i] = values[i] + error[i];
    const model::Compressed expected = model::Compress(rule, u);
    const Guarded<float> v = values;
    OnEveryTarget([&] {
      Guarded<float> e = error;
      Output out(rule, n);
      EXPECT_EQ(CompressOneBit(rule, v.span(), e.span(), out.span()),
                BlockCount(n, rule.block_elements));
      EXPECT_TRUE(SameBytes(out.scales, expected.scales));
      EXPECT_TRUE(SameBytes(out.bits, expected.bits));
      EXPECT_TRUE(SameBytes(e, expected.error));
    });
  });
}

// 1-bit LAMB's paper scales the tensors' momenta to one size before it compresses them, with one
// scale for all. Here blocks have their own: it would change no bit, and what is lost would be
// scaled back as what is not.
TEST(OneBit, AScaledInputHasTheSameBitsAndAsMuchLargerScaleAndError) {
  constexpr float kFactor = 0x1p10f;  // exact
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    Values u(n);
    for (size_t i = 0; i < n; ++i) u[i] = std::sin(static_cast<float>(i + 1));
    Values scaled = u;
    for (float& value : scaled) value *= kFactor;
    const BlockRule rule = {.block_elements = 256};
    OnEveryTarget([&] {
      Values error(n), scaled_error(n);
      std::vector<float> scales(BlockCount(n, 256)), scaled_scales(scales.size());
      std::vector<uint8_t> bits(SignBytes(n)), scaled_bits(bits.size());
      CompressOneBit(rule, u, absl::MakeSpan(error), {scales.data(), bits.data()});
      CompressOneBit(rule, scaled, absl::MakeSpan(scaled_error),
                     {scaled_scales.data(), scaled_bits.data()});
      EXPECT_EQ(scaled_bits, bits);
      for (float& scale : scales) scale *= kFactor;
      EXPECT_EQ(scaled_scales, scales);
      for (float& e : error) e *= kFactor;
      EXPECT_EQ(scaled_error, error);
    });
  }
}

TEST(OneBit, CompressedValuesLeaveOutABlockThatIsNotFinite) {
  const BlockRule rule = {.block_elements = 8};
  Values values(24, 1.0f);
  values[17] = kNan;
  OnEveryTarget([&] {
    Values error(24, 0.5f);
    Output out(rule, 24);
    EXPECT_EQ(CompressOneBit(rule, values, absl::MakeSpan(error), out.span()), 2u);
    EXPECT_EQ(error[16], 0.5f);
    EXPECT_FALSE(IsPacked(out.span(), 2));
  });
}

TEST(OneBit, DecompressedValuesMatchTheModelWithTheSignsOfTheirZeros) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    model::Compressed compressed = RandomCompressed(random, rule, n);
    if (!compressed.scales.empty()) compressed.scales.back() = 0;
    const Values expected = model::Decompress(rule, compressed, n);
    const Guarded<uint8_t> bits = compressed.bits;
    OnEveryTarget([&] {
      Guarded<float> values = Values(n, kNan);
      DecompressOneBit(rule, {compressed.scales.data(), bits.data()}, values.span());
      EXPECT_TRUE(SameBytes(values, expected));
    });
  });
}

// Large spans are written past the caches.
TEST(OneBit, DecompressedLargeSpansMatchTheModelWhereverTheyBegin) {
  Random random;
  constexpr size_t kElements = (size_t{256} << 10) + 4099;
  for (size_t block : {size_t{24}, size_t{4096}}) {
    const BlockRule rule = {block};
    const model::Compressed compressed = RandomCompressed(random, rule, kElements);
    const Values expected = model::Decompress(rule, compressed, kElements);
    for (size_t offset : {0, 1, 8, 15}) {
      SCOPED_TRACE(testing::Message() << "blocks of " << block << ", offset " << offset);
      OnEveryTarget([&] {
        Values memory(kElements + 64, kNan);
        const size_t aligned = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
        const absl::Span<float> values =
            absl::MakeSpan(memory).subspan(aligned + offset, kElements);
        DecompressOneBit(rule, {compressed.scales.data(), compressed.bits.data()}, values);
        EXPECT_TRUE(SameBytes<float>(values, expected));
        EXPECT_TRUE(std::isnan(values.data()[-1]));
        EXPECT_TRUE(std::isnan(values.data()[kElements]));
      });
    }
  }
}

TEST(OneBit, AggregateOfAnyWorldSizeMatchesTheModel) {
  Random random;
  for (size_t ranks : {1, 2, 3, 4, 5, 8, 9, 16, 70}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    const float inverse_count = 1 / static_cast<float>(ranks);
    ForEachShape([&](BlockRule rule, size_t n) {
      if (n > 12389) return;  // seven blocks and a tail will do, times this many ranks
      std::vector<model::Compressed> sent(ranks);
      for (model::Compressed& of_rank : sent) of_rank = RandomCompressed(random, rule, n);
      const Values error = random.Values(n);
      Values u(n);
      for (size_t i = 0; i < n; ++i) {
        Values terms;
        for (const model::Compressed& of_rank : sent) {
          terms.push_back(
              model::Sign(of_rank.scales[i / rule.block_elements], model::Bit(of_rank.bits, i)));
        }
        u[i] = model::RankSum(terms) * inverse_count + error[i];
      }
      const model::Compressed expected = model::Compress(rule, u);

      std::vector<Guarded<uint8_t>> bits;
      for (const model::Compressed& of_rank : sent) bits.emplace_back(of_rank.bits);
      std::vector<OneBitView> contributions;
      for (size_t r = 0; r < ranks; ++r) {
        contributions.push_back({sent[r].scales.data(), bits[r].data()});
      }
      OnEveryTarget([&] {
        Guarded<float> e = error;
        Output out(rule, n);
        EXPECT_EQ(AggregateOneBit(rule, contributions, inverse_count, e.span(), out.span()),
                  BlockCount(n, rule.block_elements));
        EXPECT_TRUE(SameBytes(out.scales, expected.scales));
        EXPECT_TRUE(SameBytes(out.bits, expected.bits));
        EXPECT_TRUE(SameBytes(e, expected.error));
      });
    });
  }
}

// 2^24 + 1 is 2^24 in fp32. So ranks 1 to 3 vanish beside rank 0, but ranks 4 to 7, added up first,
// do not: plain rank order would give 2^24.
TEST(OneBit, RanksAreAddedInGroupsOfFour) {
  const BlockRule rule = {.block_elements = 8, .gamma = 1};
  const Values scales = {0x1p24f, 1, 1, 1, 1, 1, 1, 1};
  const uint8_t positive = 0;
  std::vector<OneBitView> contributions;
  for (const float& scale : scales) contributions.push_back({&scale, &positive});
  OnEveryTarget([&] {
    Values error(8, 0.0f);
    Output out(rule, 8);
    AggregateOneBit(rule, contributions, /*inverse_count=*/0.125f, absl::MakeSpan(error),
                    out.span());
    // S is so near to u that u - S, and so S + e, are exact.
    EXPECT_EQ(out.scales.span()[0] + error[0], (0x1p24f + 4) / 8);
  });
}

TEST(OneBit, NonFiniteBlocksAreLeftUntouchedAndNoOthers) {
  const BlockRule rule = {.block_elements = 256};
  const size_t n = 5 * 256 + 3;
  Random random;
  const Values clean = random.Values(n), momentum = random.Values(n), error = random.Values(n);
  const model::Compressed packed =
      model::Compress(rule, model::MomentumAndError(kRates, momentum, clean, error));
  for (float poison : {kNan, kInfinity, -kInfinity, 1e30f}) {
    for (size_t at : {0, 255, 256, 700, 1279, 1282}) {
      SCOPED_TRACE(testing::Message() << poison << " at " << at);
      // The last block too, in every case.
      Values gradient = clean;
      gradient[at] = gradient[n - 1] = poison;
      Values scales = packed.scales, left = packed.error;
      std::vector<uint8_t> bits = packed.bits;
      for (const size_t bad : {at / 256, (n - 1) / 256}) {
        const size_t begin = bad * 256, end = std::min(n, begin + 256);
        scales[bad] = kNotPacked;
        std::fill_n(bits.begin() + begin / 8, SignBytes(end - begin), Output::kUntouchedBits);
        std::copy(error.begin() + begin, error.begin() + end, left.begin() + begin);
      }
      OnEveryTarget([&] {
        Guarded<float> e = error;
        Output out(rule, n);
        EXPECT_EQ(CompressMomentum(rule, kRates, gradient, momentum.data(), e.span(), out.span()),
                  at / 256);
        for (size_t block = 0; block < scales.size(); ++block) {
          EXPECT_EQ(IsPacked(out.span(), block), block != at / 256 && block != (n - 1) / 256);
        }
        EXPECT_TRUE(SameBytes(out.scales, scales));
        EXPECT_TRUE(SameBytes(out.bits, bits));
        EXPECT_TRUE(SameBytes(e, left));
      });
    }
  }
}

TEST(OneBit, ScaleAboveItsLimitIsRefused) {
  const BlockRule rule = {.block_elements = 8, .gamma = 1};
  const uint8_t positive = 0;
  const std::vector<float> scales = {kMaxScale, std::nextafter(kMaxScale, kInfinity)};
  OnEveryTarget([&] {
    Values error(8, 0.0f);
    Output out(rule, 8);
    const OneBitView at_limit = {&scales[0], &positive}, above = {&scales[1], &positive};
    EXPECT_EQ(
        AggregateOneBit(rule, {above}, /*inverse_count=*/1, absl::MakeSpan(error), out.span()), 0u);
    EXPECT_TRUE(SameBytes<float>(error, Values(8, 0.0f)));
    EXPECT_EQ(
        AggregateOneBit(rule, {at_limit}, /*inverse_count=*/1, absl::MakeSpan(error), out.span()),
        1u);
    EXPECT_TRUE(SameBytes(out.scales, Values{kMaxScale}));
  });
}

TEST(OneBit, ApplyGivesTheParametersComputedByHand) {
  // x - 0.5 * (m * 2 + 0.25 * x): m = 3, -3; x = 8: 8 - 0.5 * (6 + 2) = 4, 8 - 0.5 * (-6 + 2) = 10.
  // An element without a variance only decays: 8 - 0.5 * 2 = 7.
  const float scale = 3;
  const uint8_t bits = 0b010;
  OnEveryTarget([&] {
    Values parameters = {8, 8, 8};
    ApplyMomentum(BlockRule{.block_elements = 8}, {&scale, &bits},
                  {.learning_rate = 0.5f, .weight_decay = 0.25f}, Values{2, 2, 0},
                  absl::MakeSpan(parameters));
    EXPECT_EQ(parameters, (Values{4, 10, 7}));
  });
}

TEST(OneBit, AppliedMomentumMatchesTheModel) {
  constexpr UpdateRates kRates = {3e-4f, 0.01f, /*most_update=*/0.5f};
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const model::Compressed momentum = RandomCompressed(random, rule, n);
    const Values m = model::Decompress(rule, momentum, n);
    const Values inverse = random.PositiveValues(n), parameters = random.Values(n);
    Values expected(n);
    for (size_t i = 0; i < n; ++i) {
      const float update = std::clamp(m[i] * inverse[i], -kRates.most_update, kRates.most_update);
      expected[i] =
          parameters[i] - kRates.learning_rate * (update + (kRates.weight_decay * parameters[i]));
    }
    const Guarded<float> d = inverse, scales = momentum.scales;
    const Guarded<uint8_t> bits = momentum.bits;
    OnEveryTarget([&] {
      Guarded<float> x = parameters;
      ApplyMomentum(rule, {scales.data(), bits.data()}, kRates, d.span(), x.span());
      EXPECT_TRUE(SameBytes(x, expected));
    });
  });
}

TEST(OneBit, UpdatesAreTheSameWhereTheLargestInverseDenominatorIsKnown) {
  constexpr BlockRule kRule = {.block_elements = 64};
  constexpr size_t kElements = 4 * 64;
  Random random;
  const Values inverse = random.PositiveValues(kElements), before = random.Values(kElements);
  const float largest = *std::max_element(inverse.begin(), inverse.end());
  // The second block's largest update is at the bound, those of the last two are above it.
  const Values scales = {0.5f / largest, 1 / largest, 1.5f / largest, 1e30f};
  const std::vector<uint8_t> bits = random.Bytes(kElements / 8);
  OnEveryTarget([&] {
    Values expected = before, x = before;
    UpdateRates rates = {.learning_rate = 3e-4f, .weight_decay = 0.01f, .most_update = 1};
    ApplyMomentum(kRule, {scales.data(), bits.data()}, rates, inverse, absl::MakeSpan(expected));
    rates.most_inverse_denominator = largest;
    ApplyMomentum(kRule, {scales.data(), bits.data()}, rates, inverse, absl::MakeSpan(x));
    EXPECT_TRUE(SameBytes<float>(x, expected));
    EXPECT_LT(std::abs(x[255] - before[255]), 2 * 3e-4f);
  });
}

TEST(OneBit, AddMatchesTheModelForEitherSignOfTheFactor) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const model::Compressed addend = RandomCompressed(random, rule, n);
    const Values before = random.Values(n);
    const Guarded<uint8_t> bits = addend.bits;
    for (float factor : {1.0f, -1.0f, 0.3f}) {
      Values expected(n);
      for (size_t i = 0; i < n; ++i) {
        const float magnitude = factor * addend.scales[i / rule.block_elements];
        expected[i] = before[i] + model::Sign(magnitude, model::Bit(addend.bits, i));
      }
      OnEveryTarget([&] {
        Guarded<float> accumulator = before;
        AddOneBit(rule, {addend.scales.data(), bits.data()}, factor, accumulator.span());
        EXPECT_TRUE(SameBytes(accumulator, expected));
      });
    }
  });
}

TEST(OneBit, AddTakesAContributionBack) {
  const BlockRule rule = {.block_elements = 256};
  const size_t n = 10007;
  Random random;
  const Values gradient = random.Values(n), momentum = random.Values(n), error = random.Values(n);
  const Values u = model::MomentumAndError(kRates, momentum, gradient, error);
  OnEveryTarget([&] {
    Values e = error;
    Output out(rule, n);
    CompressMomentum(rule, kRates, gradient, momentum.data(), absl::MakeSpan(e), out.span());
    AddOneBit(rule, out.span(), /*factor=*/1, absl::MakeSpan(e));
    for (size_t i = 0; i < n; ++i) {
      // e = u - s and e + s are each off by at most half a unit in the last place of their result,
      // and neither result exceeds |u| + S: 2 * 2^-24 * (|u| + S).
      const float bound = 0x1p-23f * (std::abs(u[i]) + out.scales.span()[i / 256]);
      ASSERT_NEAR(e[i], u[i], bound) << i;
    }
  });
}

}  // namespace
}  // namespace signpost::kernels
