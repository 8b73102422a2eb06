#include "proto/frame.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/block.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWorkers = 3;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Tensor MakeTensor(absl::string_view name, uint64_t elements) {
  Tensor tensor;
  tensor.set_name(std::string(name));
  tensor.add_shape(elements);
  return tensor;
}

// Chunk 0: 'a', blocks of 8 and 8. Chunk 1: 'b', a block of 8 and one of 3, and 'c', one of 5.
Layout TwoChunks(uint64_t first_step = 0) {
  JobOptions options;
  options.set_first_step(first_step);
  options.set_block_elements(8);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  return *Layout::Create({MakeTensor("a", 16), MakeTensor("b", 11), MakeTensor("c", 5)}, options);
}

void PutWord(Payload& payload, size_t offset, uint32_t word) {
  std::memcpy(payload.data() + offset, &word, sizeof(word));
}

void PutFloat(Payload& payload, size_t offset, float value) {
  PutWord(payload, offset, std::bit_cast<uint32_t>(value));
}

void PutBfloat16(Payload& payload, size_t offset, float value) {
  const uint16_t upper = std::bit_cast<uint32_t>(value) >> 16;
  std::memcpy(payload.data() + offset, &upper, sizeof(upper));
}

class CheckFrameTest : public ::testing::Test {
 protected:
  // A frame that passes, for the test to break: all numbers 0, all bits +.
  Frame ValidFrame(Codec codec, uint32_t chunk = 1) const {
    Frame frame;
    frame.header.set_job("job");
    frame.header.set_epoch(5);
    frame.header.set_rank(2);
    frame.header.set_step(7);
    frame.header.set_chunk(chunk);
    frame.header.set_codec(codec);
    frame.payload = Payload(layout_.PayloadBytes(codec, chunk));
    std::memset(frame.payload.data(), 0, frame.payload.size());
    Seal(frame);
    return frame;
  }

  // Makes the checksum right for what the payload now holds.
  static void Seal(Frame& frame) { frame.header.set_payload_crc32c(Crc32c(frame.payload.span())); }

  absl::Status Check(const Frame& frame) const {
    return CheckFrame(frame.header, frame.payload.span(), kWorkers, layout_);
  }

  void ExpectAccepted(const Frame& frame) const { EXPECT_EQ(Check(frame), absl::OkStatus()); }

  void ExpectRefused(const Frame& frame, absl::string_view message) const {
    const absl::Status status = Check(frame);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
  }

  const Layout layout_ = TwoChunks();
};

// --- What passes.

TEST_F(CheckFrameTest, AcceptsEveryCodecForEveryChunk) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    for (const uint32_t chunk : {0u, 1u}) ExpectAccepted(ValidFrame(codec, chunk));
  }
}

TEST_F(CheckFrameTest, AcceptsTheFirstAndTheLastRank) {
  Frame frame = ValidFrame(ONE_BIT);
  for (const uint32_t rank : {0u, kWorkers - 1}) {
    frame.header.set_rank(rank);
    ExpectAccepted(frame);
  }
}

TEST_F(CheckFrameTest, AcceptsAnyJobEpochAndStep) {
  Frame frame = ValidFrame(ONE_BIT);
  frame.header.set_job("another");
  frame.header.set_epoch(UINT64_MAX);
  frame.header.set_step(UINT64_MAX);
  ExpectAccepted(frame);
}

TEST_F(CheckFrameTest, AcceptsTheSmallestAndLargestScales) {
  Frame frame = ValidFrame(ONE_BIT);
  PutFloat(frame.payload, 0, std::numeric_limits<float>::denorm_min());
  PutFloat(frame.payload, 4, kernels::kMaxScale);
  PutFloat(frame.payload, 8, kernels::kMaxScale);
  Seal(frame);
  ExpectAccepted(frame);
}

TEST_F(CheckFrameTest, AcceptsAnySignBitOfAnElement) {
  Frame frame = ValidFrame(ONE_BIT);
  uint8_t* const bits = frame.payload.data() + 12;
  bits[0] = 0xFF;
  bits[1] = 0x07;  // 3 elements
  bits[2] = 0x1F;  // 5 elements
  Seal(frame);
  ExpectAccepted(frame);
}

TEST_F(CheckFrameTest, AcceptsTheLargestDenseElements) {
  for (const float value : {kernels::kMaxDense, -kernels::kMaxDense, -0.0f}) {
    Frame wide = ValidFrame(FLOAT32);
    PutFloat(wide.payload, 15 * 4, value);
    Seal(wide);
    ExpectAccepted(wide);
    Frame narrow = ValidFrame(BFLOAT16);
    PutBfloat16(narrow.payload, 15 * 2, value);
    Seal(narrow);
    ExpectAccepted(narrow);
  }
}

