// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/dense_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/dense.h"
#include "kernels/formulas.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

using Values = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr DenseType kTypes[] = {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16};

// body(type, rule)
template <class Body>
void ForEachRule(Body body) {
  for (const DenseType type : kTypes) {
    for (const size_t block : kBlocks) {
      for (const bool is_aligned : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "blocks of " << block << ", type " << static_cast<int>(type)
                     << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        body(type, BlockRule{block});
      }
    }
  }
}

// body(type, rule, n)
template <class Body>
void ForEachCase(Body body) {
  ForEachRule([&](DenseType type, BlockRule rule) {
    for (const size_t n : LengthsInBlocks(rule.block_elements)) {
      SCOPED_TRACE(testing::Message() << n << " elements");
      body(type, rule, n);
    }
  });
}

// Memory for a payload: at multiples of 16, or only of what a number takes.
class Payload {
 public:
  explicit Payload(size_t bytes) : bytes_(bytes), floats_(Values(bytes / 4 + 1)) {
    std::fill_n(data(), bytes, 0x5a);
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(floats_.data()); }
  Bytes bytes() { return {data(), data() + bytes_}; }

 private:
  size_t bytes_;
  Guarded<float> floats_;
};

// One span: what is compressed, where to, and the error if it has one.
struct Span {
  Span(DenseType type, size_t n, bool has_error, Random& random)
      : n(n),
        gradient(random.Values(n)),
        error(has_error ? random.Values(n) : Values()),
        out(DenseBytes(type, n)) {}

  size_t n;
  Guarded<float> gradient, error;
  Payload out;
};

// Spans of every length in one launch, the longer ones with that number.
void ComparesSpans(DenseType type, const BlockRule& rule, bool has_error, float poison,
                   Random& random) {
  std::list<Span> spans;
  for (const size_t n : LengthsInBlocks(rule.block_elements)) {
    Span& span = spans.emplace_back(type, n, has_error, random);
    if (n > 300) span.gradient.data()[n - 300] = poison;
  }
  std::list<Span> expected = spans;
  std::vector<DenseSegment> segments;
  uint32_t blocks = 0, expected_first = kAllPacked;
  auto span = spans.begin();
  for (Span& other : expected) {
    segments.push_back({.gradient = span->gradient.data(),
                        .type = type,
                        .error = has_error ? span->error.data() : nullptr,
                        .out = span->out.data(),
                        .elements = static_cast<uint32_t>(span->n),
                        .first_block = blocks});
    ++span;
    const size_t blocks_of_span = BlockCount(other.n, rule.block_elements);
    const size_t packed = kernels::CompressDense(rule, type, other.gradient.span(),
                                                 other.error.span(), other.out.data());
    if (packed < blocks_of_span) {
      expected_first = std::min<uint32_t>(expected_first, blocks + packed);
    }
    blocks += blocks_of_span;
  }
  const uint32_t first = RunCompressDense(rule, segments);
  EXPECT_EQ(first, expected_first);
  EXPECT_EQ(first == kAllPacked, poison == 1e18f);
  for (auto got = spans.begin(), e = expected.begin(); got != spans.end(); ++got, ++e) {
    SCOPED_TRACE(testing::Message() << got->n << " elements");
    EXPECT_TRUE(SameBytes<uint8_t>(got->out.bytes(), e->out.bytes()));
    EXPECT_TRUE(SameBytes(got->error, e->error));
  }
}

TEST(DenseCuda, CompressesAsTheCpuDoes) {
  Random random;
  ForEachRule([&](DenseType type, BlockRule rule) {
    for (const float poison : {1e18f, std::numeric_limits<float>::quiet_NaN(), 0x1.01p60f}) {
      ComparesSpans(type, rule, /*has_error=*/true, poison, random);
      if (type == DenseType::kFloat32)
        ComparesSpans(type, rule, /*has_error=*/false, poison, random);
    }
  });
}

