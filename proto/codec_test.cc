#include "proto/codec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "proto/custom_codec.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/payload.h"

namespace signpost {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint32_t kBlockElements = 16;
constexpr kernels::BlockRule kRule = {.block_elements = kBlockElements, .gamma = 1.35f};

// Tensors that end within a byte, at a block's end and behind it, of one element, in two chunks.
Layout TestLayout() {
  std::vector<Tensor> tensors;
  for (const uint64_t elements : {37, 16, 1, 50, 3}) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(std::string(1, static_cast<char>('a' + tensors.size())));
    tensor.add_shape(elements);
  }
  JobOptions options;
  options.set_block_elements(kBlockElements);
  options.set_chunk_elements(64);
  options.set_gamma(kRule.gamma);
  const std::string topk = LoadCodecLibrary("client/examples/libtopk.so").value();
  const OpenCustomCodec custom = OpenCodec(topk, "ratio=0.25", kBlockElements).value();
  *options.mutable_custom_codec() = custom.description;
  Layout layout = *Layout::Create(tensors, options);
  layout.set_custom_codec(custom.codec);
  return layout;
}

const Layout& TheLayout() {
  static const auto* const layout = new Layout(TestLayout());
  return *layout;
}

std::vector<float> SeededFloats(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> floats(size);
  for (float& value : floats) value = normal(random) * std::exp2(normal(random));
  return floats;
}

// A chunk of numbers, its error and its payload.
struct Packed {
  std::vector<float> values;
  std::vector<float> error;
  Payload payload;
};

// What holds for every codec that has numbers, in each chunk of the layout.
class CodecTest : public testing::TestWithParam<Codec> {
 protected:
  const NumberCodec& codec() const { return NumberCodecOf(GetParam(), TheLayout()); }

  template <class Use>
  void ForEachChunk(Use use) const {
    for (uint32_t chunk = 0; chunk < TheLayout().chunks().size(); ++chunk) use(chunk);
  }

  absl::Span<float> Part(std::vector<float>& of, const Segment& segment) const {
    return absl::MakeSpan(of).subspan(segment.chunk_offset, segment.elements);
  }

  Packed Compress(uint32_t chunk_index, std::vector<float> values) const {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    Packed packed = {.values = std::move(values),
                     .error = std::vector<float>(chunk.elements),
                     .payload = Payload(TheLayout().PayloadBytes(GetParam(), chunk_index))};
    for (const Segment& segment : chunk.segments) {
      EXPECT_EQ(codec().Compress(kRule, chunk, segment, Part(packed.values, segment),
                                 Part(packed.error, segment), packed.payload.data()),
                kernels::BlockCount(segment.elements, kBlockElements));
    }
    return packed;
  }

  Packed CompressSeeded(uint32_t chunk, uint32_t seed) const {
    return Compress(chunk, SeededFloats(TheLayout().chunks()[chunk].elements, seed));
  }

  std::vector<float> Decompress(uint32_t chunk_index, const Payload& payload) const {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    std::vector<float> values(chunk.elements, std::numeric_limits<float>::quiet_NaN());
    for (const Segment& segment : chunk.segments) {
      codec().Decompress(kRule, chunk, segment, payload.data(), Part(values, segment));
    }
    return values;
  }

  // As another worker or an aggregator judges it.
  absl::Status Check(uint32_t chunk, const Payload& payload) const {
    FrameHeader header;
    header.set_codec(GetParam());
    header.set_chunk(chunk);
    header.set_payload_crc32c(Crc32c(payload.span()));
    return CheckFrame(header, payload.span(), /*world_size=*/1, TheLayout());
  }
};

TEST_P(CodecTest, AFrameOfWhatItPacksIsGood) {
  ForEachChunk([&](uint32_t chunk) {
    EXPECT_EQ(Check(chunk, CompressSeeded(chunk, 1).payload), absl::OkStatus());
  });
}

TEST_P(CodecTest, WritesEveryByteOfAPayload) {
  ForEachChunk([&](uint32_t chunk_index) {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    Packed packed = CompressSeeded(chunk_index, 2);
    Payload other(packed.payload.size());
    std::fill_n(other.data(), other.size(), uint8_t{0xa5});
    std::vector<float> error(chunk.elements);
    for (const Segment& segment : chunk.segments) {
      codec().Compress(kRule, chunk, segment, Part(packed.values, segment), Part(error, segment),
                       other.data());
    }
    EXPECT_EQ(other.span(), packed.payload.span());
  });
}

