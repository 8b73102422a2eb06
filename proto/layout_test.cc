#include "proto/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tensor MakeTensor(absl::string_view name, std::initializer_list<uint64_t> shape) {
  Tensor tensor;
  tensor.set_name(std::string(name));
  for (const uint64_t dimension : shape) tensor.add_shape(dimension);
  return tensor;
}

JobOptions Options(uint32_t block_elements, uint32_t chunk_elements) {
  JobOptions options;
  options.set_block_elements(block_elements);
  options.set_chunk_elements(chunk_elements);
  options.set_gamma(1.35f);
  options.set_optimizer("adam beta1=0.9");
  options.set_parameters_crc32c(0x1234);
  return options;
}

Layout MakeLayout(const std::vector<Tensor>& tensors, const JobOptions& options) {
  absl::StatusOr<Layout> layout = Layout::Create(tensors, options);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

std::vector<uint64_t> ChunkSizes(const Layout& layout) {
  std::vector<uint64_t> sizes;
  for (const Chunk& chunk : layout.chunks()) sizes.push_back(chunk.elements);
  return sizes;
}

void ExpectRefused(const std::vector<Tensor>& tensors, const JobOptions& options,
                   absl::string_view message) {
  const absl::Status status = Layout::Create(tensors, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
}

// --- What comes out.

TEST(Layout, TwoTensorsInOneChunkFollowEachOtherWithoutGaps) {
  const Layout layout = MakeLayout({MakeTensor("w", {3, 4}), MakeTensor("b", {3})}, Options(8, 16));
  EXPECT_EQ(layout.elements(), 15u);
  ASSERT_EQ(layout.chunks().size(), 1u);
  const Chunk& chunk = layout.chunks()[0];
  EXPECT_EQ(chunk.elements, 15u);
  EXPECT_EQ(chunk.blocks, 3u);
  EXPECT_EQ(chunk.sign_bytes, 3u);
  ASSERT_EQ(chunk.segments.size(), 2u);
  EXPECT_EQ(chunk.segments[0].elements, 12u);
  EXPECT_EQ(chunk.segments[1].tensor, 1u);
  EXPECT_EQ(chunk.segments[1].tensor_offset, 0u);
  EXPECT_EQ(chunk.segments[1].elements, 3u);
  EXPECT_EQ(chunk.segments[1].chunk_offset, 12u);
  EXPECT_EQ(chunk.segments[1].first_block, 2u);
  EXPECT_EQ(chunk.segments[1].bits_offset, 2u);
}

TEST(Layout, AScalarIsOneElement) {
  EXPECT_EQ(MakeLayout({MakeTensor("s", {})}, Options(8, 8)).elements(), 1u);
}

TEST(Layout, ChunksOfOneTensorAreEven) {
  // Ten blocks, at most four to a chunk: three chunks, 4 + 4 + 2 if they were filled to the brim.
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("w", {80})}, Options(8, 32))),
              ElementsAre(24, 32, 24));
}

TEST(Layout, OfTwoEquallyEvenCutsTheEarlierIsMade) {
  // Half of five blocks is as near to two as to three of them.
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("w", {40})}, Options(8, 24))), ElementsAre(16, 24));
}

TEST(Layout, ATensorThatFillsAChunkExactlyMakesOneChunk) {
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("w", {64})}, Options(8, 64))), ElementsAre(64));
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("w", {65})}, Options(8, 64))), ElementsAre(32, 33));
}

TEST(Layout, AChunkIsNeverOverfilledForTheSakeOfEvenness) {
  // An even share is 4 elements; of its neighbours 0 and 8 the earlier would leave 9 for one chunk.
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("a", {8}), MakeTensor("b", {1})}, Options(8, 8))),
              ElementsAre(8, 1));
  // The second even share ends at 10, but from 1 on only one tensor fits.
  EXPECT_THAT(ChunkSizes(MakeLayout({MakeTensor("a", {1}), MakeTensor("b", {8}),
                                     MakeTensor("c", {1}), MakeTensor("d", {5})},
                                    Options(8, 8))),
              ElementsAre(1, 8, 6));
}

