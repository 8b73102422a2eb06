#include "server/round.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/codec.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kStep = 7;
constexpr Codec kCodecsWithNumbers[] = {FLOAT32, BFLOAT16, ONE_BIT};

const Layout& TestLayout() {
  static const Layout& layout = *new Layout(LayoutOf(TestJoin(/*rank=*/0, /*world_size=*/1)));
  return layout;
}

uint32_t Elements(uint32_t chunk) { return TestLayout().chunks()[chunk].elements; }

Frame FrameOf(uint32_t rank, uint32_t chunk, Codec codec, uint32_t seed = 0) {
  return TestFrame(TestLayout(), {.rank = rank, .step = kStep, .chunk = chunk}, codec, seed);
}

std::vector<Frame> FramesOf(const std::vector<uint32_t>& ranks, uint32_t chunk, Codec codec) {
  std::vector<Frame> frames;
  for (uint32_t rank : ranks) frames.push_back(FrameOf(rank, chunk, codec));
  return frames;
}

std::vector<float> SomeError(uint32_t chunk) {
  std::mt19937 random(chunk + 1);
  std::vector<float> error(Elements(chunk));
  for (float& value : error) value = std::uniform_real_distribution<float>(-1, 1)(random);
  return error;
}

std::vector<float> Times(float factor, std::vector<float> values) {
  for (float& value : values) value *= factor;
  return values;
}

// What a round leaves: the answer's header and payload, and the error.
struct Outcome {
  Answer answer;
  std::vector<float> error;

  std::string bytes() const {
    return BytesOf(answer) +
           std::string(reinterpret_cast<const char*>(error.data()), error.size() * sizeof(float));
  }
};

// Closes a round to which these frames came in this order.
Outcome RoundOf(const std::vector<Frame>& frames, std::vector<float> error,
                const Layout& layout = TestLayout()) {
  Round round(frames.size());
  for (const Frame& frame : frames) {
    const absl::Status status = round.Contribute(CopyOf(frame));
    EXPECT_TRUE(status.ok()) << status;
  }
  absl::StatusOr<Answer> answer = round.Close(layout, absl::MakeSpan(error));
  EXPECT_TRUE(answer.ok()) << answer.status();
  return {*std::move(answer), std::move(error)};
}

// The numbers that a dense or one-bit payload stands for, in chunk order.
std::vector<float> Decode(Codec codec, uint32_t chunk_index, const Payload& payload) {
  const Chunk& chunk = TestLayout().chunks()[chunk_index];
  std::vector<float> values(chunk.elements);
  if (codec == ONE_BIT) {
    for (const Segment& segment : chunk.segments) {
      const kernels::OneBitView part = OneBitPart(chunk, segment, payload.data());
      for (uint32_t i = 0; i < segment.elements; ++i) {
        const bool negative = part.bits[i / 8] >> (i % 8) & 1;
        values[segment.chunk_offset + i] = negative ? -part.scales[i / 8] : part.scales[i / 8];
      }
    }
    return values;
  }
  const size_t bytes = codec == FLOAT32 ? 4 : 2;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = 0;
    std::memcpy(reinterpret_cast<char*>(&values[i]) + 4 - bytes, payload.data() + i * bytes, bytes);
  }
  return values;
}

