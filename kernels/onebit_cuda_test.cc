// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/onebit_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formulas.h"
#include "kernels/onebit.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

using Values = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MomentumRates kRates = {/*beta1=*/0.9f, /*one_minus_beta1=*/0.1f};

uint16_t Narrow(GradientType type, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (type == GradientType::kBfloat16) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>(bits >> 11);  // any half will do
}

float Widen(GradientType type, uint16_t half) {
  return type == GradientType::kBfloat16 ? formulas::WidenBfloat16(half)
                                         : formulas::WidenFloat16(half);
}

// One span: where it is, and what the CPU kernels make of it.
struct Span {
  Span(const BlockRule& rule, size_t n, Random& random)
      : n(n),
        blocks(BlockCount(n, rule.block_elements)),
        gradient(random.Values(n)),
        dense_momentum(random.Values(n)),
        error(random.Values(n)),
        momentum_scales(random.PositiveValues(blocks)),
        momentum_bits(random.Bytes(SignBytes(n))),
        scales(Values(blocks, 12345)),
        bits(Bytes(SignBytes(n), 0x5a)) {}

  OneBitView momentum() const { return {momentum_scales.data(), momentum_bits.data()}; }

  size_t n;
  size_t blocks;
  Guarded<float> gradient, dense_momentum, error, momentum_scales;
  Guarded<uint8_t> momentum_bits;
  Guarded<float> scales;
  Guarded<uint8_t> bits;
};

enum class Momentum { kNone, kDense, kOneBit };

CompressSegment SegmentOf(Span& span, Momentum momentum, uint32_t first_block) {
  CompressSegment segment = {.gradient = span.gradient.data(),
                             .error = span.error.data(),
                             .out = {span.scales.data(), span.bits.data()},
                             .rates = kRates,
                             .elements = static_cast<uint32_t>(span.n),
                             .first_block = first_block};
  if (momentum == Momentum::kDense) segment.dense_momentum = span.dense_momentum.data();
  if (momentum == Momentum::kOneBit) segment.momentum = span.momentum();
  return segment;
}

size_t CompressOnCpu(const BlockRule& rule, Momentum momentum, Span& span) {
  const OneBitSpan out = {span.scales.data(), span.bits.data()};
  switch (momentum) {
    case Momentum::kNone:
      return kernels::CompressOneBit(rule, span.gradient.span(), span.error.span(), out);
    case Momentum::kDense:
      return CompressMomentum(rule, kRates, span.gradient.span(), span.dense_momentum.data(),
                              span.error.span(), out);
    case Momentum::kOneBit:
      return CompressMomentum(rule, kRates, span.gradient.span(), span.momentum(),
                              span.error.span(), out);
  }
  return 0;
}

// Spans of every length, of which some have an input that is not finite.
std::list<Span> MakeSpans(const BlockRule& rule, Random& random) {
  std::list<Span> spans;
  for (const size_t n : LengthsInBlocks(rule.block_elements)) spans.emplace_back(rule, n, random);
  return spans;
}

void ExpectSame(const std::list<Span>& got, const std::list<Span>& expected) {
  for (auto g = got.begin(), e = expected.begin(); g != got.end(); ++g, ++e) {
    SCOPED_TRACE(testing::Message() << g->n << " elements");
    EXPECT_TRUE(SameBytes(g->scales, e->scales));
    EXPECT_TRUE(SameBytes(g->bits, e->bits));
    EXPECT_TRUE(SameBytes(g->error, e->error));
  }
}