TEST_P(CodecTest, WhatItLosesIsInTheError) {
  ForEachChunk([&](uint32_t chunk) {
    const Packed packed = CompressSeeded(chunk, 3);
    const std::vector<float> sent = Decompress(chunk, packed.payload);
    for (size_t i = 0; i < sent.size(); ++i) {
      ASSERT_EQ(packed.error[i], packed.values[i] - sent[i]) << "element " << i;
    }
    if (Loses(GetParam())) return;
    EXPECT_THAT(packed.error, Each(0));
  });
}

TEST_P(CodecTest, AddsTheErrorBeforeItPacks) {
  ForEachChunk([&](uint32_t chunk_index) {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    Packed packed = CompressSeeded(chunk_index, 4);
    std::vector<float> halves = packed.values, error;
    for (float& value : halves) value /= 2;
    error = halves;
    Payload payload(packed.payload.size());
    for (const Segment& segment : chunk.segments) {
      codec().Compress(kRule, chunk, segment, Part(halves, segment), Part(error, segment),
                       payload.data());
    }
    EXPECT_EQ(payload.span(), packed.payload.span());
    EXPECT_EQ(error, packed.error);
  });
}

TEST_P(CodecTest, ApartFromTheErrorItPacksTheSameAndAddsTheLossInTheErrorsUnit) {
  constexpr float kUnit = 0.3f;
  ForEachChunk([&](uint32_t index) {
    const Chunk& chunk = TheLayout().chunks()[index];
    std::vector<float> values = SeededFloats(chunk.elements, 1);
    const Packed alone = Compress(index, values);
    const std::vector<float> before = SeededFloats(chunk.elements, 2);
    std::vector<float> error = before;
    Payload payload(TheLayout().PayloadBytes(GetParam(), index));
    for (const Segment& segment : chunk.segments) {
      EXPECT_EQ(CompressApart(codec(), kRule, chunk, segment, Part(values, segment), kUnit,
                              Part(error, segment), payload.data()),
                kernels::BlockCount(segment.elements, kBlockElements));
    }
    EXPECT_EQ(payload.span(), alone.payload.span());
    for (uint32_t i = 0; i < chunk.elements; ++i) {
      const float in_unit = kUnit * alone.error[i];
      EXPECT_EQ(error[i], before[i] + in_unit) << i;
    }
  });
}

TEST_P(CodecTest, ApartFromTheErrorABlockThatIsNotFiniteAddsNothing) {
  const Chunk& chunk = TheLayout().chunks()[0];
  const Segment& segment = chunk.segments[0];
  std::vector<float> values = SeededFloats(chunk.elements, 1);
  values[kBlockElements] = std::numeric_limits<float>::infinity();
  const std::vector<float> before = SeededFloats(chunk.elements, 2);
  std::vector<float> error = before;
  Payload payload(TheLayout().PayloadBytes(GetParam(), 0));
  EXPECT_EQ(CompressApart(codec(), kRule, chunk, segment, Part(values, segment), /*unit=*/1,
                          Part(error, segment), payload.data()),
            1);
  for (uint32_t i = kBlockElements; i < 2 * kBlockElements; ++i) EXPECT_EQ(error[i], before[i]);
}

TEST_P(CodecTest, PartsOfASegmentHaveTheBytesOfTheWhole) {
  ForEachChunk([&](uint32_t chunk_index) {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    Packed packed = CompressSeeded(chunk_index, 5);
    Payload payload(packed.payload.size());
    std::vector<float> error(chunk.elements), values(chunk.elements);
    ForEachBlock(chunk, kBlockElements, [&](const Segment& block) {
      codec().Compress(kRule, chunk, block, Part(packed.values, block), Part(error, block),
                       payload.data());
      codec().Decompress(kRule, chunk, block, payload.data(), Part(values, block));
    });
    EXPECT_EQ(payload.span(), packed.payload.span());
    EXPECT_EQ(error, packed.error);
    EXPECT_EQ(values, Decompress(chunk_index, packed.payload));
  });
}