TEST_F(CheckFrameTest, AcceptsASkipOfTheChunksLastBlock) {
  Frame frame = ValidFrame(SKIP);
  frame.payload = SkipPayload(2);
  Seal(frame);
  ExpectAccepted(frame);
}

TEST_F(CheckFrameTest, AcceptsFactorsOfTheErrorFromZeroUp) {
  for (const float factor : {0.0f, 1e-30f, 1.0f, std::numeric_limits<float>::max()}) {
    Frame scaled = ValidFrame(ONE_BIT), apart = ValidFrame(ONE_BIT);
    scaled.header.set_error_scale(factor);
    ExpectAccepted(scaled);
    apart.header.set_loss_unit(factor);
    ExpectAccepted(apart);
  }
}

TEST_F(CheckFrameTest, AcceptsAPayloadAtAnyAddress) {
  const Frame frame = ValidFrame(ONE_BIT);
  std::vector<uint8_t> shifted = {0};
  shifted.insert(shifted.end(), frame.payload.span().begin(), frame.payload.span().end());
  EXPECT_EQ(CheckFrame(frame.header, absl::MakeConstSpan(shifted).subspan(1), kWorkers, layout_),
            absl::OkStatus());
}

TEST_F(CheckFrameTest, AcceptsRestoreWithOrWithoutNumbersBeforeTheFirstStep) {
  const Layout resumed = TwoChunks(/*first_step=*/8);
  Frame frame = ValidFrame(RESTORE);
  EXPECT_EQ(CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed), absl::OkStatus());
  frame.payload = Payload();
  Seal(frame);
  EXPECT_EQ(CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed), absl::OkStatus());
}

// --- What is refused.

TEST_F(CheckFrameTest, RefusesLateRanksThatCannotBe) {
  const auto with_late_ranks = [&](const std::vector<uint32_t>& ranks) {
    Frame frame = ValidFrame(ONE_BIT);
    frame.header.mutable_late_ranks()->Add(ranks.begin(), ranks.end());
    return frame;
  };
  ExpectAccepted(with_late_ranks({0, kWorkers - 1}));
  ExpectRefused(with_late_ranks({1, 0}), "late ranks do not ascend");
  ExpectRefused(with_late_ranks({1, 1}), "late ranks do not ascend");
  ExpectRefused(with_late_ranks({kWorkers}), "late rank");
  std::vector<uint32_t> all(kWorkers);
  std::iota(all.begin(), all.end(), 0);
  ExpectRefused(with_late_ranks(all), "are all ranks");
}

TEST_F(CheckFrameTest, RefusesRestoreAtAnyOtherStep) {
  ExpectRefused(ValidFrame(RESTORE), "its codec is restore");
  const Layout resumed = TwoChunks(/*first_step=*/9);
  const Frame frame = ValidFrame(RESTORE);
  const absl::Status status = CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the round before the job's first_step, 9"));
}

TEST_F(CheckFrameTest, RefusesAnyOtherCodecBeforeTheFirstStep) {
  const Layout resumed = TwoChunks(/*first_step=*/8);
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    const Frame frame = ValidFrame(codec);
    const absl::Status status = CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("takes restore only"));
  }
}

TEST_F(CheckFrameTest, RefusesARestoreOfAnotherSizeOrOutOfRange) {
  const Layout resumed = TwoChunks(/*first_step=*/8);
  Frame frame = ValidFrame(RESTORE);
  PutFloat(frame.payload, 60, kNan);
  Seal(frame);
  EXPECT_THAT(
      std::string(CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed).message()),
      HasSubstr("a restore element is not finite"));
  frame.payload = Payload(60);
  std::memset(frame.payload.data(), 0, 60);
  Seal(frame);
  EXPECT_THAT(
      std::string(CheckFrame(frame.header, frame.payload.span(), kWorkers, resumed).message()),
      HasSubstr("has 64 bytes; got 60"));
}

TEST_F(CheckFrameTest, RefusesARankBeyondTheLast) {
  Frame frame = ValidFrame(ONE_BIT);
  for (const uint32_t rank : {kWorkers, UINT32_MAX}) {
    frame.header.set_rank(rank);
    ExpectRefused(frame, "is not in [0, 3)");
  }
}