TEST(OneBitCuda, CompressesAsTheCpuDoes) {
  Random random;
  for (const size_t block : kBlocks) {
    const BlockRule rule = {block};
    for (const Momentum momentum : {Momentum::kNone, Momentum::kDense, Momentum::kOneBit}) {
      for (const auto& [is_spoilt, is_aligned] :
           {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
        SCOPED_TRACE(testing::Message()
                     << "blocks of " << block << ", momentum " << static_cast<int>(momentum)
                     << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        std::list<Span> spans = MakeSpans(rule, random);
        for (Span& span : spans) {
          if (is_spoilt && span.n > 300) span.gradient.data()[span.n - 300] = kNan;
        }
        std::list<Span> expected = spans;
        std::vector<CompressSegment> segments;
        uint32_t blocks = 0, expected_first = kAllPacked;
        auto span = spans.begin();
        for (Span& other : expected) {
          segments.push_back(SegmentOf(*span++, momentum, blocks));
          const size_t packed = CompressOnCpu(rule, momentum, other);
          if (packed < other.blocks) {
            expected_first = std::min<uint32_t>(expected_first, blocks + packed);
          }
          blocks += other.blocks;
        }
        const uint32_t first = RunCompressOneBit(rule, segments);
        EXPECT_EQ(first, expected_first);
        EXPECT_EQ(first != kAllPacked, is_spoilt);
        ExpectSame(spans, expected);
      }
    }
  }
}

TEST(OneBitCuda, GradientsOfTwoBytesAreWidenedExactly) {
  const BlockRule rule = {256};
  Random random;
  for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
    for (const size_t n : kLengths) {
      if (n == 0) continue;
      SCOPED_TRACE(testing::Message() << n << " elements of type " << static_cast<int>(type));
      const AlignedMemory memory(n % 2 == 0);
      Span span(rule, n, random);
      Guarded<uint16_t> narrow(n);
      for (size_t i = 0; i < n; ++i) {
        narrow.data()[i] = Narrow(type, span.gradient.data()[i]);
        span.gradient.data()[i] = Widen(type, narrow.data()[i]);
      }
      Span expected = span;
      CompressSegment segment = SegmentOf(span, Momentum::kOneBit, 0);
      segment.gradient = narrow.data();
      segment.type = type;
      RunCompressOneBit(rule, {segment});
      CompressOnCpu(rule, Momentum::kOneBit, expected);
      EXPECT_TRUE(SameBytes(span.scales, expected.scales));
      EXPECT_TRUE(SameBytes(span.bits, expected.bits));
      EXPECT_TRUE(SameBytes(span.error, expected.error));
    }
  }
}

// An array that cannot be read 16 bytes at a time.
enum class Misaligned { kNone, kGradient, kError, kDenseMomentum };

// One span of blocks that are whole tiles, and one that is not.
void ComparesWholeTiles(const BlockRule& rule, GradientType type, bool has_gradient,
                        Momentum momentum, Misaligned misaligned, Random& random) {
  constexpr size_t kElements = 2 * 8192 + 4096 + 12;
  Values gradient = has_gradient ? random.Values(kElements) : Values(kElements);
  std::vector<uint16_t> halves(kElements);
  for (size_t i = 0; i < kElements && type != GradientType::kFloat32; ++i) {
    halves[i] = type == GradientType::kBfloat16 ? formulas::RoundToBfloat16(gradient[i])
                                                : formulas::RoundToFloat16(gradient[i]);
    gradient[i] = Widen(type, halves[i]);
  }
  std::optional<AlignedMemory> aligned(true);
  Span span(rule, kElements, random);
  span.gradient = gradient;
  Guarded<uint16_t> narrow(halves);
  aligned.reset();
  if (misaligned == Misaligned::kGradient) {
    span.gradient = gradient;
    narrow = halves;
  } else if (misaligned == Misaligned::kError) {
    span.error = random.Values(kElements);
  } else if (misaligned == Misaligned::kDenseMomentum) {
    span.dense_momentum = random.Values(kElements);
  }

  Span expected = span;
  CompressSegment segment = SegmentOf(span, momentum, 0);
  segment.type = type;
  if (type != GradientType::kFloat32) segment.gradient = narrow.data();
  if (!has_gradient) segment.gradient = nullptr;
  EXPECT_EQ(RunCompressOneBit(rule, {segment}), kAllPacked);
  EXPECT_EQ(CompressOnCpu(rule, momentum, expected), expected.blocks);
  ExpectSame({span}, {expected});
}

TEST(OneBitCuda, WholeTilesAreCompressedAsTheCpuDoes) {
  Random random;
  for (const size_t block : {4096, 8192}) {
    for (const Momentum momentum : {Momentum::kNone, Momentum::kDense, Momentum::kOneBit}) {
      for (const Misaligned misaligned : {Misaligned::kNone, Misaligned::kGradient,
                                          Misaligned::kError, Misaligned::kDenseMomentum}) {
        SCOPED_TRACE(testing::Message()
                     << "blocks of " << block << ", momentum " << static_cast<int>(momentum)
                     << ", misaligned array " << static_cast<int>(misaligned));
        for (const GradientType type :
             {GradientType::kFloat32, GradientType::kBfloat16, GradientType::kFloat16}) {
          SCOPED_TRACE(static_cast<int>(type));
          ComparesWholeTiles({block}, type, /*has_gradient=*/true, momentum, misaligned, random);
        }
        ComparesWholeTiles({block}, GradientType::kFloat32, /*has_gradient=*/false, momentum,
                           misaligned, random);
      }
    }
  }
}

TEST(OneBitCuda, AppliesAndAddsAsTheCpuDoes) {
  constexpr UpdateRates kRates = {3e-4f, 0.01f, /*most_update=*/0.5f};
  constexpr float kFactor = -0.9f;
  Random random;
  for (const size_t block : kBlocks) {
    const BlockRule rule = {block};
    for (const size_t n : LengthsInBlocks(block)) {
      SCOPED_TRACE(testing::Message() << n << " elements in blocks of " << block);
      const AlignedMemory memory((n + block) % 3 == 0);
      const Span span(rule, n, random);
      const Guarded<float> inverse = random.PositiveValues(n);
      Guarded<float> x = random.Values(n), sum = random.Values(n);
      Guarded<float> expected_x = x, expected_sum = sum, values = sum, expected_values = sum;
      kernels::ApplyMomentum(rule, span.momentum(), kRates, inverse.span(), expected_x.span());
      kernels::AddOneBit(rule, span.momentum(), kFactor, expected_sum.span());
      kernels::DecompressOneBit(rule, span.momentum(), expected_values.span());
      const auto elements = static_cast<uint32_t>(n);
      RunApplyMomentum(rule, {{span.momentum(), inverse.data(), x.data(), kRates, elements}});
      RunAddOneBit(rule, {{span.momentum(), kFactor, sum.data(), elements}});
      RunDecompressOneBit(rule, {{span.momentum(), values.data(), elements}});
      EXPECT_TRUE(SameBytes(x, expected_x));
      EXPECT_TRUE(SameBytes(values, expected_values));
      EXPECT_TRUE(SameBytes(sum, expected_sum));
    }
  }
}

TEST(OneBitCuda, NoGradientIsOneOfZeros) {
  const BlockRule rule = {64};
  const Values zeros(100, 0.0f), momentum(100, -0.5f);
  Values errors[2] = {Values(100, 0.25f), Values(100, 0.25f)};
  Values scales[2] = {Values(2), Values(2)};
  Bytes bits[2] = {Bytes(13), Bytes(13)};
  for (const bool is_null : {false, true}) {
    RunCompressOneBit(rule, {{.gradient = is_null ? nullptr : zeros.data(),
                              .dense_momentum = momentum.data(),
                              .error = errors[is_null].data(),
                              .out = {scales[is_null].data(), bits[is_null].data()},
                              .elements = 100}});
  }
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(scales[1], scales[0]);
  EXPECT_EQ(bits[1], bits[0]);
}

TEST(OneBitCuda, DecompressedZerosHaveTheirSigns) {
  const Values scales = {0};
  const Bytes bits = {0b10};
  Values values(2, 1.0f);
  RunDecompressOneBit({8}, {{{scales.data(), bits.data()}, values.data(), 2}});
  EXPECT_EQ(values, Values(2, 0.0f));
  EXPECT_FALSE(std::signbit(values[0]));
  EXPECT_TRUE(std::signbit(values[1]));
}

TEST(OneBitCuda, WhatIsNotPackedAddsNothing) {
  const BlockRule rule = {8};
  const Values scales = {1, kNotPacked, 2};
  const Bytes bits = {0, 0, 0};
  Values sum(24, 0.5f);
  RunAddOneBit(rule, {{{scales.data(), bits.data()}, 1, sum.data(), 24}});
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(sum[i], i < 8 ? 1.5f : i < 16 ? 0.5f : 2.5f);
}

}  // namespace
}  // namespace signpost::kernels::cuda