TEST(Layout, APayloadsSizeFollowsFromItsChunk) {
  const Layout layout = MakeLayout({MakeTensor("w", {3, 4}), MakeTensor("b", {3})}, Options(8, 16));
  EXPECT_EQ(layout.PayloadBytes(FLOAT32, 0), 60u);
  EXPECT_EQ(layout.PayloadBytes(BFLOAT16, 0), 30u);
  EXPECT_EQ(layout.PayloadBytes(ONE_BIT, 0), 15u);
  EXPECT_EQ(layout.PayloadBytes(SKIP, 0), 4u);
}

TEST(LayoutDeathTest, ACodecWithoutANameHasNoPayload) {
  const Layout layout = MakeLayout({MakeTensor("w", {8})}, Options(8, 8));
  EXPECT_DEATH(layout.PayloadBytes(CODEC_UNSPECIFIED, 0), "codec 0 has no payload");
}

TEST(Layout, DescribesABlockByTensorShapeAndElements) {
  const Layout layout = MakeLayout({MakeTensor("w", {3, 9}), MakeTensor("b", {3})}, Options(8, 24));
  ASSERT_THAT(ChunkSizes(layout), ElementsAre(16, 14));
  EXPECT_EQ(layout.DescribeBlock(0, 1), "tensor 'w' [3, 9], elements 8 to 15");
  EXPECT_EQ(layout.DescribeBlock(1, 0), "tensor 'w' [3, 9], elements 16 to 23");
  EXPECT_EQ(layout.DescribeBlock(1, 1), "tensor 'w' [3, 9], elements 24 to 26");
  EXPECT_EQ(layout.DescribeBlock(1, 2), "tensor 'b' [3], elements 0 to 2");
}

TEST(Layout, DescribesANameThatIsNotPrintableByItsBytes) {
  EXPECT_EQ(DescribeTensor(MakeTensor("a\n'b", {2})), R"('a\n\'b' [2])");
}

TEST(Layout, ALargestJobIsLaidOutInLittleTime) {
  const Layout layout = MakeLayout({MakeTensor("w", {kMaxElements})}, Options(8, 1 << 20));
  EXPECT_EQ(layout.chunks().size(), kMaxChunks);
  EXPECT_EQ(layout.chunks().back().first_element, kMaxElements - (1 << 20));
}

TEST(Layout, SuitableChunksAreAsManyAsManyShardsDivide) {
  const auto chunks_of = [](uint64_t elements, uint32_t block = 4096, uint32_t workers = 2) {
    const uint32_t chunk_elements = SuitableChunkElements(elements, block, workers);
    EXPECT_EQ(chunk_elements % block, 0u) << elements;
    return MakeLayout({MakeTensor("a", {1}), MakeTensor("w", {elements - 1})},
                      Options(block, chunk_elements))
        .chunks()
        .size();
  };
  EXPECT_EQ(chunks_of(2), 1u);
  EXPECT_EQ(chunks_of(700'000), 1u);
  EXPECT_EQ(chunks_of(1'000'000), 2u);
  EXPECT_EQ(chunks_of(2'000'000), 4u);
  EXPECT_EQ(chunks_of(5'000'000), 8u);
  EXPECT_EQ(chunks_of(10'000'000), 24u);
  EXPECT_EQ(chunks_of(25'000'000), 48u);
  EXPECT_EQ(chunks_of(25'000'000, 24), 48u);
  EXPECT_EQ(chunks_of(40'000'000), 48u);
  EXPECT_EQ(chunks_of(50'000'000), 72u);
  EXPECT_EQ(chunks_of(100'000'000), 120u);
  EXPECT_EQ(chunks_of(200'000'000), 120u);
  EXPECT_EQ(chunks_of(340'000'000), 168u);
  EXPECT_EQ(chunks_of(5'000'000, 4096, /*workers=*/1), 8u);
  EXPECT_EQ(chunks_of(25'000'000, 4096, /*workers=*/1), 8u);
  EXPECT_EQ(chunks_of(340'000'000, 4096, /*workers=*/1), 81u);
}

// --- What is refused.

TEST(Layout, RefusesAJobWithoutTensors) { ExpectRefused({}, Options(8, 8), "at least one tensor"); }

TEST(Layout, RefusesMoreTensorsThanItsLimit) {
  ExpectRefused(std::vector<Tensor>(kMaxTensors + 1), Options(8, 8), "250001 tensors");
}

TEST(Layout, RefusesAnEmptyName) {
  ExpectRefused({MakeTensor("a", {1}), MakeTensor("", {1})}, Options(8, 8), "tensor 1 has no name");
}

TEST(Layout, RefusesANameThatCannotTravel) {
  ExpectRefused({MakeTensor("caf\xe9", {1})}, Options(8, 8), "the name of tensor 0 is not UTF-8");
}

TEST(JobName, IsTextOfALine) {
  for (const std::string& name :
       {std::string("j"), std::string("caf\xc3\xa9 / 1"), std::string(kMaxJobNameBytes, 'j')}) {
    EXPECT_TRUE(CheckJobName(name).ok()) << name;
  }
  for (const std::string& name :
       {std::string(), std::string(kMaxJobNameBytes + 1, 'j'), std::string("caf\xe9"),
        std::string("a\nb"), std::string("\x1b[31m"), std::string("a\0b", 3),
        std::string("\xc2\x9b"
                    "31m"),
        std::string("\xe2\x80\xae"
                    "evil"),
        std::string("a\xe2\x81\xa6")}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckJobName(name))) << name;
  }
  EXPECT_EQ(CheckJobName("caf\xe9").message(),
            R"(the job's name 'caf\xe9' is not text in UTF-8 without control characters)");
}