TEST_F(CheckFrameTest, RefusesAChunkBeyondTheLast) {
  Frame frame = ValidFrame(ONE_BIT);
  for (const uint32_t chunk : {2u, UINT32_MAX}) {
    frame.header.set_chunk(chunk);
    ExpectRefused(frame, "is not in [0, 2)");
  }
}

TEST_F(CheckFrameTest, RefusesACodecThatItDoesNotKnow) {
  Frame frame = ValidFrame(ONE_BIT);
  for (const int codec : {0, 5, 77, -1}) {
    frame.header.set_codec(static_cast<Codec>(codec));
    ExpectRefused(frame, "is unknown to this version");
  }
}

TEST_F(CheckFrameTest, RefusesAPayloadOneByteShortOrLong) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    const size_t size = layout_.PayloadBytes(codec, 1);
    for (const size_t wrong : {size_t{0}, size - 1, size + 1}) {
      Frame frame = ValidFrame(codec);
      frame.payload = Payload(wrong);
      std::memset(frame.payload.data(), 0, wrong);
      Seal(frame);
      ExpectRefused(frame, "payload of this chunk has");
    }
  }
}

TEST_F(CheckFrameTest, RefusesAnotherChunksPayload) {
  Frame frame = ValidFrame(ONE_BIT, /*chunk=*/0);
  frame.header.set_chunk(1);
  ExpectRefused(frame, "a one-bit payload of this chunk has 15 bytes; got 10");
}

TEST_F(CheckFrameTest, RefusesAFlippedBitAnywhereInThePayload) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    Frame frame = ValidFrame(codec);
    for (size_t bit = 0; bit < frame.payload.size() * 8; ++bit) {
      frame.payload.data()[bit / 8] ^= 1 << bit % 8;
      ExpectRefused(frame, "CRC-32C");
      frame.payload.data()[bit / 8] ^= 1 << bit % 8;
    }
  }
}

TEST_F(CheckFrameTest, RefusesAScaleThatIsNegativeNotFiniteOrTooLarge) {
  const float above = std::nextafter(kernels::kMaxScale, kInfinity);
  for (const float scale : {-0.0f, -1e-45f, -1.0f, above, kInfinity, -kInfinity, kNan, -kNan}) {
    for (const size_t block : {0, 1, 2}) {
      Frame frame = ValidFrame(ONE_BIT);
      PutFloat(frame.payload, 4 * block, scale);
      Seal(frame);
      ExpectRefused(frame, absl::StrCat("the scale of block ", block, " (tensor '"));
    }
  }
}

TEST_F(CheckFrameTest, NamesTheTensorOfABadScale) {
  Frame frame = ValidFrame(ONE_BIT);
  PutFloat(frame.payload, 4, kNan);
  Seal(frame);
  EXPECT_EQ(
      Check(frame).message(),
      "frame of rank 2 for step 7, chunk 1: the scale of block 1 (tensor 'b' [11], elements 8 "
      "to 10) is nan, not in [0, 1.1259e+15]");
}

TEST_F(CheckFrameTest, RefusesASetBitBehindATensorsLastElement) {
  for (int bit = 3; bit < 8; ++bit) {
    Frame frame = ValidFrame(ONE_BIT);
    frame.payload.data()[12 + 1] = 1 << bit;
    Seal(frame);
    ExpectRefused(frame, "behind the last element of tensor 'b' [11]");
  }
  for (int bit = 5; bit < 8; ++bit) {
    Frame frame = ValidFrame(ONE_BIT);
    frame.payload.data()[12 + 2] = 1 << bit;
    Seal(frame);
    ExpectRefused(frame, "behind the last element of tensor 'c' [5]");
  }
}

TEST_F(CheckFrameTest, RefusesADenseElementThatIsNotFiniteOrTooLarge) {
  for (const float value : {kInfinity, -kInfinity, kNan, 0x1.02p100f, -0x1.02p100f}) {
    for (const size_t element : {0, 7, 15}) {
      Frame wide = ValidFrame(FLOAT32);
      PutFloat(wide.payload, 4 * element, value);
      Seal(wide);
      ExpectRefused(wide, "a fp32 element");
      Frame narrow = ValidFrame(BFLOAT16);
      PutBfloat16(narrow.payload, 2 * element, value);
      Seal(narrow);
      ExpectRefused(narrow, "a bf16 element");
    }
  }
}

TEST_F(CheckFrameTest, RefusesASkippedBlockThatTheChunkDoesNotHave) {
  for (const uint32_t block : {3u, UINT32_MAX}) {
    Frame frame = ValidFrame(SKIP);
    frame.payload = SkipPayload(block);
    Seal(frame);
    ExpectRefused(frame, "but the chunk has 3");
  }
}