// An array that cannot be read, or written, as many bytes at a time as others.
enum class Misaligned { kNone, kGradient, kError, kOut };

// Blocks that are whole tiles, and one that is not.
void ComparesWholeTiles(const BlockRule& rule, GradientType gradient_type, bool has_gradient,
                        DenseType type, bool has_error, Misaligned misaligned, Random& random) {
  constexpr size_t kElements = 2 * 8192 + 4096 + 12;
  Values gradient = has_gradient ? random.Values(kElements) : Values(kElements);
  std::vector<uint16_t> halves(kElements);
  for (size_t i = 0; i < kElements; ++i) {
    if (gradient_type == GradientType::kBfloat16) {
      halves[i] = formulas::RoundToBfloat16(gradient[i]);
      gradient[i] = formulas::WidenBfloat16(halves[i]);
    } else if (gradient_type == GradientType::kFloat16) {
      halves[i] = formulas::RoundToFloat16(gradient[i]);
      gradient[i] = formulas::WidenFloat16(halves[i]);
    }
  }
  std::optional<AlignedMemory> aligned(true);
  Guarded<float> wide(gradient), error = random.Values(kElements);
  Guarded<uint16_t> narrow(halves);
  Payload out(DenseBytes(type, kElements)), expected(DenseBytes(type, kElements));
  aligned.reset();
  if (misaligned == Misaligned::kGradient) {
    wide = gradient;
    narrow = halves;
  } else if (misaligned == Misaligned::kError) {
    error = random.Values(kElements);
  } else if (misaligned == Misaligned::kOut) {
    out = Payload(DenseBytes(type, kElements));
  }

  Guarded<float> expected_error = error;
  const size_t packed = kernels::CompressDense(
      rule, type, gradient, has_error ? expected_error.span() : absl::Span<float>(),
      expected.data());
  EXPECT_EQ(packed, BlockCount(kElements, rule.block_elements));
  const void* const given = gradient_type == GradientType::kFloat32
                                ? static_cast<const void*>(wide.data())
                                : narrow.data();
  EXPECT_EQ(RunCompressDense(rule, {{.gradient = has_gradient ? given : nullptr,
                                     .gradient_type = gradient_type,
                                     .type = type,
                                     .error = has_error ? error.data() : nullptr,
                                     .out = out.data(),
                                     .elements = static_cast<uint32_t>(kElements)}}),
            kAllPacked);
  EXPECT_TRUE(SameBytes<uint8_t>(out.bytes(), expected.bytes()));
  EXPECT_TRUE(SameBytes(error, expected_error));
}

TEST(DenseCuda, WholeTilesAreCompressedAsTheCpuDoes) {
  Random random;
  for (const size_t block : {4096, 8192}) {
    for (const DenseType type : kTypes) {
      for (const Misaligned misaligned :
           {Misaligned::kNone, Misaligned::kGradient, Misaligned::kError, Misaligned::kOut}) {
        SCOPED_TRACE(testing::Message()
                     << "blocks of " << block << ", type " << static_cast<int>(type)
                     << ", misaligned array " << static_cast<int>(misaligned));
        const bool has_error = type != DenseType::kFloat32 || misaligned == Misaligned::kError;
        for (const GradientType gradient :
             {GradientType::kFloat32, GradientType::kBfloat16, GradientType::kFloat16}) {
          SCOPED_TRACE(static_cast<int>(gradient));
          ComparesWholeTiles({block}, gradient, /*has_gradient=*/true, type, has_error, misaligned,
                             random);
        }
        ComparesWholeTiles({block}, GradientType::kFloat32, /*has_gradient=*/false, type, has_error,
                           misaligned, random);
      }
    }
  }
}