TEST(Layout, RefusesALongName) {
  const std::string longest(kMaxTensorNameBytes, 'x');
  EXPECT_TRUE(Layout::Create({MakeTensor(longest, {1})}, Options(8, 8)).ok());
  ExpectRefused({MakeTensor(longest + "x", {1})}, Options(8, 8), "1025 bytes");
}

TEST(Layout, RefusesARepeatedName) {
  ExpectRefused({MakeTensor("a", {1}), MakeTensor("b", {1}), MakeTensor("a", {2})}, Options(8, 8),
                "tensor 2, 'a' [2], has the name of an earlier one");
}

TEST(Layout, RefusesAZeroDimension) {
  ExpectRefused({MakeTensor("a", {3, 0})}, Options(8, 8), "'a' [3, 0], has a zero dimension");
}

TEST(Layout, RefusesManyDimensions) {
  Tensor tensor = MakeTensor("a", {});
  for (int i = 0; i < kMaxTensorDimensions; ++i) tensor.add_shape(1);
  EXPECT_TRUE(Layout::Create({tensor}, Options(8, 8)).ok());
  tensor.add_shape(1);
  ExpectRefused({tensor}, Options(8, 8), "65 dimensions");
}

TEST(Layout, RefusesMoreElementsThanItsLimit) {
  const JobOptions options = Options(8, kMaxChunkElements);
  EXPECT_TRUE(Layout::Create({MakeTensor("a", {kMaxElements})}, options).ok());
  ExpectRefused({MakeTensor("a", {kMaxElements + 1})}, options, "'a'");
  ExpectRefused({MakeTensor("a", {kMaxElements}), MakeTensor("b", {1})}, options, "tensor 1, 'b'");
}

TEST(Layout, RefusesAShapeWhoseProductWrapsAround) {
  const uint64_t big = uint64_t{1} << 32;
  ExpectRefused({MakeTensor("a", {big, big})}, Options(8, 8), "more than");
  ExpectRefused({MakeTensor("a", {big, big, 2})}, Options(8, 8), "more than");
  ExpectRefused({MakeTensor("a", {UINT64_MAX, UINT64_MAX})}, Options(8, 8), "more than");
  ExpectRefused({MakeTensor("a", {2}), MakeTensor("b", {UINT64_MAX})}, Options(8, 8), "more than");
}

TEST(Layout, RefusesMoreChunksThanItsLimit) {
  ExpectRefused({MakeTensor("a", {uint64_t{8} * kMaxChunks + 1})}, Options(8, 8),
                "make chunk_elements larger");
  EXPECT_TRUE(Layout::Create({MakeTensor("a", {uint64_t{8} * kMaxChunks})}, Options(8, 8)).ok());
}