TEST_F(CheckFrameTest, RefusesFactorsOfTheErrorThatAreNegativeOrNotFinite) {
  for (const float factor : {-1e-45f, -1.0f, kInfinity, -kInfinity, kNan}) {
    Frame scaled = ValidFrame(ONE_BIT), apart = ValidFrame(ONE_BIT);
    scaled.header.set_error_scale(factor);
    ExpectRefused(scaled, "error_scale");
    apart.header.set_loss_unit(factor);
    ExpectRefused(apart, "loss_unit");
  }
}

TEST_F(CheckFrameTest, RefusesRatesThatAreNotFiniteOrTooMany) {
  Frame frame = ValidFrame(ONE_BIT);
  for (int i = 0; i < kMaxGroups; ++i) frame.header.mutable_rates()->add_groups();
  EXPECT_TRUE(Check(frame).ok()) << Check(frame);
  for (const double rate : {double{kInfinity}, double{kNan}}) {
    frame.header.mutable_rates()->mutable_groups(7)->set_learning_rate(rate);
    ExpectRefused(frame, "learning rate");
  }
  frame.header.mutable_rates()->mutable_groups(7)->set_learning_rate(1);
  frame.header.mutable_rates()->add_groups();
  ExpectRefused(frame, "rates of 129 groups");
}

TEST_F(CheckFrameTest, RefusesScalesThatAreNotFiniteOrNotOfItsTensors) {
  Frame frame = ValidFrame(ONE_BIT);
  TensorScale& scale = *frame.header.mutable_rates()->add_scales();
  scale.set_tensor(1);
  ExpectAccepted(frame);
  scale.set_factor(kNan);
  ExpectRefused(frame, "is not finite");
  scale.set_factor(1);
  scale.set_tensor(static_cast<uint32_t>(layout_.tensors().size()));
  ExpectRefused(frame, "the scale of tensor 3; the job has 3");
  scale.set_tensor(0);
  ExpectRefused(frame, "the scale of tensor 'a' [16], of which the chunk has no part");
  scale.set_tensor(1);
  TensorScale& next = *frame.header.mutable_rates()->add_scales();
  next.set_tensor(2);
  ExpectAccepted(frame);
  next.set_tensor(1);
  ExpectRefused(frame, "do not ascend");
  for (int i = 1; i < kMaxTensorScales; ++i) frame.header.mutable_rates()->add_scales();
  ExpectRefused(frame, "scales of 4097 tensors");
}

// --- Answers.

class CheckAnswerTest : public CheckFrameTest {
 protected:
  Answer ValidAnswer(Codec codec) const {
    Frame frame = ValidFrame(codec);
    Answer answer;
    answer.header.set_step(frame.header.step());
    answer.header.set_chunk(frame.header.chunk());
    answer.header.set_codec(codec);
    answer.header.set_payload_crc32c(frame.header.payload_crc32c());
    answer.payload = std::move(frame.payload);
    return answer;
  }

  absl::Status Check(const Answer& answer, Codec sent) const {
    return CheckAnswer(answer.header, answer.payload.span(), ValidFrame(sent).header, layout_);
  }

  void ExpectRefused(const Answer& answer, Codec sent, absl::string_view message) const {
    const absl::Status status = Check(answer, sent);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
  }
};

TEST_F(CheckAnswerTest, AcceptsTheCodecThatWasSent) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    EXPECT_EQ(Check(ValidAnswer(codec), codec), absl::OkStatus());
  }
}

TEST_F(CheckAnswerTest, AcceptsASkipWhateverWasSent) {
  for (const Codec codec : {FLOAT32, BFLOAT16, ONE_BIT}) {
    EXPECT_EQ(Check(ValidAnswer(SKIP), codec), absl::OkStatus());
  }
}

// As an aggregator gives that knows of no such field, and has mixed the error in.
TEST_F(CheckAnswerTest, RefusesAnotherLossUnitThanWasSent) {
  Frame frame = ValidFrame(FLOAT32);
  Answer answer = ValidAnswer(FLOAT32);
  frame.header.set_loss_unit(0.5f);
  const auto check = [&] {
    return CheckAnswer(answer.header, answer.payload.span(), frame.header, layout_);
  };
  EXPECT_EQ(check().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(check().message()),
      HasSubstr("has loss_unit 0; the frame had 0.5: is the aggregator of another version"));
  answer.header.set_loss_unit(0.5f);
  EXPECT_EQ(check(), absl::OkStatus());
}

