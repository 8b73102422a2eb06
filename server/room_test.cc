// What memory an aggregator keeps for its jobs.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/aggregator.h"
#include "server/job.h"
#include "server/state_dir.h"
#include "server/test_calls.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kLargeChunkElements = 8 * 4096;

// Four chunks, of which an fp32 payload is not malloc's.
JoinRequest LargeJoin(uint32_t rank, const std::string& job) {
  JoinRequest request = TestJoin(rank, /*world_size=*/2, job);
  request.mutable_tensors()->DeleteSubrange(1, 2);
  request.mutable_tensors(0)->set_shape(0, 4);
  request.mutable_tensors(0)->set_shape(1, kLargeChunkElements);
  request.mutable_options()->set_block_elements(4096);
  request.mutable_options()->set_chunk_elements(kLargeChunkElements);
  return request;
}

TEST(Room, WhatAllJobsNeedIsReserved) {
  const uint64_t of_one = ReservedBytes(2, LayoutOf(LargeJoin(0, "a")), {0, 1});
  for (const uint64_t missing : {0, 1}) {
    Aggregator aggregator({.limits = {.held_bytes = 3 * of_one - missing}});
    for (const std::string job : {"a", "b"}) {
      EXPECT_TRUE(Join(aggregator, LargeJoin(0, job)).waits());
      EXPECT_TRUE(Join(aggregator, LargeJoin(1, job)).ok());
    }
    JoinResult third = Join(aggregator, LargeJoin(0, "c"));
    EXPECT_EQ(third.waits(), missing == 0);
    if (missing == 0) continue;
    EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(third.is_to_be_tried_again());  // when "a" or "b" has ended
    EXPECT_THAT(third.message(),
                AllOf(HasSubstr("--max-held-bytes"), HasSubstr(absl::StrCat(3 * of_one)),
                      HasSubstr(absl::StrCat(3 * of_one - 1))));
    EXPECT_THAT(JobNames(aggregator), ElementsAre("a", "b"));
  }
}

TEST(Room, AFrameOfEachOfManyRanksIsReserved) {
  JoinRequest request = LargeJoin(0, "a");
  request.set_world_size(1023);
  const uint64_t needed = ReservedBytes(1023, LayoutOf(request), {0, 1});
  EXPECT_GT(needed, uint64_t{1023} * 4 * kLargeChunkElements);
  Aggregator small({.limits = {.held_bytes = needed - 1}});
  JoinResult refused = Join(small, request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(refused.is_to_be_tried_again());
  EXPECT_THAT(JobNames(small), IsEmpty());
  Aggregator large({.limits = {.held_bytes = needed}});
  EXPECT_TRUE(Join(large, request).waits());
}

TEST(Room, ChunksOfOtherShardsNeedNothingHere) {
  const Layout layout = LayoutOf(LargeJoin(0, "a"));
  const uint64_t frame = 4 * kLargeChunkElements;
  EXPECT_EQ(ReservedBytes(2, layout, {0, 1}), 8 * frame + 4 * frame);
  EXPECT_EQ(ReservedBytes(2, layout, {0, 2}), 4 * frame + 4 * frame);
  EXPECT_EQ(ReservedBytes(2, layout, {4, 5}), 0);
}

TEST(Room, SeveralJobsGiveWayToOneThatNeedsTheirMemory) {
  FakeClock clock;
  JoinRequest request = LargeJoin(0, "large");
  request.set_world_size(40);
  const uint64_t needed = ReservedBytes(40, LayoutOf(request), {0, 1});
  Aggregator aggregator({.limits = {.held_bytes = needed},
                         .idle_timeout = absl::Minutes(10),
                         .now = clock.function()});
  for (const std::string job : {"a", "b"}) {
    EXPECT_TRUE(Join(aggregator, LargeJoin(0, job)).waits());
    EXPECT_TRUE(Join(aggregator, LargeJoin(1, job)).ok());
  }
  EXPECT_EQ(Join(aggregator, request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(JobNames(aggregator), ElementsAre("a", "b"));
  clock.Advance(absl::Minutes(11));
  EXPECT_TRUE(Join(aggregator, request).waits());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("large"));
}

TEST(Room, AJobThatWasRestoredGoesOnWhateverItNeeds) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/reserved");
  std::filesystem::remove_all(path);
  uint64_t epoch = 0;
  {
    auto state_dir = *StateDir::Open(path, {0, 1});
    Aggregator aggregator({}, state_dir.get());
    JoinResult results[] = {Join(aggregator, LargeJoin(0, "a")),
                            Join(aggregator, LargeJoin(1, "a"))};
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    ASSERT_TRUE(results[1].ok());
    epoch = results[1].value().epoch();
  }
  auto state_dir = *StateDir::Open(path, {0, 1});
  Aggregator aggregator({.limits = {.held_bytes = 1}}, state_dir.get());
  ASSERT_TRUE(aggregator.Restore(*state_dir->Recover(/*allow_error_reset=*/false)).ok());
  EXPECT_TRUE(Join(aggregator, LargeJoin(0, "a")).ok());
  const auto send = [&](uint32_t rank, uint32_t chunk) {
    Frame frame = TestFrame(LayoutOf(LargeJoin(0, "a")), {.rank = rank, .chunk = chunk}, FLOAT32);
    frame.header.set_generation(state_dir->generation());
    return Exchange(aggregator, Addressed(std::move(frame), "a", epoch));
  };
  EXPECT_TRUE(send(0, 1).is_to_be_tried_again());
  ExchangeResult first = send(0, 0);
  EXPECT_TRUE(first.waits());
  EXPECT_TRUE(send(1, 0).ok());
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(Join(aggregator, LargeJoin(0, "b")).code(), absl::StatusCode::kResourceExhausted);
}

// Four chunks each, whose fp32 frames have that many bytes; and what such a job of two needs.
constexpr uint64_t kLargeFrame = 4 * kLargeChunkElements;
constexpr uint64_t kLargeReserve = 4 * (kLargeFrame + kLargeFrame) + (2 + 2) * kLargeFrame;

// Two large jobs, with room for so many bytes beside what they need.
class RoomTest : public ::testing::Test {
 protected:
  void Start(uint64_t room) {
    aggregator_ = std::make_unique<Aggregator>(
        AggregatorOptions{.limits = {.held_bytes = 2 * kLargeReserve + room}});
    JoinLarge("a");
  }
  void JoinLarge(const std::string& job) {
    EXPECT_TRUE(Join(*aggregator_, LargeJoin(0, job)).waits());
    epochs_[job] = Join(*aggregator_, LargeJoin(1, job)).value().epoch();
  }
  ExchangeResult Send(const std::string& job, uint32_t rank, uint64_t step, uint32_t chunk,
                      Codec codec = FLOAT32) {
    Frame frame = TestFrame(layout_, {.rank = rank, .step = step, .chunk = chunk}, codec);
    return Exchange(*aggregator_, Addressed(std::move(frame), job, epochs_[job]));
  }
  static void ExpectToWaitWithItsWorker(const ExchangeResult& refused) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(refused.message(), HasSubstr("--max-held-bytes"));
    EXPECT_TRUE(refused.is_to_be_tried_again());
  }

  const Layout layout_ = LayoutOf(LargeJoin(0, "a"));
  std::unique_ptr<Aggregator> aggregator_;
  std::map<std::string, uint64_t> epochs_;
};