TEST(Layout, RefusesBlockElementsThatAreNoPositiveMultipleOf8) {
  for (const uint32_t block : {0u, 1u, 7u, 12u, kMaxBlockElements + 8}) {
    ExpectRefused({MakeTensor("a", {1})}, Options(block, 1 << 20),
                  absl::StrCat("option block_elements is ", block));
  }
  EXPECT_TRUE(
      Layout::Create({MakeTensor("a", {1})}, Options(kMaxBlockElements, kMaxBlockElements)).ok());
}

TEST(Layout, RefusesChunkElementsThatAreNoPositiveMultipleOfBlockElements) {
  for (const uint32_t chunk : {0u, 8u, 24u, kMaxChunkElements + 16}) {
    ExpectRefused({MakeTensor("a", {1})}, Options(16, chunk),
                  absl::StrCat("option chunk_elements is ", chunk));
  }
  EXPECT_TRUE(Layout::Create({MakeTensor("a", {1})}, Options(16, kMaxChunkElements)).ok());
}

TEST(Layout, RefusesAGammaOutsideItsRange) {
  JobOptions options = Options(8, 8);
  for (const float gamma : {0.0f, -1.0f, 1.6f, 2.0f, INFINITY, NAN}) {
    options.set_gamma(gamma);
    ExpectRefused({MakeTensor("a", {1})}, options, "option gamma is");
  }
  for (const float gamma : {1e-6f, 1.0f, 1.5999999f}) {
    options.set_gamma(gamma);
    EXPECT_TRUE(Layout::Create({MakeTensor("a", {1})}, options).ok()) << gamma;
  }
}

TEST(Layout, RefusesALongOptimizer) {
  JobOptions options = Options(8, 8);
  options.set_optimizer(std::string(kMaxOptimizerBytes, 'x'));
  EXPECT_TRUE(Layout::Create({MakeTensor("a", {1})}, options).ok());
  options.set_optimizer(std::string(kMaxOptimizerBytes + 1, 'x'));
  ExpectRefused({MakeTensor("a", {1})}, options, "option optimizer");
}

TEST(Layout, StatesHaveAsManyNumbersAsTheJobSays) {
  JobOptions options = Options(8, 8);
  EXPECT_EQ(MakeLayout({MakeTensor("a", {5})}, options).PayloadBytes(STATE, 0), 5 * 3 * 4);
  options.set_state_numbers(4);
  EXPECT_EQ(MakeLayout({MakeTensor("a", {5})}, options).PayloadBytes(STATE, 0), 5 * 4 * 4);
  options.set_state_numbers(kMaxStateNumbers + 1);
  ExpectRefused({MakeTensor("a", {5})}, options, "option state_numbers");
}

// --- Whether two describe the same job.

class SameJob : public ::testing::Test {
 protected:
  void ExpectDifference(absl::string_view message) const {
    EXPECT_EQ(CheckSameJob(tensors_, options_, job_), absl::FailedPreconditionError(message));
  }

  std::vector<Tensor> tensors_ = {MakeTensor("w", {4, 2}), MakeTensor("b", {4})};
  JobOptions options_ = Options(8, 16);
  Layout job_ = MakeLayout(tensors_, options_);
};

TEST_F(SameJob, OneIsTheSameAsItself) {
  EXPECT_EQ(CheckSameJob(tensors_, options_, job_), absl::OkStatus());
}

TEST_F(SameJob, NamesTheTensorWhoseShapeDiffers) {
  tensors_[1].set_shape(0, 5);
  ExpectDifference("tensor 1 is 'b' [5] here but 'b' [4] in the job");
}

TEST_F(SameJob, NamesTheTensorWhoseNameDiffers) {
  tensors_[0].set_name("x");
  ExpectDifference("tensor 0 is 'x' [4, 2] here but 'w' [4, 2] in the job");
}

TEST_F(SameJob, SeesAShapeThatIsThePrefixOfAnother) {
  tensors_[0].mutable_shape()->RemoveLast();
  ExpectDifference("tensor 0 is 'w' [4] here but 'w' [4, 2] in the job");
}

TEST_F(SameJob, NamesTheTensorThatIsMissing) {
  tensors_.pop_back();
  ExpectDifference("tensor 1 is missing here but 'b' [4] in the job");
}