TEST_F(CheckAnswerTest, RefusesAnotherCodecThanWasSent) {
  ExpectRefused(ValidAnswer(FLOAT32), ONE_BIT, "the answer is fp32; the frame was one-bit");
  ExpectRefused(ValidAnswer(ONE_BIT), SKIP, "the answer is one-bit; the frame was skip");
}

TEST_F(CheckAnswerTest, ARestoreIsAnsweredWithRestoreAndNoPayload) {
  Answer answer = ValidAnswer(RESTORE);
  ExpectRefused(answer, RESTORE, "a restore answer has no payload; got 64 bytes");
  ExpectRefused(ValidAnswer(SKIP), RESTORE, "the answer is skip; the frame was restore");
  answer.payload = Payload();
  answer.header.set_payload_crc32c(0);
  EXPECT_EQ(Check(answer, RESTORE), absl::OkStatus());
}

TEST_F(CheckAnswerTest, RefusesAnotherStep) {
  Answer answer = ValidAnswer(ONE_BIT);
  answer.header.set_step(6);
  ExpectRefused(answer, ONE_BIT,
                "the answer is for step 6, chunk 1; the frame was for step 7, chunk 1");
}

TEST_F(CheckAnswerTest, RefusesAnotherChunk) {
  Answer answer = ValidAnswer(ONE_BIT);
  for (const uint32_t chunk : {0u, UINT32_MAX}) {
    answer.header.set_chunk(chunk);
    ExpectRefused(answer, ONE_BIT, "; the frame was for step 7, chunk 1");
  }
}

TEST_F(CheckAnswerTest, RefusesAPayloadOneByteShort) {
  Answer answer = ValidAnswer(ONE_BIT);
  answer.payload = Payload(answer.payload.size() - 1);
  ExpectRefused(answer, ONE_BIT, "got 14");
}

TEST_F(CheckAnswerTest, RefusesAFlippedBit) {
  Answer answer = ValidAnswer(ONE_BIT);
  answer.payload.data()[12] ^= 1;
  ExpectRefused(answer, ONE_BIT, "answer for step 7, chunk 1: the payload's CRC-32C");
}

TEST_F(CheckAnswerTest, RefusesABadScale) {
  Answer answer = ValidAnswer(ONE_BIT);
  PutFloat(answer.payload, 0, kInfinity);
  answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
  ExpectRefused(answer, ONE_BIT, "the scale of block 0");
}

TEST_F(CheckAnswerTest, RefusesLaterRatesThatAFrameMayNotHave) {
  Answer answer = ValidAnswer(ONE_BIT);
  answer.header.add_later_rates();
  StepRates& rates = *answer.header.add_later_rates();
  TensorScale& scale = *rates.add_scales();
  for (const Codec sent : {ONE_BIT, LISTEN}) EXPECT_EQ(Check(answer, sent), absl::OkStatus());
  scale.set_tensor(static_cast<uint32_t>(layout_.tensors().size()));
  for (const Codec sent : {ONE_BIT, LISTEN}) {
    ExpectRefused(answer, sent,
                  "the rates that come with the answer for step 7, chunk 1: the scale of tensor 3; "
                  "the job has 3");
  }
  scale.set_tensor(0);
  scale.set_floor(kNan);
  ExpectRefused(answer, LISTEN, "is not finite");
  scale.set_floor(0);
  LocalSums& sums = *rates.mutable_schedule()->add_local_sums();
  sums.set_decay(kInfinity);
  ExpectRefused(answer, LISTEN, "a sum over an interval of local steps is not finite");
  sums.set_decay(0);
  rates.add_groups()->set_beta2(kNan);
  ExpectRefused(answer, LISTEN, "a learning rate, weight decay, beta or epsilon is not finite");
}

TEST_F(CheckAnswerTest, RefusesAStateWithTheScaleOfNoTensor) {
  Answer answer = ValidAnswer(STATE);
  TensorScale& scale = *answer.header.add_later_rates()->add_scales();
  EXPECT_EQ(Check(answer, FETCH), absl::OkStatus());
  scale.set_tensor(UINT32_MAX);
  ExpectRefused(answer, FETCH, "the scale of tensor 4294967295");
}

TEST(SkipPayload, HoldsItsBlockInLittleEndian) {
  const Payload payload = SkipPayload(0x04030201);
  EXPECT_THAT(payload.span(), ::testing::ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(SkippedBlock(payload.span()), 0x04030201u);
}

}  // namespace
}  // namespace signpost