TEST(DenseCuda, DecompressesAddsAndScalesAsTheCpuDoes) {
  constexpr float kFactor = -0.3f;
  Random random;
  ForEachCase([&](DenseType type, BlockRule rule, size_t n) {
    Payload addend(DenseBytes(type, n));
    Values no_error(n);
    kernels::CompressDense(rule, type, random.Values(n), absl::MakeSpan(no_error), addend.data());
    Guarded<float> sum = random.Values(n), values = random.Values(n);
    Guarded<float> expected_sum = sum, expected_values = values, sent(n), expected_sent(n);
    kernels::DecompressDense(type, addend.data(), expected_sent.span());
    kernels::AddDense(type, addend.data(), kFactor, expected_sum.span());
    kernels::Scale(kFactor, expected_values.span());
    const auto elements = static_cast<uint32_t>(n);
    RunDecompressDense(rule, {{addend.data(), type, sent.data(), elements}});
    RunAddDense(rule, {{addend.data(), type, kFactor, sum.data(), elements}});
    RunScale(rule, {{kFactor, values.data(), elements}});
    EXPECT_TRUE(SameBytes(sent, expected_sent));
    EXPECT_TRUE(SameBytes(sum, expected_sum));
    EXPECT_TRUE(SameBytes(values, expected_values));
  });
}

TEST(DenseCuda, DecompressesNothingToZeros) {
  Random random;
  ForEachCase([&](DenseType type, BlockRule rule, size_t n) {
    Guarded<float> values = random.Values(n), zeros(n);
    std::fill_n(zeros.data(), n, 0.0f);
    RunDecompressDense(rule, {{nullptr, type, values.data(), static_cast<uint32_t>(n)}});
    EXPECT_TRUE(SameBytes(values, zeros));
  });
}

TEST(DenseCuda, AggregatesAsTheCpuDoes) {
  constexpr size_t kFirst = 5;
  Random random;
  for (const size_t ranks : {1, 2, 4, 5, 9}) {
    ForEachCase([&](DenseType type, BlockRule rule, size_t n) {
      if (type != DenseType::kFloat32) return;
      std::vector<Guarded<float>> contributions;
      for (size_t rank = 0; rank < ranks; ++rank) {
        contributions.push_back(random.Values(kFirst + n));
        contributions[rank].data()[kFirst + n / 2] = -0.0f;
      }
      std::vector<const uint8_t*> bytes;
      Guarded<const float*> arrays(ranks);
      for (size_t rank = 0; rank < ranks; ++rank) {
        arrays.data()[rank] = contributions[rank].data();
        bytes.push_back(reinterpret_cast<const uint8_t*>(contributions[rank].data() + kFirst));
      }
      const float inverse_count = 1.0f / static_cast<float>(ranks);
      Guarded<float> mean(n), expected(n);
      kernels::AggregateDense(type, bytes, n, inverse_count, /*error=*/{},
                              reinterpret_cast<uint8_t*>(expected.data()));
      RunAggregateDense(rule, {{.contributions = arrays.data(),
                                .ranks = static_cast<uint32_t>(ranks),
                                .inverse_count = inverse_count,
                                .first = kFirst,
                                .out = mean.data(),
                                .elements = static_cast<uint32_t>(n)}});
      EXPECT_TRUE(SameBytes(mean, expected)) << ranks << " ranks";
    });
  }
}

TEST(DenseCuda, WhatIsNotPackedAddsNothing) {
  const BlockRule rule = {8};
  for (const DenseType type : kTypes) {
    Values gradient(24, 1), error(24), sum(24, 0.5f);
    gradient[9] = std::numeric_limits<float>::infinity();
    Payload addend(DenseBytes(type, 24));
    kernels::CompressDense(rule, type, gradient, absl::MakeSpan(error), addend.data());
    RunAddDense(rule, {{addend.data(), type, 1, sum.data(), 24}});
    for (size_t i = 0; i < 24; ++i) EXPECT_EQ(sum[i], i / 8 == 1 ? 0.5f : 1.5f);
  }
}

}  // namespace
}  // namespace signpost::kernels::cuda
