// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/quantized_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formulas.h"
#include "kernels/quantized.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

using Values = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr IntegerType kTypes[] = {IntegerType::kInt8, IntegerType::kInt4};

// One span: where it is, and what the CPU kernels make of it.
struct Span {
  Span(const BlockRule& rule, IntegerType type, size_t n, Random& random)
      : n(n),
        blocks(BlockCount(n, rule.block_elements)),
        gradient(random.Values(n)),
        error(random.Values(n)),
        scales(Values(blocks, 12345)),
        codes(Bytes(CodeBytes(type, n), 0x5a)) {}

  QuantizedSpan out() { return {scales.data(), codes.data()}; }

  void ExpectSame(const Span& expected) const {
    SCOPED_TRACE(testing::Message() << n << " elements");
    EXPECT_TRUE(SameBytes(scales, expected.scales));
    EXPECT_TRUE(SameBytes(codes, expected.codes));
    EXPECT_TRUE(SameBytes(error, expected.error));
  }

  size_t n;
  size_t blocks;
  Guarded<float> gradient, error, scales;
  Guarded<uint8_t> codes;
};

QuantizeSegment SegmentOf(Span& span, IntegerType type, uint32_t first_block) {
  return {.gradient = span.gradient.data(),
          .error = span.error.data(),
          .out = span.out(),
          .type = type,
          .elements = static_cast<uint32_t>(span.n),
          .first_block = first_block};
}

size_t CompressOnCpu(const BlockRule& rule, IntegerType type, Span& span) {
  return kernels::CompressQuantized(rule, type, span.gradient.span(), span.error.span(),
                                    span.out());
}