TEST_P(CodecTest, AddsWhatItDecompresses) {
  ForEachChunk([&](uint32_t chunk_index) {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    const Packed packed = CompressSeeded(chunk_index, 6);
    const std::vector<float> sent = Decompress(chunk_index, packed.payload);
    const std::vector<float> before = SeededFloats(chunk.elements, 7);
    std::vector<float> sum = before;
    for (const Segment& segment : chunk.segments) {
      codec().Add(kRule, chunk, segment, packed.payload.data(), /*factor=*/-0.5f,
                  Part(sum, segment));
    }
    for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], before[i] + -0.5f * sent[i]);
  });
}

// The aggregator's compression is a worker's of the mean and its own error.
TEST_P(CodecTest, ARoundCompressesTheMeanOfWhatWasSent) {
  ForEachChunk([&](uint32_t chunk_index) {
    const Chunk& chunk = TheLayout().chunks()[chunk_index];
    constexpr uint32_t kRanks = 3;
    constexpr float kInverse = 1.0f / kRanks;
    std::vector<Packed> ranks;
    std::vector<const uint8_t*> contributions;
    std::vector<float> sum(chunk.elements);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(CompressSeeded(chunk_index, 10 + rank));
      const std::vector<float> sent = Decompress(chunk_index, ranks.back().payload);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = rank == 0 ? sent[i] : sum[i] + sent[i];
    }
    for (const Packed& rank : ranks) contributions.push_back(rank.payload.data());

    std::vector<float> mean(chunk.elements);
    for (size_t i = 0; i < sum.size(); ++i) mean[i] = sum[i] * kInverse;
    std::vector<float> wanted_error, error;
    if (Loses(GetParam())) wanted_error = error = SeededFloats(chunk.elements, 20);
    Payload wanted(ranks[0].payload.size()), answer(ranks[0].payload.size());
    for (const Segment& segment : chunk.segments) {
      const auto part = [&](std::vector<float>& of) {
        return of.empty() ? absl::Span<float>() : Part(of, segment);
      };
      codec().Compress(kRule, chunk, segment, Part(mean, segment), part(wanted_error),
                       wanted.data());
      EXPECT_EQ(codec().Aggregate(kRule, chunk, segment, contributions, kInverse, part(error),
                                  answer.data()),
                kernels::BlockCount(segment.elements, kBlockElements));
    }
    EXPECT_EQ(answer.span(), wanted.span());
    EXPECT_EQ(error, wanted_error);
  });
}

TEST_P(CodecTest, ABlockThatIsNotFiniteIsMarkedAndItsErrorKept) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity(), 0x1p100f}) {
    const Chunk& chunk = TheLayout().chunks()[0];
    const Segment& segment = chunk.segments[0];
    Packed packed = CompressSeeded(0, 8);
    packed.values[kBlockElements + 3] = bad;  // in the segment's second block of three
    const std::vector<float> error_before = packed.error;
    EXPECT_EQ(codec().Compress(kRule, chunk, segment, Part(packed.values, segment),
                               Part(packed.error, segment), packed.payload.data()),
              1);
    uint32_t block_number = 0;
    ForEachBlock(segment, kBlockElements, [&](const Segment& block) {
      EXPECT_EQ(codec().IsPacked(chunk, block, packed.payload.data()), block_number != 1);
      ++block_number;
    });
    for (uint32_t i = kBlockElements; i < 2 * kBlockElements; ++i) {
      EXPECT_EQ(packed.error[i], error_before[i]);
    }
    EXPECT_FALSE(Check(0, packed.payload).ok());
  }
}

TEST_P(CodecTest, AnAggregateThatIsTooLargeIsNamedByItsBlock) {
  const Chunk& chunk = TheLayout().chunks()[0];
  const Segment& segment = chunk.segments[0];
  const Packed packed = CompressSeeded(0, 9);
  std::vector<float> error(chunk.elements);
  if (!Loses(GetParam())) GTEST_SKIP() << "it has no error that could be";
  if (GetParam() == FLOAT16) GTEST_SKIP() << "it clips what is too large";
  error[2 * kBlockElements] = 0x1p100f;
  const uint8_t* const contribution = packed.payload.data();
  Payload out(packed.payload.size());
  EXPECT_EQ(codec().Aggregate(kRule, chunk, segment, {contribution}, /*inverse_count=*/1,
                              Part(error, segment), out.data()),
            2);
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecTest,
                         testing::Values(FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT, CUSTOM),
                         [](const auto& codec) {
                           std::string name = CodecName(codec.param);
                           std::erase(name, '-');
                           return name;
                         });

