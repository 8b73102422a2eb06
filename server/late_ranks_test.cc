// Rounds that close without ranks that are late.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/aggregator.h"
#include "server/test_calls.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Four workers, of which three are enough after a second.
class LateRanks : public ::testing::Test {
 protected:
  LateRanks() : aggregator_({.now = clock_.function()}) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      const JoinResult result = Join(aggregator_, JoinOf(rank));
      if (result.ok()) epoch_ = result.value().epoch();
    }
  }

  static JoinRequest JoinOf(uint32_t rank) {
    JoinRequest request = TestJoin(rank, /*world_size=*/4);
    request.mutable_options()->set_round_deadline_us(1'000'000);
    request.mutable_options()->set_min_workers(3);
    return request;
  }

  Frame FrameFor(const FrameKey& key, double learning_rate = 0.5) {
    Frame frame = FrameOf(epoch_, key, ONE_BIT);
    frame.header.mutable_rates()->add_groups()->set_learning_rate(learning_rate);
    return frame;
  }
  ExchangeResult Send(const FrameKey& key) { return Exchange(aggregator_, FrameFor(key)); }
  void CloseAfter(absl::Duration duration) {
    clock_.Advance(duration);
    EXPECT_LE(aggregator_.CloseLateRounds(), absl::Milliseconds(125));
  }

  FakeClock clock_;
  Aggregator aggregator_;
  uint64_t epoch_ = 0;
};

TEST_F(LateRanks, AreWaitedForUntilTheDeadline) {
  ExchangeResult first = Send({.rank = 2});
  clock_.Advance(absl::Milliseconds(500));
  ExchangeResult second = Send({.rank = 0});
  ExchangeResult third = Send({.rank = 1});
  CloseAfter(absl::Milliseconds(499));
  EXPECT_TRUE(first.waits() && second.waits() && third.waits());
  CloseAfter(absl::Milliseconds(1));
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  EXPECT_THAT(third.value().answer->header.late_ranks(), ElementsAre(3));
  EXPECT_EQ(StatusOf(aggregator_).rounds_closed_late(), 1);
  EXPECT_THAT(StatusOf(aggregator_).absent_ranks(), ElementsAre(3));
}

TEST_F(LateRanks, AreWaitedForWhenTooFewOthersAreThere) {
  ExchangeResult first = Send({.rank = 2});
  ExchangeResult second = Send({.rank = 0});
  CloseAfter(absl::Hours(1));
  EXPECT_TRUE(first.waits() && second.waits());
}

TEST_F(LateRanks, AreNotWaitedForAgainBeforeTheyAreHeardFrom) {
  for (uint32_t rank : {0, 1, 2}) Send({.rank = rank});
  CloseAfter(absl::Seconds(1));
  for (uint32_t rank : {0, 1}) Send({.rank = rank, .step = 1});
  EXPECT_THAT(StatusOf(aggregator_).waiting_for_ranks(), ElementsAre(2));
  ExchangeResult next = Send({.rank = 2, .step = 1});
  CloseAfter(absl::ZeroDuration());
  EXPECT_TRUE(next.ok()) << next.message();
  for (uint32_t rank : {0, 1}) Send({.rank = rank, .chunk = 1});
  ExchangeResult elsewhere = Send({.rank = 2, .chunk = 1});
  CloseAfter(absl::ZeroDuration());
  EXPECT_TRUE(elsewhere.ok()) << elsewhere.message();

  ASSERT_TRUE(Send({.rank = 3}).ok());
  for (uint32_t rank : {0, 1}) Send({.rank = rank, .step = 2});
  ExchangeResult waiting = Send({.rank = 2, .step = 2});
  CloseAfter(absl::ZeroDuration());
  EXPECT_TRUE(waiting.waits());
}