TEST_F(RoomTest, BeyondItOnlyTheChunkThatIsFurthestBehindGoesOn) {
  Start(3 * kLargeFrame);
  JoinLarge("b");
  ExchangeResult last = Send("a", 0, 0, 2), second = Send("a", 0, 0, 1);
  ExchangeResult of_b = Send("b", 1, 0, 3);
  EXPECT_TRUE(last.waits() && second.waits() && of_b.waits()) << "just within the limit";
  ExpectToWaitWithItsWorker(Send("a", 1, 0, 2));
  ExpectToWaitWithItsWorker(Send("b", 0, 0, 3));
  EXPECT_TRUE(Send("a", 0, 0, 3, SKIP).waits()) << "it has next to no payload";
  ExchangeResult again = Send("a", 0, 0, 2);
  EXPECT_TRUE(again.waits()) << "what is here already takes nothing";

  ExchangeResult first = Send("a", 1, 0, 0);
  EXPECT_TRUE(first.waits()) << "it is of the first chunk";
  EXPECT_TRUE(Send("a", 0, 0, 0).ok());
  EXPECT_TRUE(first.ok());
  ExpectToWaitWithItsWorker(Send("a", 1, 1, 0));
  EXPECT_TRUE(Send("a", 1, 0, 1).ok()) << "now that is the first";
  EXPECT_TRUE(Send("a", 1, 0, 2).ok());
  EXPECT_TRUE(second.ok() && again.ok());
  EXPECT_TRUE(Send("a", 1, 0, 0).ok()) << "that step's answer is kept";
  EXPECT_TRUE(of_b.waits());
}