TEST_F(SameJob, NamesTheTensorThatIsTooMany) {
  tensors_.push_back(MakeTensor("c", {}));
  ExpectDifference("tensor 2 is 'c' [] here but missing in the job");
}

TEST_F(SameJob, NamesTheFirstStep) {
  options_.set_first_step(40);
  ExpectDifference(
      "option first_step is 40 here but 0 in the job: all workers must start anew, or resume from "
      "the same checkpoint");
}

TEST_F(SameJob, NamesLocalSteps) {
  options_.set_local_steps(3);
  ExpectDifference(
      "option local_steps is 3 here but 0 in the job: all workers must resume from the same "
      "checkpoint");
}

TEST_F(SameJob, NamesBlockElements) {
  options_.set_block_elements(16);
  ExpectDifference("option block_elements is 16 here but 8 in the job");
}

TEST_F(SameJob, NamesChunkElements) {
  options_.set_chunk_elements(32);
  ExpectDifference("option chunk_elements is 32 here but 16 in the job");
}

TEST_F(SameJob, NamesGammaWithTheDigitsThatTellItApart) {
  options_.set_gamma(std::nextafter(1.35f, 2.0f));
  ExpectDifference("option gamma is 1.3500001 here but 1.35 in the job");
}

TEST_F(SameJob, NamesTheSum) {
  options_.set_sum(true);
  ExpectDifference("option sum is true here but false in the job");
}

TEST_F(SameJob, NamesTheNumbersOfAState) {
  options_.set_state_numbers(4);
  ExpectDifference("option state_numbers is 4 here but 0 in the job");
}

TEST_F(SameJob, NamesTheDigestsOfACodecIfBothAreKnown) {
  JobOptions jobs = options_;
  jobs.mutable_custom_codec()->set_name("topk");
  jobs.mutable_custom_codec()->set_version("1");
  jobs.mutable_custom_codec()->set_digest(0x2468);
  options_ = jobs;
  job_ = MakeLayout(tensors_, jobs);
  EXPECT_EQ(CheckSameJob(tensors_, options_, job_), absl::OkStatus());
  options_.mutable_custom_codec()->set_digest(0x1357);
  ExpectDifference(
      "the digest of what codec 'topk' of version '1' makes of numbers is 00001357 here but "
      "00002468 in the job: it has changed without a new version; use the shared object that the "
      "job had");
  jobs.mutable_custom_codec()->clear_digest();
  job_ = MakeLayout(tensors_, jobs);
  EXPECT_EQ(CheckSameJob(tensors_, options_, job_), absl::OkStatus());
}

TEST_F(SameJob, NamesTheOptimizer) {
  options_.set_optimizer("adam beta1=0.8");
  ExpectDifference("option optimizer is 'beta1=0.8' here but 'beta1=0.9' in the job");
}

TEST_F(SameJob, NamesWhatOneOptimizerLeavesOut) {
  options_.set_optimizer("adam beta1=0.9 codec=int8");
  ExpectDifference("option optimizer is 'codec=int8' here but 'codec=onebit' in the job");
  options_.set_optimizer("adam beta1=0.8 variance_codec=bf16 compat=deepspeed");
  ExpectDifference(
      "option optimizer is 'beta1=0.8 variance_codec=bf16 compat=deepspeed' here but 'beta1=0.9 "
      "variance_codec=fp32 compat=none' in the job");
}

TEST_F(SameJob, NamesTheParametersAndSaysWhatToDo) {
  options_.set_parameters_crc32c(0x1235);
  ExpectDifference(
      "option parameters_crc32c is 00001235 here but 00001234 in the job: all workers must start "
      "from the same parameters; use the same seed or load the same checkpoint");
}

// --- Fingerprints.

TEST(Fingerprint, IsTheOneThatWireMdDescribes) {
  // From a separate implementation of WIRE.md.
  EXPECT_EQ(
      MakeLayout({MakeTensor("w", {3, 4}), MakeTensor("b", {3})}, Options(8, 16)).Fingerprint(),
      0x66e7970b66028f5bu);
}