// body(type, rule, is_aligned)
template <class Body>
void ForEachRule(Body body) {
  for (const IntegerType type : kTypes) {
    for (const size_t block : {8, 16, 40, 256, 4096, 10000, 65536}) {
      for (const bool is_aligned : {false, true}) {
        SCOPED_TRACE(testing::Message() << BitsOf(type) << " bits, blocks of " << block
                                        << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        body(type, BlockRule{block});
      }
    }
  }
}

// Spans of every length in one launch.
TEST(QuantizedCuda, CompressesAsTheCpuDoes) {
  Random random;
  ForEachRule([&](IntegerType type, BlockRule rule) {
    for (const float poison : {1.0f, kNan}) {
      SCOPED_TRACE(poison);
      std::list<Span> spans;
      for (const size_t n : LengthsInBlocks(rule.block_elements)) {
        spans.emplace_back(rule, type, n, random);
        if (n > 300) spans.back().gradient.data()[n - 300] = poison;
      }
      std::list<Span> expected = spans;
      std::vector<QuantizeSegment> segments;
      uint32_t blocks = 0, expected_first = kAllPacked;
      auto span = spans.begin();
      for (Span& other : expected) {
        segments.push_back(SegmentOf(*span++, type, blocks));
        const size_t packed = CompressOnCpu(rule, type, other);
        if (packed < other.blocks) {
          expected_first = std::min<uint32_t>(expected_first, blocks + packed);
        }
        blocks += other.blocks;
      }
      const uint32_t first = RunCompressQuantized(rule, segments);
      EXPECT_EQ(first, expected_first);
      EXPECT_EQ(first == kAllPacked, poison == 1);
      for (auto got = spans.begin(), e = expected.begin(); got != spans.end(); ++got, ++e) {
        got->ExpectSame(*e);
      }
    }
  });
}

TEST(QuantizedCuda, BlocksThatAreNotFiniteAreLeftUntouched) {
  Random random;
  for (const IntegerType type : kTypes) {
    for (const float poison : {kInfinity, -kInfinity, -kNan, 1e30f}) {
      for (const size_t at : {0, 63, 64, 129}) {
        SCOPED_TRACE(testing::Message() << poison << " at " << at);
        const BlockRule rule = {64};
        Span span(rule, type, 130, random);
        span.gradient.data()[at] = poison;
        Span expected = span;
        EXPECT_EQ(RunCompressQuantized(rule, {SegmentOf(span, type, 0)}), at / 64);
        CompressOnCpu(rule, type, expected);
        span.ExpectSame(expected);
      }
    }
  }
}

TEST(QuantizedCuda, WhatIsTooSmallToScaleStaysInTheError) {
  Random random;
  for (const IntegerType type : kTypes) {
    const BlockRule rule = {8};
    Span span(rule, type, 20, random);
    for (size_t i = 0; i < 20; ++i) {
      span.gradient.data()[i] = i == 12 ? 0x1p-100f : i % 2 == 0 ? -0x1p-149f : -0.0f;
      span.error.data()[i] = -0.0f;
    }
    Span expected = span;
    CompressOnCpu(rule, type, expected);
    RunCompressQuantized(rule, {SegmentOf(span, type, 0)});
    span.ExpectSame(expected);
    EXPECT_EQ(span.scales.span()[0], 0);
    EXPECT_GT(span.scales.span()[1], 0);
  }
}

TEST(QuantizedCuda, GradientsOfTwoBytesAreWidenedExactly) {
  Random random;
  ForEachRule([&](IntegerType type, BlockRule rule) {
    for (const GradientType gradient_type : {GradientType::kBfloat16, GradientType::kFloat16}) {
      for (const size_t n : {1, 7, 8, 9, 4097}) {
        Span span(rule, type, n, random);
        Guarded<uint16_t> narrow(n);
        const Bytes bytes = random.Bytes(2 * n);
        for (size_t i = 0; i < n; ++i) {
          // Neither NaN nor infinite, nor too large to be packed.
          const uint16_t half = (bytes[2 * i] | bytes[2 * i + 1] << 8) & 0xbfff;
          narrow.data()[i] = half;
          span.gradient.data()[i] = gradient_type == GradientType::kBfloat16
                                        ? formulas::WidenBfloat16(half)
                                        : formulas::WidenFloat16(half);
        }
        Span expected = span;
        QuantizeSegment segment = SegmentOf(span, type, 0);
        segment.gradient = narrow.data();
        segment.gradient_type = gradient_type;
        EXPECT_EQ(RunCompressQuantized(rule, {segment}), kAllPacked);
        CompressOnCpu(rule, type, expected);
        span.ExpectSame(expected);
      }
    }
  });
}

TEST(QuantizedCuda, NoGradientIsOneOfZeros) {
  Random random;
  for (const IntegerType type : kTypes) {
    Span span({64}, type, 100, random);
    std::fill_n(span.gradient.data(), 100, 0.0f);
    Span expected = span;
    QuantizeSegment segment = SegmentOf(span, type, 0);
    segment.gradient = nullptr;
    RunCompressQuantized({64}, {segment});
    CompressOnCpu({64}, type, expected);
    span.ExpectSame(expected);
  }
}

// Of any codes.
TEST(QuantizedCuda, DecompressesAndAddsAsTheCpuDoes) {
  constexpr float kFactor = -0.9f;
  Random random;
  ForEachRule([&](IntegerType type, BlockRule rule) {
    for (const size_t n : LengthsInBlocks(rule.block_elements)) {
      SCOPED_TRACE(testing::Message() << n << " elements");
      const Guarded<float> scales = random.PositiveValues(BlockCount(n, rule.block_elements));
      const Guarded<uint8_t> codes = random.Bytes(CodeBytes(type, n));
      const QuantizedView view = {scales.data(), codes.data()};
      Guarded<float> sum = random.Values(n), values = random.Values(n);
      Guarded<float> expected_sum = sum, expected_values = values;
      kernels::AddQuantized(rule, type, view, kFactor, expected_sum.span());
      kernels::DecompressQuantized(rule, type, view, expected_values.span());
      const auto elements = static_cast<uint32_t>(n);
      RunAddQuantized(rule, {{view, type, kFactor, sum.data(), elements}});
      RunDecompressQuantized(rule, {{view, type, values.data(), elements}});
      EXPECT_TRUE(SameBytes(sum, expected_sum));
      EXPECT_TRUE(SameBytes(values, expected_values));
    }
  });
}

TEST(QuantizedCuda, WhatIsNotPackedAddsNothing) {
  const Values scales = {1, kNotPacked, 2};
  for (const IntegerType type : kTypes) {
    const Bytes codes(CodeBytes(type, 24), 0x11);
    const float code = type == IntegerType::kInt8 ? 17 : 1;
    Values sum(24, 0.5f);
    RunAddQuantized({8}, {{{scales.data(), codes.data()}, type, 1, sum.data(), 24}});
    for (size_t i = 0; i < 24; ++i) {
      EXPECT_EQ(sum[i], i < 8 ? 0.5f + code : i < 16 ? 0.5f : 0.5f + 2 * code);
    }
  }
}

}  // namespace
}  // namespace signpost::kernels::cuda