TEST_F(LateRanks, GetTheAnswersThatTheyMissedAndTheRatesOfTheSteps) {
  std::vector<std::string> answers;
  for (uint64_t step : {0, 1, 2}) {
    ExchangeResult result;
    for (uint32_t rank : {0, 1, 2}) {
      result = Exchange(aggregator_, FrameFor({.rank = rank, .step = step}, 0.1 * (step + 1)));
    }
    CloseAfter(absl::Seconds(1));
    ASSERT_TRUE(result.ok()) << result.message();
    answers.push_back(BytesOf(*result.value().answer));
  }
  for (uint64_t step : {0, 1, 2}) {
    ExchangeResult late = Send({.rank = 3, .step = step});
    ASSERT_TRUE(late.ok()) << late.message();
    EXPECT_EQ(BytesOf(*late.value().answer), answers[step]);
    const AnswerHeader header = OwnedChunk::HeaderOf(late.value());
    EXPECT_EQ(header.open_step(), 3);
    ASSERT_EQ(header.later_rates_size(), static_cast<int>(2 - step));
    for (uint64_t later = step + 1; later < 3; ++later) {
      EXPECT_EQ(header.later_rates(later - step - 1).groups(0).learning_rate(), 0.1 * (later + 1));
    }
  }
}

TEST_F(LateRanks, GetTheAnswersEvenIfAnOldCopyOfTheirJoinComesBeforeTheirFirstFrame) {
  for (uint64_t step : {0, 1, 2}) {
    for (uint32_t rank : {0, 1, 2}) Send({.rank = rank, .step = step});
    CloseAfter(absl::Seconds(1));
    if (step > 0) continue;
    Join(aggregator_, JoinOf(3));
    CloseAfter(absl::ZeroDuration());
  }
  for (uint64_t step : {0, 1, 2}) {
    ExchangeResult late = Send({.rank = 3, .step = step});
    EXPECT_TRUE(late.ok()) << late.message();
  }
}

TEST_F(LateRanks, GetSixteenAnswersOfSmallChunks) {
  for (uint64_t step = 0; step < 16; ++step) {
    for (uint32_t rank : {0, 1, 2}) Send({.rank = rank, .step = step});
    CloseAfter(absl::Seconds(1));
  }
  for (uint64_t step = 0; step < 16; ++step) {
    ExchangeResult late = Send({.rank = 3, .step = step});
    EXPECT_TRUE(late.ok()) << late.message();
  }
}

TEST_F(LateRanks, ThatAreTooLateAreToldSo) {
  for (uint64_t step = 0; step < 40; ++step) {
    for (uint32_t rank : {0, 1, 2}) Send({.rank = rank, .step = step});
    CloseAfter(absl::Seconds(1));
  }
  ExchangeResult late = Send({.rank = 3});
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(late.message(), AllOf(HasSubstr("rank 3"), HasSubstr("no longer kept")));
  EXPECT_TRUE(late.is_to_be_tried_again());
}

TEST_F(LateRanks, ThatHaveLeftAreNotWaitedForUntilTooFewAreLeft) {
  ASSERT_TRUE(Leave(aggregator_, epoch_, 3).ok());
  for (uint32_t rank : {0, 1}) Send({.rank = rank});
  ExchangeResult third = Send({.rank = 2});
  CloseAfter(absl::ZeroDuration());
  EXPECT_TRUE(third.ok()) << third.message();

  ExchangeResult waiting = Send({.rank = 2, .step = 1});
  ASSERT_TRUE(Leave(aggregator_, epoch_, 0).ok());
  EXPECT_EQ(waiting.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(waiting.message(), HasSubstr("rank 0 has left"));
}

TEST(Join, LateRanksNeedADeadlineAndALeastNumberOfWorkers) {
  for (const auto& [deadline_us, min_workers] : {std::pair{0, 2}, {1000, 0}, {1000, 4}, {999, 2}}) {
    JoinRequest request = TestJoin(0, /*world_size=*/3);
    request.mutable_options()->set_round_deadline_us(deadline_us);
    request.mutable_options()->set_min_workers(min_workers);
    Aggregator aggregator({});
    JoinResult result = Join(aggregator, request);
    EXPECT_EQ(result.code(), absl::StatusCode::kInvalidArgument) << deadline_us;
    EXPECT_THAT(result.message(), HasSubstr(deadline_us == 999 ? "deadline" : "min_workers"));
  }
}

}  // namespace
}  // namespace signpost