TEST(Fingerprint, DiffersForEverythingThatShapesTheLayout) {
  const std::vector<Layout> layouts = {
      MakeLayout({MakeTensor("w", {3, 4})}, Options(8, 16)),
      MakeLayout({MakeTensor("w", {4, 3})}, Options(8, 16)),
      MakeLayout({MakeTensor("w", {12})}, Options(8, 16)),
      MakeLayout({MakeTensor("v", {3, 4})}, Options(8, 16)),
      MakeLayout({MakeTensor("w", {3, 4})}, Options(16, 16)),
      MakeLayout({MakeTensor("w", {3, 4})}, Options(8, 24)),
      MakeLayout({MakeTensor("w", {3, 4}), MakeTensor("b", {})}, Options(8, 16)),
      MakeLayout({MakeTensor("b", {}), MakeTensor("w", {3, 4})}, Options(8, 16)),
  };
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(layouts[i].Fingerprint(), layouts[j].Fingerprint()) << i << " and " << j;
    }
  }
}

TEST(Fingerprint, DoesNotDependOnOptionsThatDoNotShapeTheLayout) {
  JobOptions options = Options(8, 16);
  const uint64_t fingerprint = MakeLayout({MakeTensor("w", {9})}, options).Fingerprint();
  options.set_gamma(1.0f);
  options.set_optimizer("other");
  options.set_parameters_crc32c(0);
  EXPECT_EQ(MakeLayout({MakeTensor("w", {9})}, options).Fingerprint(), fingerprint);
}

// --- What holds for every layout, over random ones.

class RandomLayout : public ::testing::TestWithParam<uint32_t> {
 protected:
  RandomLayout() : random_(GetParam()) {
    const uint32_t block = 8 * Uniform(1, 8);
    options_ = Options(block, block * Uniform(1, 12));
    const uint32_t count = Uniform(1, 40);
    for (uint32_t i = 0; i < count; ++i) {
      tensors_.push_back(MakeTensor(absl::StrCat("t", i),
                                    {Uniform(1, 30), Uniform(0, 3) == 0 ? Uniform(1, 40) : 1}));
    }
    layout_ = MakeLayout(tensors_, options_);
  }

  uint32_t Uniform(uint32_t least, uint32_t most) {
    return std::uniform_int_distribution<uint32_t>(least, most)(random_);
  }

  // Lengths of all blocks, straight from the definition.
  std::vector<uint64_t> Blocks() const {
    std::vector<uint64_t> blocks;
    for (const Tensor& tensor : tensors_) {
      uint64_t left = tensor.shape(0) * tensor.shape(1);
      for (; left > options_.block_elements(); left -= options_.block_elements()) {
        blocks.push_back(options_.block_elements());
      }
      blocks.push_back(left);
    }
    return blocks;
  }

  std::mt19937 random_;
  JobOptions options_;
  std::vector<Tensor> tensors_;
  Layout layout_;
};

TEST_P(RandomLayout, SegmentsTileEveryTensorOnceAndInOrder) {
  uint64_t next = 0;
  uint32_t tensor = 0;
  uint64_t tensor_offset = 0;
  for (const Chunk& chunk : layout_.chunks()) {
    EXPECT_EQ(chunk.first_element, next);
    uint32_t chunk_offset = 0;
    for (const Segment& segment : chunk.segments) {
      EXPECT_EQ(segment.tensor, tensor);
      EXPECT_EQ(segment.tensor_offset, tensor_offset);
      EXPECT_EQ(segment.chunk_offset, chunk_offset);
      EXPECT_GT(segment.elements, 0u);
      chunk_offset += segment.elements;
      tensor_offset += segment.elements;
      if (tensor_offset == ElementCount(tensors_[tensor])) {
        ++tensor;
        tensor_offset = 0;
      }
    }
    EXPECT_EQ(chunk.elements, chunk_offset);
    next += chunk.elements;
  }
  EXPECT_EQ(tensor, tensors_.size());
  EXPECT_EQ(next, layout_.elements());
}