TEST(Round, AnyArrivalOrderGivesTheSameBytes) {
  for (Codec codec : kCodecsWithNumbers) {
    for (uint32_t chunk : {0, 1}) {
      const std::vector<float> error = SomeError(chunk);
      std::vector<uint32_t> order = {0, 1, 2, 3};
      std::string expected;
      do {
        const std::string bytes = RoundOf(FramesOf(order, chunk, codec), error).bytes();
        if (expected.empty()) expected = bytes;
        ASSERT_EQ(bytes, expected) << CodecName(codec);
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
}

Frame RestoreOf(uint32_t rank, absl::Span<const float> numbers) {
  Frame frame;
  frame.header.set_rank(rank);
  frame.header.set_codec(RESTORE);
  frame.payload = Payload(4 * numbers.size());
  if (!numbers.empty()) std::memcpy(frame.payload.data(), numbers.data(), 4 * numbers.size());
  frame.header.set_payload_crc32c(Crc32c(frame.payload.span()));
  return frame;
}

TEST(Round, RestoreBringsBackTheErrorOfTheRankThatHasItToTheBit) {
  std::vector<float> error = SomeError(/*chunk=*/0);
  error[3] = -0.0f;
  std::vector<Frame> frames;
  for (uint32_t rank : {2, 0}) frames.push_back(RestoreOf(rank, {}));
  frames.push_back(RestoreOf(1, error));
  const Outcome outcome = RoundOf(frames, std::vector<float>(error.size()));
  EXPECT_EQ(outcome.answer.header.codec(), RESTORE);
  EXPECT_EQ(outcome.answer.payload.size(), 0u);
  EXPECT_EQ(std::memcmp(outcome.error.data(), error.data(), 4 * error.size()), 0);
}

TEST(Round, RestoreAddsTheErrorsOfSeveralRanks) {
  const std::vector<float> error = SomeError(/*chunk=*/0);
  std::vector<Frame> frames;
  for (uint32_t rank : {1, 0}) frames.push_back(RestoreOf(rank, error));
  const Outcome outcome = RoundOf(frames, std::vector<float>(error.size()));
  EXPECT_EQ(outcome.error, Times(2, error));
}

TEST(Round, DenseAnswerIsTheMeanInRankOrderPlusTheError) {
  const std::vector<float> error = SomeError(/*chunk=*/1);
  std::vector<Frame> frames;
  std::vector<std::vector<float>> inputs;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    frames.push_back(FrameOf(rank, /*chunk=*/1, FLOAT32));
    inputs.push_back(Decode(FLOAT32, /*chunk=*/1, frames[rank].payload));
  }

  const Outcome outcome = RoundOf(frames, error);

  std::vector<float> expected(error.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const float sum = (inputs[0][i] + inputs[1][i]) + inputs[2][i];
    expected[i] = sum * (1.0f / 3.0f) + error[i];
  }
  EXPECT_EQ(Decode(FLOAT32, /*chunk=*/1, outcome.answer.payload), expected);
  EXPECT_THAT(outcome.error, Each(0.0f));
}

// The mean plus the error in double, and the sum of the magnitudes that went into each element,
// which bounds what fp32 loses: r (n + 1) times it, r = 2^-24 (n - 1 additions, 1/n and its
// product, the addition of the error).
struct ExactInput {
  std::vector<double> value;
  std::vector<double> magnitude;
};

ExactInput ExactInputOf(const std::vector<Frame>& frames, const std::vector<float>& error) {
  ExactInput u;
  for (float value : error) {
    u.value.push_back(value);
    u.magnitude.push_back(std::fabs(value));
  }
  const double n = frames.size();
  for (const Frame& frame : frames) {
    const std::vector<float> input =
        Decode(frame.header.codec(), frame.header.chunk(), frame.payload);
    for (size_t i = 0; i < input.size(); ++i) {
      u.value[i] += input[i] / n;
      u.magnitude[i] += std::fabs(input[i]) / n;
    }
  }
  return u;
}

// 1-bit Adam, arXiv:2102.02888, Algorithm 1, with a scale per block.
TEST(Round, OneBitAnswerHasTheSignsAndScalesOfTheMeanPlusTheError) {
  for (uint32_t chunk : {0, 1}) {
    const std::vector<Frame> frames = FramesOf({0, 1, 2}, chunk, ONE_BIT);
    const ExactInput u = ExactInputOf(frames, SomeError(chunk));

    const Outcome outcome = RoundOf(frames, SomeError(chunk));

    const std::vector<float> answer = Decode(ONE_BIT, chunk, outcome.answer.payload);
    for (const Segment& segment : TestLayout().chunks()[chunk].segments) {
      for (uint32_t begin = 0; begin < segment.elements; begin += 8) {
        const uint32_t first = segment.chunk_offset + begin;
        const uint32_t end = segment.chunk_offset + std::min(begin + 8, segment.elements);
        double squares = 0, magnitude = 0;
        for (uint32_t i = first; i < end; ++i) {
          squares += u.value[i] * u.value[i];
          magnitude = std::max(magnitude, u.magnitude[i]);
        }
        const double scale = 1.35f * std::sqrt(squares / (end - first));
        // The norm moves by at most the largest error of an element; then come at most 8 squares,
        // 8 additions, a division, a root and a product.
        const double lost = 0x1p-24 * (1.35 * 4 * magnitude + 20 * scale);
        for (uint32_t i = first; i < end; ++i) {
          EXPECT_NEAR(std::fabs(answer[i]), scale, lost);
          if (std::fabs(u.value[i]) <= lost) continue;
          EXPECT_EQ(std::signbit(answer[i]), std::signbit(u.value[i]));
        }
      }
    }
  }
}

std::vector<Frame> Apart(std::vector<Frame> frames, float loss_unit) {
  for (Frame& frame : frames) frame.header.set_loss_unit(loss_unit);
  return frames;
}

TEST(Round, ApartFromTheErrorItAddsOnlyWhatTheAnswerLoses) {
  constexpr float kUnit = 0.3f;
  for (Codec codec : kCodecsWithNumbers) {
    const std::vector<Frame> frames = FramesOf({0, 1, 2}, /*chunk=*/1, codec);
    const Outcome alone = RoundOf(frames, std::vector<float>(Elements(1)));
    const Outcome apart =
        RoundOf(Apart(FramesOf({0, 1, 2}, /*chunk=*/1, codec), kUnit), SomeError(1));
    EXPECT_EQ(apart.answer.payload.span(), alone.answer.payload.span()) << CodecName(codec);
    EXPECT_EQ(apart.answer.header.loss_unit(), kUnit);
    std::vector<float> error = SomeError(1);
    for (size_t i = 0; i < error.size(); ++i) {
      const float in_unit = kUnit * alone.error[i];
      error[i] += in_unit;
    }
    EXPECT_EQ(apart.error, codec == FLOAT32 ? SomeError(1) : error) << CodecName(codec);
  }
}

TEST(Round, WithoutAnErrorNoneNeedBeThereForWhatLosesNothing) {
  for (const bool is_apart : {false, true}) {
    for (Codec codec : {FLOAT32, SKIP, BFLOAT16, ONE_BIT}) {
      std::vector<Frame> frames = FramesOf({0, 1, 2}, /*chunk=*/1, codec == SKIP ? FLOAT32 : codec);
      if (codec == SKIP) frames[1] = FrameOf(1, /*chunk=*/1, SKIP);
      frames = Apart(std::move(frames), is_apart ? 0.5f : 0);
      Round round(frames.size());
      for (const Frame& frame : frames) ASSERT_TRUE(round.Contribute(CopyOf(frame)).ok());
      EXPECT_EQ(round.is_apart(), is_apart);
      EXPECT_EQ(round.CanLose(), codec == BFLOAT16 || codec == ONE_BIT) << CodecName(codec);
      if (round.CanLose()) continue;
      const absl::StatusOr<Answer> answer = round.Close(TestLayout(), {});
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(BytesOf(*answer), BytesOf(RoundOf(frames, std::vector<float>(Elements(1))).answer));
    }
  }
}

// With powers of two for the number of ranks a mean times that is the sum, to the bit.
TEST(Round, AnswersWithTheSumIfTheJobSaysSo) {
  JoinRequest join = TestJoin(/*rank=*/0, /*world_size=*/1);
  join.mutable_options()->set_sum(true);
  const Layout sums = LayoutOf(join);
  for (Codec codec : kCodecsWithNumbers) {
    const std::vector<Frame> frames = FramesOf({0, 1, 2, 3}, /*chunk=*/1, codec);
    const std::vector<float> zeros(Elements(1));
    const Outcome mean = RoundOf(frames, zeros), sum = RoundOf(frames, zeros, sums);
    EXPECT_EQ(Decode(codec, 1, sum.answer.payload), Times(4, Decode(codec, 1, mean.answer.payload)))
        << CodecName(codec);
    EXPECT_EQ(sum.error, Times(4, mean.error));
  }
}

// sum of contributions / n + error before == answer + error after, but for the rounding of the left
// side (ExactInput) and of the error after, r times itself.
TEST(Round, NothingIsLostBetweenAnswerAndError) {
  for (Codec codec : kCodecsWithNumbers) {
    for (uint32_t chunk : {0, 1}) {
      const std::vector<Frame> frames = FramesOf({0, 1, 2, 3, 4}, chunk, codec);
      const ExactInput u = ExactInputOf(frames, SomeError(chunk));

      const Outcome outcome = RoundOf(frames, SomeError(chunk));

      const std::vector<float> answer = Decode(codec, chunk, outcome.answer.payload);
      for (size_t i = 0; i < answer.size(); ++i) {
        const double lost = 0x1p-24 * (6 * u.magnitude[i] + std::fabs(outcome.error[i]));
        EXPECT_NEAR(double{answer[i]} + outcome.error[i], u.value[i], lost)
            << CodecName(codec) << " element " << i;
      }
    }
  }
}

TEST(Round, AnswerPassesCheckAnswer) {
  for (Codec codec : {FLOAT32, BFLOAT16, ONE_BIT, SKIP}) {
    for (uint32_t chunk : {0, 1}) {
      const std::vector<Frame> frames = FramesOf({0}, chunk, codec);
      const Outcome outcome = RoundOf(frames, SomeError(chunk));
      const absl::Status status = CheckAnswer(outcome.answer.header, outcome.answer.payload.span(),
                                              frames[0].header, TestLayout());
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(Round, DuplicateCountsOnce) {
  for (Codec codec : kCodecsWithNumbers) {
    Round round(/*world_size=*/2);
    std::vector<float> error = SomeError(/*chunk=*/0);
    const Outcome expected = RoundOf(FramesOf({0, 1}, /*chunk=*/0, codec), error);

    ASSERT_TRUE(round.Contribute(FrameOf(0, /*chunk=*/0, codec)).ok());
    ASSERT_TRUE(round.Contribute(FrameOf(0, /*chunk=*/0, codec)).ok());
    EXPECT_FALSE(round.complete());
    ASSERT_TRUE(round.Contribute(FrameOf(1, /*chunk=*/0, codec)).ok());
    ASSERT_TRUE(round.Contribute(FrameOf(0, /*chunk=*/0, codec)).ok());
    ASSERT_TRUE(round.complete());

    absl::StatusOr<Answer> answer = round.Close(TestLayout(), absl::MakeSpan(error));
    ASSERT_TRUE(answer.ok());
    EXPECT_EQ((Outcome{*std::move(answer), error}.bytes()), expected.bytes());
  }
}

TEST(Round, OtherBytesFromTheSameRankAreRefused) {
  Round round(/*world_size=*/2);
  ASSERT_TRUE(round.Contribute(FrameOf(1, /*chunk=*/0, FLOAT32)).ok());
  Frame rescaled = FrameOf(1, /*chunk=*/0, FLOAT32);
  rescaled.header.set_error_scale(0.5f);
  Frame apart = FrameOf(1, /*chunk=*/0, FLOAT32);
  apart.header.set_loss_unit(0.5f);

  const absl::Status other_numbers = round.Contribute(FrameOf(1, /*chunk=*/0, FLOAT32, /*seed=*/1));
  const absl::Status other_codec = round.Contribute(FrameOf(1, /*chunk=*/0, ONE_BIT));
  const absl::Status other_scale = round.Contribute(std::move(rescaled));
  const absl::Status other_unit = round.Contribute(std::move(apart));

  EXPECT_EQ(other_numbers.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(other_numbers.message(),
              AllOf(HasSubstr("rank 1"), HasSubstr("step 7"), HasSubstr("chunk 0")));
  EXPECT_EQ(other_codec.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(other_scale.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(other_unit.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(round.Contribute(FrameOf(1, /*chunk=*/0, FLOAT32)).ok());
  EXPECT_THAT(round.MissingRanks(), ElementsAre(0));
}

TEST(Round, MixedCodecsAreRefusedNamingARankOnEachSide) {
  Round round(/*world_size=*/3);
  ASSERT_TRUE(round.Contribute(FrameOf(0, /*chunk=*/0, SKIP)).ok());
  ASSERT_TRUE(round.Contribute(FrameOf(2, /*chunk=*/0, FLOAT32)).ok());

  const absl::Status status = round.Contribute(FrameOf(1, /*chunk=*/0, ONE_BIT));

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("rank 1"), HasSubstr("as one-bit"), HasSubstr("rank 2 as fp32")));
  EXPECT_THAT(round.MissingRanks(), ElementsAre(1));
}

TEST(Round, MixedErrorScalesAreRefusedNamingARankOnEachSide) {
  Round round(/*world_size=*/2);
  Frame halved = FrameOf(0, /*chunk=*/0, ONE_BIT);
  halved.header.set_error_scale(0.5f);
  ASSERT_TRUE(round.Contribute(std::move(halved)).ok());

  const absl::Status status = round.Contribute(FrameOf(1, /*chunk=*/0, SKIP));

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1"), HasSubstr("error_scale 1,"),
                                      HasSubstr("rank 0 with 0.5")));
}

TEST(Round, MixedLossUnitsAreRefusedNamingARankOnEachSide) {
  Round round(/*world_size=*/2);
  Frame apart = FrameOf(0, /*chunk=*/0, ONE_BIT);
  apart.header.set_loss_unit(0.5f);
  ASSERT_TRUE(round.Contribute(std::move(apart)).ok());

  const absl::Status status = round.Contribute(FrameOf(1, /*chunk=*/0, SKIP));

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("rank 1"), HasSubstr("loss_unit 0,"), HasSubstr("rank 0 with 0.5")));
}

TEST(Round, OtherLearningRatesAreRefusedNamingBothRanks) {
  Round round(/*world_size=*/2);
  Frame first = FrameOf(0, /*chunk=*/0, ONE_BIT);
  first.header.set_rates_crc32c(1);
  ASSERT_TRUE(round.Contribute(std::move(first)).ok());
  Frame second = FrameOf(1, /*chunk=*/0, SKIP);
  second.header.set_rates_crc32c(2);

  const absl::Status status = round.Contribute(std::move(second));

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("learning rates"), HasSubstr("rank 1"), HasSubstr("rank 0")));
}

TEST(Round, ErrorScaleOfZeroStandsForOne) {
  std::vector<Frame> frames = FramesOf({0, 1}, /*chunk=*/0, ONE_BIT);
  const Outcome expected = RoundOf(frames, SomeError(/*chunk=*/0));
  frames[1].header.set_error_scale(1);
  EXPECT_EQ(RoundOf(frames, SomeError(/*chunk=*/0)).bytes(), expected.bytes());
}

TEST(Round, ErrorIsScaledOnceBeforeItIsAdded) {
  for (Codec codec : kCodecsWithNumbers) {
    std::vector<Frame> frames = FramesOf({0, 1}, /*chunk=*/0, codec);
    const Outcome expected = RoundOf(frames, Times(0.25f, SomeError(/*chunk=*/0)));
    for (Frame& frame : frames) frame.header.set_error_scale(0.25f);
    EXPECT_EQ(RoundOf(frames, SomeError(/*chunk=*/0)).bytes(), expected.bytes());
  }
}

TEST(Round, SkipNamesTheLowestRankAndOnlyScalesTheError) {
  for (Codec codec : kCodecsWithNumbers) {
    std::vector<Frame> frames = FramesOf({3, 1}, /*chunk=*/0, SKIP);
    frames.push_back(FrameOf(0, /*chunk=*/0, codec));
    frames.push_back(FrameOf(2, /*chunk=*/0, codec));
    for (Frame& frame : frames) frame.header.set_error_scale(0.5f);

    const Outcome outcome = RoundOf(frames, SomeError(/*chunk=*/0));

    EXPECT_EQ(outcome.answer.header.codec(), SKIP);
    EXPECT_EQ(outcome.answer.header.skipped_by_rank(), 1) << CodecName(codec);
    EXPECT_EQ(SkippedBlock(outcome.answer.payload.span()), 1);
    EXPECT_EQ(outcome.error, Times(0.5f, SomeError(/*chunk=*/0)));
  }
}

TEST(Round, AllRanksMaySkip) {
  const Outcome outcome = RoundOf(FramesOf({1, 0}, /*chunk=*/0, SKIP), SomeError(/*chunk=*/0));
  EXPECT_EQ(outcome.answer.header.codec(), SKIP);
  EXPECT_EQ(outcome.answer.header.skipped_by_rank(), 0);
  EXPECT_EQ(outcome.error, SomeError(/*chunk=*/0));
}

TEST(Round, SumOutOfRangeIsAnError) {
  for (Codec codec : kCodecsWithNumbers) {
    Round round(/*world_size=*/1);
    ASSERT_TRUE(round.Contribute(FrameOf(0, /*chunk=*/1, codec)).ok());
    std::vector<float> error(Elements(1), 0x1p120f);
    const absl::Status status = round.Close(TestLayout(), absl::MakeSpan(error)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << CodecName(codec);
    EXPECT_THAT(status.message(), HasSubstr("step 7, chunk 1"));
  }
}

// Of those that are late, later frames do not count, and the mean is over all workers all the same.
TEST(Round, ClosesWithoutLateRanksAsIfTheyHadSentZeros) {
  const std::vector<float> error = SomeError(/*chunk=*/1);
  Round round(/*world_size=*/4);
  for (uint32_t rank : {3, 1}) {
    ASSERT_TRUE(round.Contribute(FrameOf(rank, /*chunk=*/1, FLOAT32)).ok());
  }
  round.LeaveOut(round.MissingRanks());
  EXPECT_TRUE(round.complete());
  EXPECT_THAT(round.MissingRanks(), IsEmpty());
  EXPECT_TRUE(round.IsLate(0) && round.IsLate(2) && !round.IsLate(1) && !round.IsLate(3));

  std::vector<float> after = error;
  const absl::StatusOr<Answer> answer = round.Close(TestLayout(), absl::MakeSpan(after));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(answer->header.late_ranks(), ElementsAre(0, 2));
  EXPECT_EQ(round.Contributions()[0], Contribution());
  const std::vector<float> one = Decode(FLOAT32, 1, FrameOf(1, /*chunk=*/1, FLOAT32).payload);
  const std::vector<float> three = Decode(FLOAT32, 1, FrameOf(3, /*chunk=*/1, FLOAT32).payload);
  const std::vector<float> result = Decode(FLOAT32, 1, answer->payload);
  for (size_t i = 0; i < result.size(); ++i) {
    EXPECT_EQ(result[i], (one[i] + three[i]) * 0.25f + error[i]);
  }
}

TEST(Round, DropsTheFramesOfRanksThatItLeavesOut) {
  std::vector<float> errors[2];
  for (std::vector<float>& error : errors) {
    Round round(/*world_size=*/3);
    const bool came = &error == &errors[1];
    for (uint32_t rank = 0; came && rank < 2; ++rank) {
      ASSERT_TRUE(round.Contribute(FrameOf(rank, /*chunk=*/1, ONE_BIT)).ok());
    }
    round.LeaveOut({0});
    EXPECT_FALSE(round.complete());
    for (uint32_t rank : {1, 2}) {
      ASSERT_TRUE(round.Contribute(FrameOf(rank, /*chunk=*/1, ONE_BIT)).ok());
    }
    EXPECT_TRUE(round.complete());
    error = SomeError(/*chunk=*/1);
    ASSERT_TRUE(round.Close(TestLayout(), absl::MakeSpan(error)).ok());
  }
  EXPECT_EQ(errors[0], errors[1]);
}

TEST(Round, MissingRanksAreThoseThatDidNotContribute) {
  Round round(/*world_size=*/4);
  EXPECT_THAT(round.MissingRanks(), ElementsAre(0, 1, 2, 3));
  ASSERT_TRUE(round.Contribute(FrameOf(2, /*chunk=*/0, ONE_BIT)).ok());
  EXPECT_THAT(round.MissingRanks(), ElementsAre(0, 1, 3));
  for (uint32_t rank : {0, 1, 3}) {
    ASSERT_TRUE(round.Contribute(FrameOf(rank, /*chunk=*/0, ONE_BIT)).ok());
  }
  EXPECT_THAT(round.MissingRanks(), IsEmpty());
}

}  // namespace
}  // namespace signpost