class QuantizedFrameTest : public CodecTest {};

TEST_P(QuantizedFrameTest, CodesBehindATensorsLastElementAreRefused) {
  const Chunk& chunk = TheLayout().chunks()[0];
  for (const Segment& segment : chunk.segments) {
    if (segment.elements % 8 == 0) continue;
    Packed packed = CompressSeeded(0, 1);
    const kernels::IntegerType type = *IntegerTypeOf(GetParam());
    uint8_t* const codes = QuantizedPart(type, chunk, segment, packed.payload.data()).codes;
    codes[kernels::CodeBytes(type, segment.elements) - 1] = 0x10;
    const absl::Status status = Check(0, packed.payload);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("codes are set behind the last element of tensor"));
  }
}

TEST_P(QuantizedFrameTest, AScaleThatNoneCanBeIsRefused) {
  for (const float scale : {-0.0f, -1.0f, 0x1p51f, std::numeric_limits<float>::infinity()}) {
    Packed packed = CompressSeeded(0, 1);
    std::memcpy(packed.payload.data() + 4, &scale, sizeof scale);
    EXPECT_THAT(Check(0, packed.payload).message(), HasSubstr("the scale of block 1 ("));
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, QuantizedFrameTest, testing::Values(INT8, INT4),
                         [](const auto& codec) { return CodecName(codec.param); });

// Where WIRE.md says: all scales, then the bits or codes, of whole groups of eight elements.
TEST(PackedPart, ScalesBitsAndCodesOfSegmentsLieWhereTheFormatSays) {
  const Chunk& chunk = TheLayout().chunks()[0];
  const Segment& second = chunk.segments[1];  // behind 37 elements in 3 blocks
  ASSERT_EQ(second.chunk_offset, 37);
  Payload payload(TheLayout().PayloadBytes(INT8, 0));
  uint8_t* const bytes = payload.data();
  const uint8_t* const codes = bytes + 4 * chunk.blocks;
  EXPECT_EQ(OneBitPart(chunk, second, bytes).bits, codes + 5);
  EXPECT_EQ(QuantizedPart(kernels::IntegerType::kInt4, chunk, second, bytes).codes, codes + 20);
  const kernels::QuantizedSpan int8 =
      QuantizedPart(kernels::IntegerType::kInt8, chunk, second, bytes);
  EXPECT_EQ(int8.codes, codes + 40);
  EXPECT_EQ(reinterpret_cast<const uint8_t*>(int8.scales), bytes + 4 * 3);
}

TEST(NumberCodec, ARestoreIsFp32) {
  EXPECT_EQ(&NumberCodecOf(RESTORE, TheLayout()), &NumberCodecOf(FLOAT32, TheLayout()));
}

TEST(NumberCodecDeathTest, OthersHaveNoNumbers) {
  EXPECT_DEATH(NumberCodecOf(SKIP, TheLayout()), "codec 4 has no numbers");
}

TEST(Codec, ARestoreIsNoRoundOfNumbers) {
  EXPECT_TRUE(HasNumbers(INT4));
  for (const Codec codec : {CODEC_UNSPECIFIED, SKIP, REPLAY, RESTORE, FETCH, STATE, LISTEN}) {
    EXPECT_FALSE(HasNumbers(codec)) << CodecName(codec);
  }
}

TEST(Codec, HasTheNameThatLogsUse) {
  EXPECT_EQ(CodecName(FLOAT32), "fp32");
  EXPECT_EQ(CodecName(BFLOAT16), "bf16");
  EXPECT_EQ(CodecName(INT8), "int8");
  EXPECT_EQ(CodecName(ONE_BIT), "one-bit");
  EXPECT_EQ(CodecName(SKIP), "skip");
  EXPECT_EQ(CodecName(static_cast<Codec>(17)), "codec 17");
}

TEST(Codec, UsersChooseAmongThoseThatHaveNumbers) {
  for (const Codec codec : {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT}) {
    EXPECT_EQ(CheckCodecOption("codec", codec), absl::OkStatus());
  }
  EXPECT_EQ(CheckCodecOption("codec", RESTORE).message(),
            "codec is restore, wanted one of fp32, bf16, fp16, int8, int4, one-bit, custom");
}

}  // namespace
}  // namespace signpost