TEST_P(RandomLayout, ChunksAreRunsOfWholeBlocks) {
  const std::vector<uint64_t> blocks = Blocks();
  size_t next = 0;
  for (const Chunk& chunk : layout_.chunks()) {
    uint64_t elements = 0, sign_bytes = 0;
    uint32_t blocks_seen = 0;
    for (const Segment& segment : chunk.segments) {
      EXPECT_EQ(segment.first_block, blocks_seen);
      EXPECT_EQ(segment.bits_offset, sign_bytes);
      uint64_t in_segment = 0;
      for (; in_segment < segment.elements; ++next, ++blocks_seen) {
        ASSERT_LT(next, blocks.size());
        in_segment += blocks[next];
        sign_bytes += (blocks[next] + 7) / 8;
      }
      EXPECT_EQ(in_segment, segment.elements);
      elements += in_segment;
    }
    EXPECT_EQ(chunk.elements, elements);
    EXPECT_EQ(chunk.blocks, blocks_seen);
    EXPECT_EQ(chunk.sign_bytes, sign_bytes);
  }
  EXPECT_EQ(next, blocks.size());
}

TEST_P(RandomLayout, ThereAreAsFewChunksAsTheirLimitAllows) {
  // Filling each chunk to the brim gives the least number.
  size_t least = 1;
  uint64_t filled = 0;
  for (const uint64_t block : Blocks()) {
    if (filled + block > options_.chunk_elements()) {
      ++least;
      filled = 0;
    }
    filled += block;
  }
  EXPECT_EQ(layout_.chunks().size(), least);
}

TEST_P(RandomLayout, NoChunkExceedsItsLimitNorAnEvenShareByMoreThanABlock) {
  const uint64_t count = layout_.chunks().size();
  for (const Chunk& chunk : layout_.chunks()) {
    EXPECT_LE(chunk.elements, options_.chunk_elements());
    EXPECT_LE(chunk.elements * count, layout_.elements() + options_.block_elements() * count);
  }
}

TEST_P(RandomLayout, ChunksAreEvenToABlockWhereTheLimitLeavesRoom) {
  const uint64_t count = layout_.chunks().size();
  const uint64_t block = options_.block_elements();
  if (layout_.elements() + block * count > options_.chunk_elements() * count) return;
  for (const Chunk& chunk : layout_.chunks()) {
    EXPECT_GE(chunk.elements * count + block * count, layout_.elements());
  }
}

TEST_P(RandomLayout, ShardsDifferByAtMostTheLargestChunk) {
  for (const uint32_t shard_count : {1u, 2u, 3u, 7u}) {
    const std::vector<uint32_t> shards = layout_.ShardOfChunk(shard_count);
    ASSERT_EQ(shards.size(), layout_.chunks().size());
    std::vector<uint64_t> loads(shard_count);
    for (size_t chunk = 0; chunk < shards.size(); ++chunk) {
      ASSERT_LT(shards[chunk], shard_count);
      // The rule, naively: the first of the least loaded.
      EXPECT_EQ(shards[chunk], std::min_element(loads.begin(), loads.end()) - loads.begin());
      loads[shards[chunk]] += layout_.chunks()[chunk].elements;
    }
    const std::vector<uint64_t> sizes = ChunkSizes(layout_);
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()),
              *std::min_element(loads.begin(), loads.end()) +
                  *std::max_element(sizes.begin(), sizes.end()))
        << shard_count << " shards";
  }
}

TEST_P(RandomLayout, IsTheSameWhenMadeAgain) {
  const Layout again = MakeLayout(tensors_, options_);
  EXPECT_EQ(ChunkSizes(again), ChunkSizes(layout_));
  EXPECT_EQ(again.Fingerprint(), layout_.Fingerprint());
}

// The seed is the number in a failing test's name.
INSTANTIATE_TEST_SUITE_P(Seed, RandomLayout, ::testing::Range(0u, 300u));

TEST(ShardOfChunk, MoreShardsThanChunksLeavesTheLastOnesEmpty) {
  const Layout layout = MakeLayout({MakeTensor("w", {16})}, Options(8, 8));
  EXPECT_THAT(layout.ShardOfChunk(UINT32_MAX), ElementsAre(0, 1));
  EXPECT_EQ(layout.OwningShards(UINT32_MAX), 2);
  EXPECT_EQ(layout.OwningShards(1), 1);
}

}  // namespace
}  // namespace signpost