TEST_F(RoomTest, WithoutAnyRanksThatSendInAnyOrderComeToTheEndOfEachStep) {
  Start(/*room=*/0);
  JoinLarge("b");
  for (uint64_t step = 0; step < 3; ++step) {
    std::map<std::pair<uint32_t, uint32_t>, bool> is_done;  // by rank and chunk
    for (int pass = 0; is_done.size() < 8; ++pass) {
      ASSERT_LT(pass, 8) << "nobody goes on";
      std::map<std::pair<uint32_t, uint32_t>, ExchangeResult> sent;
      for (const uint32_t chunk : {3, 2, 1, 0}) {
        for (const uint32_t rank : {0, 1}) {
          // The second rank begins with the chunk that the first one ends with.
          const std::pair<uint32_t, uint32_t> key(rank, rank == 0 ? chunk : 3 - chunk);
          if (!is_done[key]) sent.emplace(key, Send("a", rank, step, key.second));
        }
      }
      for (const auto& [key, result] : sent) is_done[key] = result.ok();
      std::erase_if(is_done, [](const auto& entry) { return !entry.second; });
    }
  }
}

TEST_F(RoomTest, AJobThatBeginsHasWhatItNeedsAtOnceAndOthersSendAgain) {
  Start(/*room=*/0);
  std::vector<ExchangeResult> ahead;
  for (const uint32_t chunk : {3, 2}) ahead.push_back(Send("a", 0, 0, chunk));
  EXPECT_TRUE(ahead[0].waits() && ahead[1].waits()) << "nobody else needs it yet";
  JoinLarge("b");
  for (const ExchangeResult& result : ahead) ExpectToWaitWithItsWorker(result);
  ExchangeResult first = Send("b", 0, 0, 0);
  EXPECT_TRUE(first.waits());
  EXPECT_TRUE(Send("b", 1, 0, 0).ok());
  EXPECT_TRUE(first.ok());
  for (const uint32_t chunk : {0, 1, 2, 3}) {
    EXPECT_TRUE(Send("a", 0, 0, chunk).waits());
    EXPECT_TRUE(Send("a", 1, 0, chunk).ok());
  }
}

// What an earlier process may have decided cannot be given back: nobody comes to close it either.
TEST(Room, FramesOfAJobThatNobodyGoesOnWithAfterARestartGiveWay) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/abandoned");
  std::filesystem::remove_all(path);
  FakeClock clock;
  const AggregatorOptions options = {.limits = {.held_bytes = 2 * kLargeReserve},
                                     .now = clock.function()};
  std::map<std::string, uint64_t> epochs;
  const auto join_both = [&](Aggregator& aggregator, const std::string& job) {
    JoinResult joins[] = {Join(aggregator, LargeJoin(0, job)), Join(aggregator, LargeJoin(1, job))};
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    epochs[job] = joins[1].value().epoch();
  };
  {
    auto state_dir = *StateDir::Open(path, {0, 1});
    Aggregator aggregator(options, state_dir.get());
    join_both(aggregator, "a");
  }
  auto state_dir = *StateDir::Open(path, {0, 1});
  Aggregator aggregator(options, state_dir.get());
  ASSERT_TRUE(aggregator.Restore(*state_dir->Recover(/*allow_error_reset=*/false)).ok());
  const auto send = [&](const std::string& job, uint32_t chunk) {
    Frame frame = TestFrame(LayoutOf(LargeJoin(0, job)), {.rank = 0, .chunk = chunk}, FLOAT32);
    frame.header.set_generation(state_dir->generation());
    return Exchange(aggregator, Addressed(std::move(frame), job, epochs[job]));
  };
  ExchangeResult ahead[] = {send("a", 3), send("a", 2)};
  EXPECT_TRUE(ahead[0].waits() && ahead[1].waits());
  clock.Advance(absl::Hours(5));
  join_both(aggregator, "b");
  EXPECT_THAT(JobNames(aggregator), ElementsAre("b"));
  EXPECT_THAT(ahead[0].message(), HasSubstr("another took its place"));
  EXPECT_TRUE(send("b", 0).waits());
}

TEST_F(RoomTest, AFrameThatIsNoPartOfItsRoundTakesNothing) {
  Start(2 * kLargeFrame);
  JoinLarge("b");
  ExchangeResult first = Send("a", 0, 0, 2);
  for (int i = 0; i < 3; ++i) {
    const ExchangeResult other = Send("a", 1, 0, 2, BFLOAT16);
    EXPECT_FALSE(other.waits() || other.ok() || other.is_to_be_tried_again());
  }
  EXPECT_TRUE(Send("b", 0, 0, 2).waits()) << "there is room for one more";
}

TEST_F(RoomTest, AJobThatIsRefusedTakesNoFramesFromOthers) {
  aggregator_ = std::make_unique<Aggregator>(
      AggregatorOptions{.limits = {.held_bytes = 2 * kLargeReserve - 1}});
  JoinLarge("a");
  ExchangeResult ahead = Send("a", 0, 0, 3);
  EXPECT_EQ(Join(*aggregator_, LargeJoin(0, "b")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ahead.waits());
}

}  // namespace
}  // namespace signpost
