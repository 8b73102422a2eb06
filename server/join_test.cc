// Which jobs and ranks an aggregator lets in, and which jobs give way to others.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/try_again.h"
#include "server/aggregator.h"
#include "server/state_dir.h"
#include "server/test_calls.h"
#include "server/test_job.h"
#include "storage/faulty_disk.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Join, WaitsUntilAllRanksWait) {
  Aggregator aggregator({});
  JoinResult first = Join(aggregator, TestJoin(1, /*world_size=*/3));
  JoinResult second = Join(aggregator, TestJoin(0, /*world_size=*/3));
  EXPECT_TRUE(first.waits());
  EXPECT_TRUE(second.waits());

  JoinResult third = Join(aggregator, TestJoin(2, /*world_size=*/3));

  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  EXPECT_EQ(first.value().epoch(), third.value().epoch());
  EXPECT_EQ(second.value().epoch(), third.value().epoch());
  EXPECT_EQ(third.value().layout_fingerprint(), TestLayout().Fingerprint());
}

TEST(Join, RetryTakesThePlaceOfTheWaitingCall) {
  Aggregator aggregator({});
  JoinResult lost = Join(aggregator, TestJoin(0, /*world_size=*/2));
  JoinResult retry = Join(aggregator, TestJoin(0, /*world_size=*/2));
  EXPECT_EQ(lost.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(retry.waits());

  JoinResult other = Join(aggregator, TestJoin(1, /*world_size=*/2));
  EXPECT_TRUE(retry.ok() && other.ok());
}

TEST(Join, RetryAfterCompletionIsAnsweredAtOnce) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  JoinResult retry = Join(aggregator, TestJoin(1, /*world_size=*/2));
  ASSERT_TRUE(retry.ok());
  EXPECT_EQ(retry.value().epoch(), epoch);
}

TEST(Join, LastClaimOfARankHoldsItUntilTheJobIsComplete) {
  Aggregator aggregator({});
  JoinRequest restarted = TestJoin(0, /*world_size=*/2);
  restarted.set_incarnation(77);
  JoinResult before = Join(aggregator, TestJoin(0, /*world_size=*/2));
  JoinResult after = Join(aggregator, restarted);
  EXPECT_EQ(before.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(before.message(), HasSubstr("another process claimed the rank"));
  EXPECT_TRUE(Join(aggregator, TestJoin(1, /*world_size=*/2)).ok());
  EXPECT_TRUE(after.ok());

  JoinResult late = Join(aggregator, TestJoin(0, /*world_size=*/2));
  EXPECT_EQ(late.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(late.message(), HasSubstr("rank 0"));
}

TEST(Join, ProcessesThatWentAwayDoNotCompleteAJob) {
  Aggregator aggregator({});
  JoinResult gone, timed_out;
  const uint64_t gone_call = aggregator.Join(TestJoin(0, /*world_size=*/3), gone.done());
  const uint64_t timed_out_call = aggregator.Join(TestJoin(1, /*world_size=*/3), timed_out.done());
  aggregator.CancelJoin(gone_call, absl::CancelledError("gone"));
  JoinResult waiting = Join(aggregator, TestJoin(2, /*world_size=*/3));
  aggregator.CancelJoin(timed_out_call, absl::DeadlineExceededError("timed out"));
  EXPECT_EQ(gone.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(timed_out.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(waiting.waits());
  // To others, who time out just as well, the first is to blame and the second is not.
  EXPECT_THAT(StatusOf(aggregator).waiting_for_ranks(), ElementsAre(0));
  EXPECT_THAT(StatusOf(aggregator).joined_ranks(), ElementsAre(1, 2));

  EXPECT_TRUE(Join(aggregator, TestJoin(0, /*world_size=*/3)).waits());
  EXPECT_TRUE(Join(aggregator, TestJoin(1, /*world_size=*/3)).ok());
  EXPECT_TRUE(waiting.ok());
}

TEST(Join, CancellingACallThatWasSupersededLeavesTheNewOneAlone) {
  Aggregator aggregator({});
  JoinResult lost;
  const uint64_t lost_call = aggregator.Join(TestJoin(0, /*world_size=*/2), lost.done());
  JoinResult retry = Join(aggregator, TestJoin(0, /*world_size=*/2));
  aggregator.CancelJoin(lost_call, absl::CancelledError("gone"));
  EXPECT_TRUE(retry.waits());
}

TEST(Join, MismatchIsNamedAndKeptForStatusAndDisturbsNobody) {
  Aggregator aggregator({});
  JoinResult waiting = Join(aggregator, TestJoin(0, /*world_size=*/2));
  JoinRequest other_shape = TestJoin(1, /*world_size=*/2);
  other_shape.mutable_tensors(1)->set_shape(0, 12);
  JoinRequest other_option = TestJoin(1, /*world_size=*/2);
  other_option.mutable_options()->set_gamma(1);

  JoinResult shape = Join(aggregator, other_shape);
  JoinResult option = Join(aggregator, other_option);
  JoinResult size = Join(aggregator, TestJoin(1, /*world_size=*/3));

  EXPECT_EQ(shape.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(shape.message(), AllOf(HasSubstr("'bias'"), HasSubstr("[12]"), HasSubstr("[11]")));
  EXPECT_EQ(option.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(option.message(), HasSubstr("gamma"));
  EXPECT_EQ(size.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(size.message(), AllOf(HasSubstr("3 here"), HasSubstr("2 in the job")));
  const JobStatus status = StatusOf(aggregator);
  ASSERT_EQ(status.refused_joins_size(), 1);
  EXPECT_EQ(status.refused_joins(0).rank(), 1);
  EXPECT_EQ(status.refused_joins(0).reason(), size.message());
  EXPECT_TRUE(waiting.waits());
  EXPECT_TRUE(Join(aggregator, TestJoin(1, /*world_size=*/2)).ok());
}

TEST(Join, RefusalDoesNotDisturbARunningJob) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ExchangeResult waiting = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  JoinRequest other = TestJoin(1, /*world_size=*/2);
  other.set_incarnation(5);
  EXPECT_EQ(Join(aggregator, other).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Join(aggregator, TestJoin(0, /*world_size=*/4)).code(),
            absl::StatusCode::kFailedPrecondition);

  EXPECT_TRUE(waiting.waits());
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32)).ok());
  EXPECT_TRUE(waiting.ok());
}

TEST(Join, AnotherShardThanThisOneIsNamed) {
  Aggregator aggregator({.shard = 1, .shard_count = 2});
  JoinResult result = Join(aggregator, TestJoin(0, /*world_size=*/2));
  EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(result.message(),
              HasSubstr("rank 0 lists 1 aggregator, but this one is shard 1 of 2"));
  JoinRequest swapped = TestJoin(0, /*world_size=*/2);
  swapped.set_shard_count(2);
  result = Join(aggregator, swapped);
  EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(result.message(),
              AllOf(HasSubstr("shard 1 of 2"), HasSubstr("takes it for shard 0")));
}

TEST(Join, AShardWithoutChunksIsNotJoined) {
  Aggregator aggregator({.shard = 2, .shard_count = 3});
  JoinRequest request = TestJoin(0, /*world_size=*/1);
  request.set_shard(2);
  request.set_shard_count(3);
  JoinResult result = Join(aggregator, request);
  EXPECT_EQ(result.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(result.message(), HasSubstr("shard 2 of 3 owns none of the job's chunks: it is to be "
                                          "joined at the first 2 only"));
}

TEST(Join, MalformedRequestsAreRefused) {
  Aggregator aggregator({});
  JoinRequest no_name = TestJoin(0, /*world_size=*/1, "");
  JoinRequest long_name = TestJoin(0, /*world_size=*/1, std::string(kMaxJobNameBytes + 1, 'j'));
  JoinRequest no_block = TestJoin(0, /*world_size=*/1);
  no_block.mutable_options()->set_block_elements(0);
  const JoinRequest odd_name = TestJoin(0, /*world_size=*/1, "new\nline");
  for (const JoinRequest& request :
       {no_name, long_name, odd_name, no_block, TestJoin(2, /*world_size=*/2), TestJoin(0, 0)}) {
    EXPECT_EQ(Join(aggregator, request).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(JobNames(aggregator), IsEmpty());
}

// What becomes of a request under these limits, where a job with fewer of everything runs already.
JoinResult JoinUnder(const AggregatorLimits& limits, const JoinRequest& request) {
  Aggregator aggregator({.limits = limits});
  JoinRequest small = TestJoin(0, /*world_size=*/1, "small");
  small.mutable_tensors()->DeleteSubrange(1, 2);
  small.mutable_options()->set_chunk_elements(8);
  EXPECT_TRUE(Join(aggregator, small).ok());
  JoinResult result = Join(aggregator, request);
  EXPECT_THAT(JobNames(aggregator), Contains("small"));
  EXPECT_EQ(JobNames(aggregator).size(), result.waits() ? 2 : 1);
  return result;
}

uint64_t LargestFp32PayloadBytes() {
  return std::max(TestLayout().PayloadBytes(FLOAT32, 0), TestLayout().PayloadBytes(FLOAT32, 1));
}

TEST(Join, EachLimitIsCheckedAndNamesItsFlag) {
  const JoinRequest request = TestJoin(0, /*world_size=*/4);
  // With the other job's 45 parameters in six chunks.
  const AggregatorLimits just_enough = {.jobs = 2,
                                        .workers = 4,
                                        .parameters = 57 + 45,
                                        .frames = 8 + 6,
                                        .payload_bytes = LargestFp32PayloadBytes()};
  EXPECT_EQ(JoinUnder(just_enough, request).message(),
            "this aggregator is shutting down");  // it waited until the end of JoinUnder

  AggregatorLimits fewer_jobs = just_enough, fewer_workers = just_enough,
                   fewer_parameters = just_enough, fewer_frames = just_enough,
                   fewer_bytes = just_enough;
  --fewer_jobs.jobs;
  --fewer_workers.workers;
  --fewer_parameters.parameters;
  --fewer_frames.frames;
  --fewer_bytes.payload_bytes;
  const std::pair<JoinResult, std::string> refusals[] = {
      {JoinUnder(fewer_jobs, request), "--max-jobs"},
      {JoinUnder(fewer_workers, request), "--max-workers"},
      {JoinUnder(fewer_parameters, request), "--max-parameters"},
      {JoinUnder(fewer_frames, request), "--max-frames"},
      {JoinUnder(fewer_bytes, request), "--max-message-bytes"},
  };
  for (const auto& [result, flag] : refusals) {
    EXPECT_EQ(result.code(), absl::StatusCode::kResourceExhausted) << flag;
    EXPECT_THAT(result.message(), HasSubstr(flag));
  }
}

TEST(Join, IsToBeTriedAgainWhereJobsOfOtherProgramsHaveTheRoom) {
  const JoinRequest request = TestJoin(0, /*world_size=*/4, "bert/optimizer-1");
  for (const AggregatorLimits& limits :
       {AggregatorLimits{.jobs = 1}, AggregatorLimits{.parameters = 57 + 44},
        AggregatorLimits{.frames = 8 + 5}}) {
    const JoinResult refused = JoinUnder(limits, request);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(refused.is_to_be_tried_again());
    EXPECT_THAT(
        refused.message(),
        HasSubstr("; it passes when jobs of other programs have ended, or nothing has come for 1m "
                  "from one whose processes are gone, or for 10m from any"));
  }
  EXPECT_FALSE(JoinUnder({.parameters = 56}, request).is_to_be_tried_again());
}

TEST(Join, IsNotToBeTriedAgainWhereItsProgramsJobsHaveTheRoom) {
  Aggregator aggregator({.limits = {.jobs = 2}});
  for (const char* job : {"bert", "bert/optimizer-1"}) {
    EXPECT_TRUE(Join(aggregator, TestJoin(0, /*world_size=*/1, job)).ok());
  }
  const JoinResult refused =
      Join(aggregator, TestJoin(0, /*world_size=*/1, "bert/all_reduce/loss"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(refused.is_to_be_tried_again());
  // "bert-large" is another.
  EXPECT_TRUE(Join(aggregator, TestJoin(0, /*world_size=*/1, "bert-large")).is_to_be_tried_again());
}

TEST(Join, ParametersThatDoNotFitACounterAreOverTheLimit) {
  Aggregator aggregator({.limits = {.parameters = UINT64_MAX - 1}});
  JoinRequest request = TestJoin(0, /*world_size=*/1);
  request.mutable_tensors(0)->set_shape(0, uint64_t{1} << 62);
  request.mutable_tensors(1)->set_shape(0, uint64_t{1} << 63);
  JoinResult result = Join(aggregator, request);
  EXPECT_EQ(result.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(result.message(), HasSubstr("--max-parameters"));
}

TEST(Join, IdleJobGivesWayButNotBefore) {
  FakeClock clock;
  Aggregator aggregator({.idle_timeout = absl::Minutes(10), .now = clock.function()});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  JoinRequest next = TestJoin(0, /*world_size=*/1);
  next.set_incarnation(9);

  clock.Advance(absl::Minutes(9));
  ExchangeResult waiting = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  clock.Advance(absl::Minutes(9));
  EXPECT_EQ(Join(aggregator, next).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(waiting.waits());

  clock.Advance(absl::Minutes(1));
  EXPECT_TRUE(Join(aggregator, TestJoin(0, /*world_size=*/2)).ok()) << "a member may still retry";
  clock.Advance(absl::Minutes(10));
  JoinResult replacement = Join(aggregator, next);
  ASSERT_TRUE(replacement.ok());
  EXPECT_NE(replacement.value().epoch(), epoch);
  EXPECT_EQ(waiting.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(waiting.is_to_be_tried_again());
  ExchangeResult stale = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
  EXPECT_EQ(stale.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(stale.message(), HasSubstr(absl::StrCat(replacement.value().epoch())));
}

TEST(Join, JobThatNobodyWaitsToBeginGivesWayAtOnce) {
  Aggregator aggregator({});
  JoinResult timed_out;
  const uint64_t call = aggregator.Join(TestJoin(0, /*world_size=*/2), timed_out.done());
  JoinRequest fixed = TestJoin(1, /*world_size=*/2);
  fixed.mutable_tensors(0)->set_name("renamed");
  EXPECT_EQ(Join(aggregator, fixed).code(), absl::StatusCode::kFailedPrecondition);
  aggregator.CancelJoin(call, absl::DeadlineExceededError("timed out"));
  EXPECT_TRUE(Join(aggregator, fixed).waits());
}

JoinRequest JoinOfAnotherProcess(uint32_t rank) {
  JoinRequest request = TestJoin(rank, /*world_size=*/2);
  request.set_incarnation(request.incarnation() + 100);
  return request;
}

// Rank r's process of a job of two has connection "r".
class Connected : public ::testing::Test {
 protected:
  AggregatorOptions Options() {
    AggregatorOptions options;
    options.restart_grace = absl::Seconds(30);
    options.is_connected = [this](const std::string& peer) { return connections_.contains(peer); };
    options.now = clock_.function();
    return options;
  }

  JoinResult JoinFrom(Aggregator& aggregator, const JoinRequest& request, const std::string& peer) {
    JoinResult result;
    aggregator.Join(request, result.done(), peer);
    return result;
  }

  uint64_t JoinBoth(Aggregator& aggregator, uint32_t min_workers = 0) {
    JoinResult last;
    for (uint32_t rank : {0, 1}) {
      JoinRequest request = TestJoin(rank, /*world_size=*/2);
      request.mutable_options()->set_min_workers(min_workers);
      if (min_workers > 0) request.mutable_options()->set_round_deadline_us(1000000);
      last = JoinFrom(aggregator, request, absl::StrCat(rank));
    }
    EXPECT_TRUE(last.ok()) << last.message();
    return last.ok() ? last.value().epoch() : 0;
  }

  FakeClock clock_;
  std::set<std::string> connections_ = {"0", "1"};
};

TEST_F(Connected, JobGivesWayToARankWhoseProcessIsGone) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator);
  ExchangeResult other = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  JoinResult refused = JoinFrom(aggregator, JoinOfAnotherProcess(1), "new");
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(refused.message(), HasSubstr("rank 1 is held by another process, connected from 1"));

  connections_.erase("1");
  EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(0), "new").code(),
            absl::StatusCode::kAlreadyExists)
      << "its own is there";
  EXPECT_TRUE(other.waits());
  EXPECT_FALSE(aggregator.AwaitNoJobs(absl::ZeroDuration()));
  JoinResult successor = JoinFrom(aggregator, JoinOfAnotherProcess(1), "new");
  EXPECT_TRUE(successor.waits());
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(other.is_to_be_tried_again());
  EXPECT_THAT(other.message(), HasSubstr("the process of rank 1 was gone"));
  EXPECT_TRUE(JoinFrom(aggregator, JoinOfAnotherProcess(0), "new too").ok());
  EXPECT_TRUE(successor.ok());
}

// All died, and their aggregator with them, which has not missed them yet.
TEST_F(Connected, ProcessThatResumesFindsItsRankTakenAndIsNotOfAnotherJob) {
  Aggregator aggregator(Options());
  JoinBoth(aggregator);
  JoinRequest resumed = JoinOfAnotherProcess(1);
  resumed.mutable_options()->set_first_step(1000);
  resumed.mutable_options()->set_parameters_crc32c(7);
  EXPECT_EQ(JoinFrom(aggregator, resumed, "new").code(), absl::StatusCode::kAlreadyExists);
  resumed.mutable_options()->set_gamma(1);
  EXPECT_EQ(JoinFrom(aggregator, resumed, "new").code(), absl::StatusCode::kFailedPrecondition);
}

// Whoever starts more workers while the aggregator has the smaller job is to see why.
TEST(Join, RefusalsOfRanksThatTheJobDoesNotHaveAreKeptUpToABound) {
  Aggregator aggregator({});
  JoinResult waiting = Join(aggregator, TestJoin(0, /*world_size=*/2));
  for (uint32_t rank = 1; rank < 100; ++rank) {
    EXPECT_FALSE(Join(aggregator, TestJoin(rank, /*world_size=*/100)).waits());
  }
  const JobStatus status = StatusOf(aggregator);
  ASSERT_EQ(status.refused_joins_size(), 1 + 64);
  EXPECT_EQ(status.refused_joins(1).rank(), 2);
  EXPECT_THAT(status.refused_joins(1).reason(), HasSubstr("world size"));
  EXPECT_TRUE(waiting.waits());
}

// A checkpoint is committed between the looks of two ranks.
TEST(Join, RanksThatResumeFromDifferentCheckpointsComeTogetherAtTheNewer) {
  const auto from = [](uint32_t rank, uint64_t step) {
    JoinRequest request = TestJoin(rank, /*world_size=*/2);
    request.mutable_options()->set_first_step(step);
    request.mutable_options()->set_parameters_crc32c(static_cast<uint32_t>(step));
    return request;
  };
  Aggregator aggregator({});
  JoinResult older = Join(aggregator, from(0, 500));
  JoinResult newer = Join(aggregator, from(1, 1000));
  EXPECT_EQ(older.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(older.is_to_be_tried_again());
  EXPECT_THAT(older.message(),
              HasSubstr("its first_step was to be 500, and that of rank 1 is 1000, of what was "
                        "saved later. Start this rank again"));
  EXPECT_TRUE(newer.waits());
  JoinResult again = Join(aggregator, from(0, 500));
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(again.is_to_be_tried_again());
  EXPECT_THAT(again.message(), HasSubstr("option first_step is 500 here but 1000 in the job"));
  JoinResult none = Join(aggregator, from(0, 0));
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(none.is_to_be_tried_again());
  EXPECT_TRUE(newer.waits());
  EXPECT_TRUE(Join(aggregator, from(0, 1000)).ok());
  EXPECT_TRUE(newer.ok());
}

// Two checkpoints between the same two synchronisations of 0/1 Adam have one first_step, and the
// same checksum of what all ranks have alike.
TEST(Join, RanksThatResumeFromDifferentLocalStepsComeTogetherAtTheLater) {
  const auto from = [](uint32_t rank, uint64_t local_steps) {
    JoinRequest request = TestJoin(rank, /*world_size=*/2);
    request.mutable_options()->set_first_step(500);
    request.mutable_options()->set_local_steps(local_steps);
    return request;
  };
  Aggregator aggregator({});
  JoinResult older = Join(aggregator, from(0, 0));
  JoinResult newer = Join(aggregator, from(1, 3));
  EXPECT_EQ(older.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(older.is_to_be_tried_again());
  EXPECT_THAT(older.message(), HasSubstr("its first_step was to be 500, and that of rank 1 is 500 "
                                         "with local_steps 3, of what was saved later"));
  JoinResult again = Join(aggregator, from(0, 2));
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(again.is_to_be_tried_again());
  EXPECT_THAT(again.message(), HasSubstr("option local_steps is 2 here but 3 in the job"));
  EXPECT_TRUE(newer.waits());
  EXPECT_TRUE(Join(aggregator, from(0, 3)).ok());
  EXPECT_TRUE(newer.ok());
}

TEST(Join, AnotherJobTakesNoPlaceByItsCheckpoint) {
  Aggregator aggregator({});
  JoinResult waiting = Join(aggregator, TestJoin(0, /*world_size=*/2));
  JoinRequest other = TestJoin(1, /*world_size=*/2);
  other.mutable_options()->set_first_step(1000);
  other.mutable_options()->set_gamma(1);
  JoinResult refused = Join(aggregator, other);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(refused.is_to_be_tried_again());
  EXPECT_TRUE(waiting.waits());
}

TEST_F(Connected, StatusNamesThoseThatAreNot) {
  Aggregator aggregator(Options());
  JoinRequest request = TestJoin(0, /*world_size=*/2);
  JoinFrom(aggregator, request, "0");
  clock_.Advance(absl::Seconds(3));
  EXPECT_EQ(StatusOf(aggregator).joining_us(), 3000000) << "for rank 1";
  EXPECT_EQ(StatusOf(aggregator).disconnected_ranks_size(), 0);
  JoinFrom(aggregator, TestJoin(1, /*world_size=*/2), "1");
  EXPECT_EQ(StatusOf(aggregator).joining_us(), 0);
  EXPECT_EQ(StatusOf(aggregator).disconnected_ranks_size(), 0);
  connections_.erase("0");
  EXPECT_THAT(StatusOf(aggregator).disconnected_ranks(), ElementsAre(0));
  EXPECT_THAT(StatusOf(aggregator).joined_ranks(), ElementsAre(0, 1));
}

TEST_F(Connected, StatusTellsForHowLongNobodyIsThere) {
  Aggregator aggregator(Options());
  JoinResult result;
  const uint64_t call = aggregator.Join(TestJoin(0, /*world_size=*/2), result.done(), "0");
  clock_.Advance(absl::Seconds(3));
  EXPECT_EQ(StatusOf(aggregator).silent_us(), 0) << "it waits";
  aggregator.CancelJoin(call, absl::CancelledError("gone"));
  EXPECT_EQ(StatusOf(aggregator).silent_us(), 3000000);
  JoinBoth(aggregator);
  clock_.Advance(absl::Seconds(5));
  connections_.erase("0");
  EXPECT_EQ(StatusOf(aggregator).silent_us(), 0) << "rank 1 is there";
  connections_.erase("1");
  EXPECT_EQ(StatusOf(aggregator).silent_us(), 5000000);
}

TEST_F(Connected, ProcessCountsByTheConnectionThatItMadeAnew) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator);
  ExchangeResult result;
  connections_ = {"0", "1 again"};
  aggregator.Exchange(FrameOf(epoch, {.rank = 1}, FLOAT32), result.done(), "1 again");
  EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").code(),
            absl::StatusCode::kAlreadyExists);
  connections_ = {"0", "1"};
  EXPECT_TRUE(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").waits())
      << "when it came by another, the one before was gone";
}

// As one does that waits at another shard.
TEST_F(Connected, ProcessCountsByTheConnectionThatItAsksBy) {
  Aggregator aggregator(Options());
  ReadErrorRequest question;
  question.set_job("job");
  question.set_epoch(JoinBoth(aggregator));
  question.set_rank(1);
  question.set_incarnation(TestJoin(1, /*world_size=*/2).incarnation());
  connections_ = {"0", "1 again"};
  EXPECT_TRUE(aggregator.ReadError(question, "1 again").ok());
  EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").code(),
            absl::StatusCode::kAlreadyExists);
  connections_ = {"0"};
  EXPECT_TRUE(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").waits());
  const absl::Status over = aggregator.ReadError(question).status();
  EXPECT_TRUE(IsTryAgain(over)) << over;
}

TEST_F(Connected, ProcessIsThereWhileOneOfItsConnectionsIs) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator);
  connections_ = {"0", "1", "1 too"};
  ExchangeResult result;
  aggregator.Exchange(FrameOf(epoch, {.rank = 1}, FLOAT32), result.done(), "1 too");
  for (const char* const left : {"1", "1 too"}) {
    connections_ = {"0", left};
    EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").code(),
              absl::StatusCode::kAlreadyExists);
  }
  connections_ = {"0"};
  EXPECT_TRUE(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").waits());
}

TEST_F(Connected, JobThatCanDoWithoutARankGivesWayOnlyWhenAllAreGone) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator, /*min_workers=*/1);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  connections_.erase("1");
  const auto another = [](uint32_t rank) {
    JoinRequest request = JoinOfAnotherProcess(rank);
    request.mutable_options()->set_min_workers(1);
    request.mutable_options()->set_round_deadline_us(1000000);
    return request;
  };
  JoinResult returning = JoinFrom(aggregator, another(1), "new");
  EXPECT_TRUE(returning.waits()) << "for its rank";
  EXPECT_EQ(StatusOf(aggregator).joined_ranks_size(), 2);
  connections_.clear();
  EXPECT_TRUE(JoinFrom(aggregator, another(0), "new too").waits());
  EXPECT_EQ(returning.code(), absl::StatusCode::kUnavailable) << "its channel calls again";
  ExchangeResult stale = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  EXPECT_EQ(stale.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(stale.is_to_be_tried_again());
}

TEST_F(Connected, JobWhoseProcessesAreAllGoneIsNotWaitedForAndLeavesRoom) {
  AggregatorOptions options = Options();
  options.limits.jobs = 1;
  Aggregator aggregator(options);
  JoinBoth(aggregator);
  const JoinRequest next = TestJoin(0, /*world_size=*/1, "next");
  EXPECT_EQ(Join(aggregator, next).code(), absl::StatusCode::kResourceExhausted);
  connections_.clear();
  EXPECT_FALSE(aggregator.AwaitNoJobs(absl::ZeroDuration())) << "they may connect again";
  EXPECT_EQ(Join(aggregator, next).code(), absl::StatusCode::kResourceExhausted);
  clock_.Advance(absl::Seconds(60));
  EXPECT_TRUE(aggregator.AwaitNoJobs(absl::ZeroDuration()));
  EXPECT_TRUE(Join(aggregator, next).ok());
}

TEST_F(Connected, IsToBeTriedAgainWhereItsProgramsJobsThatAreGoneHaveTheRoom) {
  AggregatorOptions options = Options();
  options.limits.jobs = 2;
  Aggregator aggregator(options);
  EXPECT_TRUE(JoinFrom(aggregator, TestJoin(0, /*world_size=*/1, "bert"), "0").ok());
  EXPECT_TRUE(JoinFrom(aggregator, TestJoin(0, /*world_size=*/1, "bert/optimizer-1"), "1").ok());
  const JoinRequest next = TestJoin(0, /*world_size=*/1, "bert/optimizer-2");
  EXPECT_FALSE(JoinFrom(aggregator, next, "0").is_to_be_tried_again());
  connections_.erase("1");
  const JoinResult refused = JoinFrom(aggregator, next, "0");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(refused.is_to_be_tried_again());
  clock_.Advance(absl::Seconds(60));
  EXPECT_TRUE(JoinFrom(aggregator, next, "0").ok());
}

TEST_F(Connected, JobsWhoseProcessesAreAllGoneLeaveAFullDiskOneByOne) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/full_of_the_gone"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator(Options(), state_dir.get());
  const auto begin = [&](const std::string& name, const std::string& peer) {
    JoinResult result;
    aggregator.Join(TestJoin(0, /*world_size=*/1, name), result.done(), peer);
    EXPECT_TRUE(aggregator.TakeSnapshots().ok());
    clock_.Advance(absl::Seconds(1));
  };
  begin("gone first", "first");
  begin("gone", "second");
  begin("running", "0");
  clock_.Advance(absl::Seconds(60));
  disk.is_full = true;
  JoinResult next;
  aggregator.Join(TestJoin(0, /*world_size=*/1, "next"), next.done(), "1");
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("gone", "next", "running"));
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("next", "running"));
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("next", "running")) << "these may not";
  disk.is_full = false;
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(next.ok());
}

// The clock may have been set back since that job began.
TEST(Join, AFrameOfAJobThatThisProcessNeverHadIsNotOfOneThatIsOver) {
  Aggregator aggregator({});
  const uint64_t later = absl::ToUnixNanos(absl::Now() + absl::Hours(1));
  ExchangeResult result = Exchange(aggregator, FrameOf(later, {.rank = 0}, FLOAT32));
  EXPECT_EQ(result.code(), absl::StatusCode::kDataLoss) << result.message();
}

// Nobody misses a round, so none of them would ever get a rank.
TEST_F(Connected, WhoComesBackToAJobThatAllHaveGoneFromBeginsItAnew) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator, /*min_workers=*/1);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  const auto back = [&](uint32_t rank) {
    JoinRequest request = JoinOfAnotherProcess(rank);
    request.mutable_options()->set_min_workers(1);
    request.mutable_options()->set_round_deadline_us(1000000);
    return JoinFrom(aggregator, request, absl::StrCat("new ", rank));
  };
  JoinResult first = back(0), second = back(1);
  aggregator.CloseLateRounds();
  EXPECT_TRUE(first.waits() && second.waits()) << "those before are there";
  connections_ = {"new 0", "new 1"};
  aggregator.CloseLateRounds();
  for (const JoinResult& result : {first, second}) {
    EXPECT_EQ(result.code(), absl::StatusCode::kUnavailable) << "its channel calls again";
    EXPECT_THAT(result.message(), HasSubstr("begins anew"));
  }
  EXPECT_THAT(JobNames(aggregator), IsEmpty());
}

TEST_F(Connected, WhoComesBackWaitsWhileOthersMayOnlyBeSilent) {
  Aggregator aggregator(Options());
  const uint64_t epoch = JoinBoth(aggregator, /*min_workers=*/1);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  JoinRequest request = JoinOfAnotherProcess(1);
  request.mutable_options()->set_min_workers(1);
  request.mutable_options()->set_round_deadline_us(1000000);
  JoinResult back = JoinFrom(aggregator, request, "new");
  connections_ = {"new"};  // that of rank 0 broke, and comes with its next frame
  aggregator.CloseLateRounds();
  EXPECT_TRUE(back.waits());
  JoinResult other = JoinFrom(aggregator, request, "newer");
  EXPECT_TRUE(other.waits()) << "nor does one that comes when it is broken begin anything";
  EXPECT_EQ(back.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(JobNames(aggregator), ElementsAre("job"));
}

TEST_F(Connected, JobOfAnotherSizeBeginsWhenAllAreGone) {
  Aggregator aggregator(Options());
  JoinBoth(aggregator);
  connections_.erase("1");
  JoinRequest request = TestJoin(2, /*world_size=*/3);
  const JoinResult refused = JoinFrom(aggregator, request, "new");
  EXPECT_THAT(refused.message(), HasSubstr("the world size is 3 here but 2 in the job"));
  connections_.clear();
  EXPECT_TRUE(JoinFrom(aggregator, request, "new").waits());
}

TEST_F(Connected, AJobThatCanDoWithoutSomeBeginsWithOtherOptionsWhenAllAreGone) {
  for (const uint32_t world_size : {2u, 3u}) {
    connections_ = {"0", "1"};
    Aggregator aggregator(Options());
    const uint64_t epoch = JoinBoth(aggregator, /*min_workers=*/1);
    Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
    JoinRequest request = TestJoin(0, world_size);
    request.set_incarnation(77);
    request.mutable_options()->set_min_workers(1);
    request.mutable_options()->set_round_deadline_us(5000000);
    connections_.erase("0");
    EXPECT_EQ(JoinFrom(aggregator, request, "new").code(), absl::StatusCode::kFailedPrecondition);
    connections_.clear();
    EXPECT_TRUE(JoinFrom(aggregator, request, "new").waits()) << "for the others, to begin anew";
  }
}

TEST_F(Connected, AfterARestartProcessesHaveAWhileToBeHeardOf) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/connected");
  uint64_t epoch = 0;
  {
    auto state_dir = *StateDir::Open(path, {0, 1});
    Aggregator aggregator(Options(), state_dir.get());
    JoinResult joins[] = {JoinFrom(aggregator, TestJoin(0, /*world_size=*/2), "0"),
                          JoinFrom(aggregator, TestJoin(1, /*world_size=*/2), "1")};
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    ASSERT_TRUE(joins[0].ok());
    epoch = joins[0].value().epoch();
    ASSERT_TRUE(aggregator.Suspend().ok());
  }
  auto state_dir = *StateDir::Open(path, {0, 1});
  Aggregator aggregator(Options(), state_dir.get());
  ASSERT_TRUE(aggregator.Restore(*state_dir->Recover(false)).ok());
  clock_.Advance(absl::Seconds(59));
  EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").code(),
            absl::StatusCode::kAlreadyExists);
  ExchangeResult heard;
  aggregator.Exchange(FrameOf(epoch, {.rank = 0}, FLOAT32), heard.done(), "0");
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(JoinFrom(aggregator, JoinOfAnotherProcess(0), "new").code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(JoinFrom(aggregator, JoinOfAnotherProcess(1), "new").waits());
}

// With a state directory, and a look at what there is to do for jobs.
class Forgotten : public Connected {
 protected:
  void Start() {
    aggregator_.reset();
    state_dir_ = *StateDir::Open(disk_, {0, 1});
    aggregator_ = std::make_unique<Aggregator>(Options(), state_dir_.get());
    ASSERT_TRUE(aggregator_->Restore(*state_dir_->Recover(false)).ok());
  }

  uint64_t Begin(uint32_t min_workers = 0) {
    JoinResult last;
    for (uint32_t rank : {0, 1}) {
      JoinRequest request = TestJoin(rank, /*world_size=*/2);
      request.mutable_options()->set_min_workers(min_workers);
      if (min_workers > 0) request.mutable_options()->set_round_deadline_us(1000000);
      last = JoinFrom(*aggregator_, request, absl::StrCat(rank));
    }
    EXPECT_TRUE(aggregator_->TakeSnapshots().ok());
    EXPECT_TRUE(last.ok()) << last.message();
    return last.ok() ? last.value().epoch() : 0;
  }

  // In memory; and on the disk, if it was written.
  bool IsHere() {
    aggregator_->CloseLateRounds();
    const bool can_write = aggregator_->TakeSnapshots().ok();
    const bool is_here = !JobNames(*aggregator_).empty();
    EXPECT_EQ(aggregator_->Metrics().jobs.empty(), !is_here);
    if (can_write && !is_here) {
      EXPECT_THAT(state_dir_->Recover(false)->jobs, IsEmpty());
    }
    return is_here;
  }

  FaultyDisk disk_{absl::StrCat(::testing::TempDir(), "/forgotten")};
  std::unique_ptr<StateDir> state_dir_;
  std::unique_ptr<Aggregator> aggregator_;
};

TEST_F(Forgotten, JobThatNobodyHasBeenInForADay) {
  Start();
  EXPECT_EQ(aggregator_->CloseLateRounds(), absl::InfiniteDuration()) << "there is none";
  const uint64_t epoch = Begin();
  EXPECT_EQ(aggregator_->CloseLateRounds(), absl::Hours(3));
  connections_.clear();
  clock_.Advance(absl::Hours(24) - absl::Seconds(1));
  EXPECT_TRUE(IsHere());
  clock_.Advance(absl::Seconds(1));
  testing::internal::CaptureStderr();
  EXPECT_FALSE(IsHere());
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "signpost aggregator: job 'job' is forgotten: none of its processes has a connection, "
            "and nothing has come from them for 24h (--forget-after)\n");
  const ExchangeResult late = Exchange(*aggregator_, FrameOf(epoch, {.rank = 0}, FLOAT32));
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(late.is_to_be_tried_again()) << late.message();
  EXPECT_TRUE(JoinFrom(*aggregator_, JoinOfAnotherProcess(0), "new").waits());
}

TEST_F(Forgotten, AlsoIfItCouldHaveGoneOnWithoutSome) {
  Start();
  const uint64_t epoch = Begin(/*min_workers=*/1);
  Exchange(*aggregator_, FrameOf(epoch, {.rank = 0}, FLOAT32));
  connections_.clear();
  clock_.Advance(absl::Hours(24) - absl::Seconds(1));
  EXPECT_TRUE(IsHere());
  clock_.Advance(absl::Seconds(1));
  EXPECT_FALSE(IsHere());
}

TEST_F(Forgotten, NotWhileAProcessIsConnected) {
  Start();
  Begin();
  connections_.erase("0");
  clock_.Advance(absl::Hours(48));
  EXPECT_TRUE(IsHere()) << "rank 1 may be stopped, in a debugger, say";
  connections_.erase("1");
  EXPECT_FALSE(IsHere());
}

TEST_F(Forgotten, ADayAfterTheLastFrame) {
  Start();
  const uint64_t epoch = Begin();
  connections_ = {"1 again"};
  clock_.Advance(absl::Hours(23));
  ExchangeResult result;
  aggregator_->Exchange(FrameOf(epoch, {.rank = 1}, FLOAT32), result.done(), "1 again");
  connections_.clear();
  clock_.Advance(absl::Hours(23));
  EXPECT_TRUE(IsHere());
  clock_.Advance(absl::Hours(1));
  EXPECT_FALSE(IsHere());
  EXPECT_TRUE(result.is_to_be_tried_again()) << result.message();
}

TEST_F(Forgotten, ADayAfterARestart) {
  Start();
  const uint64_t epoch = Begin();
  connections_.clear();
  clock_.Advance(absl::Hours(23));
  Start();
  clock_.Advance(absl::Hours(24) - absl::Seconds(1));
  EXPECT_TRUE(IsHere());
  clock_.Advance(absl::Seconds(1));
  EXPECT_FALSE(IsHere());
  const ExchangeResult late = Exchange(*aggregator_, FrameOf(epoch, {.rank = 0}, FLOAT32));
  EXPECT_TRUE(late.is_to_be_tried_again()) << late.message();
  for (int i = 0; i < 2; ++i) {
    Start();
    EXPECT_FALSE(IsHere());
    const ExchangeResult later = Exchange(*aggregator_, FrameOf(epoch, {.rank = 0}, FLOAT32));
    EXPECT_TRUE(later.is_to_be_tried_again()) << later.message();
  }
}

// Rank 0 has come anew, and rank 1 sends a frame of the job before when another process of the
// aggregator is there, which has neither job.
TEST_F(Forgotten, ForOneThatHadNotBegunWhenTheAggregatorDied) {
  Start();
  const uint64_t epoch = Begin();
  connections_.erase("0");
  EXPECT_TRUE(JoinFrom(*aggregator_, JoinOfAnotherProcess(0), "new").waits());
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  Start();
  EXPECT_FALSE(IsHere());
  const ExchangeResult late = Exchange(*aggregator_, FrameOf(epoch, {.rank = 1}, FLOAT32));
  EXPECT_TRUE(late.is_to_be_tried_again()) << late.message();
}

TEST_F(Forgotten, JobsThatWereNeverThereAreNot) {
  Start();
  const uint64_t epoch = Begin();
  connections_.clear();
  clock_.Advance(absl::Hours(24));
  EXPECT_FALSE(IsHere());
  Start();
  const ExchangeResult other = Exchange(*aggregator_, FrameOf(epoch - 1, {.rank = 0}, FLOAT32));
  EXPECT_EQ(other.code(), absl::StatusCode::kDataLoss) << other.message();
  EXPECT_FALSE(other.is_to_be_tried_again());
}

TEST_F(Forgotten, NotWhileSomebodyWaitsForItToBegin) {
  Start();
  JoinResult waiting;
  const uint64_t call =
      aggregator_->Join(TestJoin(0, /*world_size=*/2), waiting.done(), "that it came by");
  clock_.Advance(absl::Hours(48));
  EXPECT_TRUE(IsHere());
  EXPECT_TRUE(waiting.waits());
  aggregator_->CancelJoin(call, absl::CancelledError("gone"));
  EXPECT_FALSE(IsHere());
}

TEST_F(Forgotten, NotWhileSomebodyWaitsForTheDisk) {
  Start();
  disk_.is_full = true;
  JoinResult waiting[2];
  uint64_t calls[2];
  for (uint32_t rank : {0, 1}) {
    calls[rank] = aggregator_->Join(TestJoin(rank, /*world_size=*/2), waiting[rank].done(),
                                    "that it came by");
  }
  EXPECT_FALSE(aggregator_->TakeSnapshots().ok());
  aggregator_->CancelJoin(calls[0], absl::CancelledError("gone"));
  clock_.Advance(absl::Hours(48));
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(waiting[1].waits());
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
  aggregator_->CancelJoin(calls[1], absl::CancelledError("gone"));
  EXPECT_FALSE(IsHere());
}

TEST(Join, AJobOfWhichNoConnectionIsKnownIsNotForgotten) {
  FakeClock clock;
  Aggregator aggregator({.now = clock.function()});
  JoinAll(aggregator, /*world_size=*/2);
  clock.Advance(absl::Hours(48));
  aggregator.CloseLateRounds();
  EXPECT_THAT(JobNames(aggregator), ElementsAre("job"));
}

TEST(Join, JobThatARankHasLeftGivesWayAtOnce) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/1).ok());
  JoinResult come_back = Join(aggregator, TestJoin(1, /*world_size=*/2));
  EXPECT_EQ(come_back.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(come_back.message(), HasSubstr("rank 1 has left"));

  JoinRequest restarted = TestJoin(1, /*world_size=*/2);
  restarted.set_incarnation(9);
  EXPECT_TRUE(Join(aggregator, restarted).waits());
}

TEST(Join, AtTheJobLimitTheJobThatIsIdleForLongestGivesWay) {
  FakeClock clock;
  Aggregator aggregator(
      {.limits = {.jobs = 2}, .idle_timeout = absl::Minutes(10), .now = clock.function()});
  JoinAll(aggregator, /*world_size=*/1, "b");
  clock.Advance(absl::Minutes(1));
  JoinAll(aggregator, /*world_size=*/1, "a");
  clock.Advance(absl::Minutes(8));
  EXPECT_EQ(Join(aggregator, TestJoin(0, /*world_size=*/1, "c")).code(),
            absl::StatusCode::kResourceExhausted);
  clock.Advance(absl::Minutes(5));
  EXPECT_TRUE(Join(aggregator, TestJoin(0, /*world_size=*/1, "c")).ok());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("a", "c"));
}

TEST(Join, JobThatCannotBeSavedGivesWayWhenNobodyWaitsForItAnyMore) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/full"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  disk.is_full = true;
  JoinResult joins[2];
  uint64_t calls[2];
  for (uint32_t rank : {0, 1}) {
    calls[rank] = aggregator.Join(TestJoin(rank, /*world_size=*/2), joins[rank].done());
  }
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  aggregator.CancelJoin(calls[0], absl::DeadlineExceededError("timed out"));
  EXPECT_EQ(joins[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(joins[1].waits());
  EXPECT_EQ(Join(aggregator, JoinOfAnotherProcess(0)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(aggregator.AwaitNoJobs(absl::ZeroDuration()));
  aggregator.CancelJoin(calls[1], absl::DeadlineExceededError("timed out"));
  EXPECT_EQ(joins[1].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(aggregator.AwaitNoJobs(absl::ZeroDuration()));

  disk.is_full = false;
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(state_dir->Recover(false)->jobs, IsEmpty()) << "there is nobody to go on with it";
  JoinResult again[] = {Join(aggregator, JoinOfAnotherProcess(0)),
                        Join(aggregator, JoinOfAnotherProcess(1))};
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(again[0].ok());
  EXPECT_TRUE(again[1].ok());
}

TEST(Join, JobThatCouldNotBeSavedGoesOnWithWhoeverCallsAgain) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/full_for_a_while"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  disk.is_full = true;
  JoinResult timed_out;
  const uint64_t call = aggregator.Join(TestJoin(0, /*world_size=*/1), timed_out.done());
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  aggregator.CancelJoin(call, absl::DeadlineExceededError("timed out"));
  JoinResult again = Join(aggregator, TestJoin(0, /*world_size=*/1));
  EXPECT_TRUE(again.waits());
  disk.is_full = false;
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(again.ok());
}

TEST(Join, JobThatWasSavedWhenItsCallersWereGoneGivesWayToo) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/stalled"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult timed_out;
  const uint64_t call = aggregator.Join(TestJoin(0, /*world_size=*/1), timed_out.done());
  disk.before_write = [&] {
    aggregator.CancelJoin(call, absl::DeadlineExceededError("timed out"));
  };
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_EQ(timed_out.code(), absl::StatusCode::kDeadlineExceeded);
  JoinRequest restarted = TestJoin(0, /*world_size=*/1);
  restarted.set_incarnation(restarted.incarnation() + 100);
  JoinResult again = Join(aggregator, restarted);
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(again.ok());
}

// Of a job that is saved; `has_left` is set when it is answered.
void LeaveInto(Aggregator& aggregator, uint64_t epoch, uint32_t rank, bool& has_left) {
  LeaveRequest request;
  request.set_job(TestJoin(rank, /*world_size=*/2).job());
  request.set_epoch(epoch);
  request.set_rank(rank);
  request.set_incarnation(TestJoin(rank, /*world_size=*/2).incarnation());
  aggregator.Leave(request, [&has_left](const absl::Status& status) { has_left = status.ok(); });
}

TEST(TakeSnapshots, ALeaveThatComesMeanwhileWaitsForTheNext) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/leaves"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult joins[] = {Join(aggregator, TestJoin(0, /*world_size=*/2)),
                        Join(aggregator, TestJoin(1, /*world_size=*/2))};
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  const uint64_t epoch = joins[0].value().epoch();
  bool has_left[2] = {};
  LeaveInto(aggregator, epoch, 0, has_left[0]);
  bool is_there = false;
  disk.before_write = [&] {
    if (!std::exchange(is_there, true)) LeaveInto(aggregator, epoch, 1, has_left[1]);
  };
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(has_left[0]);
  EXPECT_FALSE(has_left[1]) << "what is written down does not have it";
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(has_left[1]);
}

TEST(TakeSnapshots, OnASlowDiskRoundsWaitBeforeWorkersWouldHaveToKeepMoreThanFour) {
  const auto send = [](Aggregator& aggregator, uint64_t epoch, uint64_t step) {
    return Exchange(aggregator, FrameOf(epoch, {.step = step}, ONE_BIT));
  };
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/slow"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult join = Join(aggregator, TestJoin(0, /*world_size=*/1));
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  const uint64_t epoch = join.value().epoch();
  for (uint64_t step : {0, 1}) EXPECT_TRUE(send(aggregator, epoch, step).ok());
  ExchangeResult held;
  bool is_being_written = false;
  disk.before_write = [&] {
    if (std::exchange(is_being_written, true)) return;
    for (uint64_t step : {2, 3}) EXPECT_TRUE(send(aggregator, epoch, step).ok());
    held = send(aggregator, epoch, 4);
  };
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(held.waits()) << "if this one is damaged, the one before is gone on from";
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  ASSERT_TRUE(held.ok()) << held.message();

  Aggregator undisturbed({});
  const uint64_t other_epoch = JoinAll(undisturbed, /*world_size=*/1);
  ExchangeResult last;
  for (uint64_t step = 0; step <= 4; ++step) last = send(undisturbed, other_epoch, step);
  EXPECT_EQ(BytesOf(*held.value().answer), BytesOf(*last.value().answer));
}

// What waits for a disk that hangs is told while it hangs.
class HangingDiskTest : public testing::Test {
 protected:
  // What becomes of it is looked at while a snapshot is written.
  void HangAt(std::function<void()> look) {
    disk_.before_write = [this, look = std::move(look), is_over = false]() mutable {
      if (!std::exchange(is_over, true)) look();
    };
    EXPECT_TRUE(aggregator_.TakeSnapshots().ok());
  }
  ExchangeResult Send(uint64_t step) {
    return Exchange(aggregator_, FrameOf(join_.value().epoch(), {.step = step}, ONE_BIT));
  }
  // The job with its first snapshot.
  void Begin() {
    join_ = Join(aggregator_, TestJoin(0, /*world_size=*/1));
    ASSERT_TRUE(aggregator_.TakeSnapshots().ok());
    ASSERT_TRUE(join_.ok());
  }

  FakeClock clock_;
  FaultyDisk disk_{absl::StrCat(::testing::TempDir(), "/hangs")};
  const std::unique_ptr<StateDir> state_dir_ = *StateDir::Open(disk_, {0, 1});
  Aggregator aggregator_{{.now = clock_.function()}, state_dir_.get()};
  JoinResult join_;
};

TEST_F(HangingDiskTest, StatusTellsForHowLongARoundIsHeld) {
  Begin();
  for (const uint64_t step : {0, 1}) EXPECT_TRUE(Send(step).ok());
  HangAt([&] {
    clock_.Advance(absl::Seconds(2));
    EXPECT_EQ(StatusOf(aggregator_).held_us(), 0) << "rounds close meanwhile";
    for (const uint64_t step : {2, 3}) EXPECT_TRUE(Send(step).ok());
    EXPECT_TRUE(Send(4).waits());
    clock_.Advance(absl::Seconds(5));
    const JobStatus status = StatusOf(aggregator_);
    EXPECT_EQ(status.held_us(), 5000000);
    EXPECT_EQ(status.snapshot_us(), 7000000);
    EXPECT_THAT(status.waiting_for_ranks(), IsEmpty());
  });
  EXPECT_EQ(StatusOf(aggregator_).snapshot_us(), 0);
  EXPECT_EQ(StatusOf(aggregator_).held_us(), 5000000) << "it takes two snapshots";
  EXPECT_TRUE(aggregator_.TakeSnapshots().ok());
  EXPECT_EQ(StatusOf(aggregator_).held_us(), 0);
}

TEST_F(HangingDiskTest, ASnapshotOfMoreThanTenSecondsIsLoggedOnceAndItsEnd) {
  Begin();
  EXPECT_TRUE(Send(0).ok());
  EXPECT_TRUE(Send(1).ok());
  const auto said = [](absl::FunctionRef<void()> speak) {
    testing::internal::CaptureStderr();
    speak();
    return testing::internal::GetCapturedStderr();
  };
  const auto tell = [&] { aggregator_.TellOfSlowSnapshot(); };
  EXPECT_EQ(said(tell), "") << "none is under way";
  HangAt([&] {
    Send(2);
    Send(3);
    EXPECT_TRUE(Send(4).waits());
    clock_.Advance(absl::Seconds(10));
    EXPECT_EQ(said(tell), "");
    clock_.Advance(absl::Milliseconds(500));
    EXPECT_EQ(
        said(tell),
        "signpost aggregator: the snapshot of job 'job' in the state directory has been under "
        "way for 10.5 s: its disk is slow, or hangs. Rounds go on until workers would have to "
        "keep too many frames, and then wait\n");
    clock_.Advance(absl::Seconds(30));
    EXPECT_EQ(said(tell), "");
    testing::internal::CaptureStderr();
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "signpost aggregator: the snapshot of job 'job' in the state directory was written in "
            "40.5 s\n");
  EXPECT_EQ(said([&] { EXPECT_TRUE(aggregator_.TakeSnapshots().ok()); }), "");
}

TEST_F(HangingDiskTest, StatusTellsForHowLongAJobWaitsToBegin) {
  join_ = Join(aggregator_, TestJoin(0, /*world_size=*/1));
  HangAt([&] {
    clock_.Advance(absl::Seconds(3));
    EXPECT_TRUE(join_.waits());
    EXPECT_EQ(StatusOf(aggregator_).held_us(), 3000000);
  });
  EXPECT_TRUE(join_.ok());
  EXPECT_EQ(StatusOf(aggregator_).held_us(), 0);
}

TEST(Restore, OfAJobThatARankHasLeftTellsTheOthers) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/left");
  std::filesystem::remove_all(path);
  uint64_t epoch = 0;
  {
    auto state_dir = *StateDir::Open(path, {0, 1});
    Aggregator aggregator({}, state_dir.get());
    JoinResult joins[] = {Join(aggregator, TestJoin(0, /*world_size=*/2)),
                          Join(aggregator, TestJoin(1, /*world_size=*/2))};
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    epoch = joins[0].value().epoch();
    bool has_left = false;
    LeaveInto(aggregator, epoch, 1, has_left);
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    ASSERT_TRUE(has_left);
  }
  auto state_dir = *StateDir::Open(path, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  ASSERT_TRUE(aggregator.Restore(*state_dir->Recover(false)).ok());
  Frame frame = FrameOf(epoch, {.rank = 0}, FLOAT32);
  frame.header.set_generation(state_dir->generation());
  ExchangeResult alone = Exchange(aggregator, std::move(frame));
  EXPECT_EQ(alone.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(alone.message(), HasSubstr("rank 1 has left"));
}

// A crash may cost a dense round, of which a snapshot is shorter without its answer.
TEST(Suspend, WritesDownTheNewestAnswersSoThatNothingIsReplayed) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/suspended");
  std::filesystem::remove_all(path);
  std::string answer;
  uint64_t epoch = 0;
  {
    auto state_dir = *StateDir::Open(path, {0, 1});
    Aggregator aggregator({}, state_dir.get());
    JoinResult joins[] = {Join(aggregator, TestJoin(0, /*world_size=*/2)),
                          Join(aggregator, TestJoin(1, /*world_size=*/2))};
    ASSERT_TRUE(aggregator.TakeSnapshots().ok());
    epoch = joins[0].value().epoch();
    Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
    ExchangeResult lost = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
    ASSERT_TRUE(lost.ok()) << lost.message();
    answer = BytesOf(*lost.value().answer);
    ASSERT_TRUE(aggregator.Suspend().ok());
  }
  auto state_dir = *StateDir::Open(path, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  ASSERT_TRUE(aggregator.Restore(*state_dir->Recover(false)).ok());
  const auto send = [&](const FrameKey& key) {
    Frame frame = FrameOf(epoch, key, FLOAT32);
    frame.header.set_generation(state_dir->generation());
    return Exchange(aggregator, std::move(frame));
  };
  EXPECT_TRUE(send({.rank = 0, .step = 1}).waits()) << "for rank 1, and asked for no earlier frame";
  ExchangeResult again = send({.rank = 1, .step = 0});
  ASSERT_TRUE(again.ok()) << again.message();
  EXPECT_EQ(BytesOf(*again.value().answer), answer);
}

TEST(TakeSnapshots, RemovesWhatItCouldNotTheNextTime) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/read_only"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult join = Join(aggregator, TestJoin(0, /*world_size=*/1));
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  bool has_left = false;
  LeaveInto(aggregator, join.value().epoch(), 0, has_left);
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  ASSERT_TRUE(has_left);
  EXPECT_THAT(*disk.List(), testing::Contains(testing::EndsWith(".snapshot")));
  disk.is_read_only = true;
  EXPECT_EQ(aggregator.TakeSnapshots().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(aggregator.TakeSnapshots().code(), absl::StatusCode::kFailedPrecondition);
  disk.is_read_only = false;
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(*disk.List(), testing::Not(testing::Contains(testing::EndsWith(".snapshot"))));
}

TEST(TakeSnapshots, WritesNothingOfAJobWhoseErrorIsSpoilt) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/spoilt"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult joins[] = {Join(aggregator, TestJoin(0, /*world_size=*/2)),
                        Join(aggregator, TestJoin(1, /*world_size=*/2))};
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  const uint64_t epoch = joins[1].value().epoch();
  for (const uint64_t step : {0, 1}) {
    for (const uint32_t rank : {0, 1}) {
      Frame frame = FrameOf(epoch, {.rank = rank, .step = step}, ONE_BIT);
      frame.header.set_generation(state_dir->generation());
      frame.header.set_error_scale(step == 1 ? 1e30f : 1);
      Exchange(aggregator, std::move(frame));
    }
  }
  ReadErrorRequest read;
  read.set_job(TestJoin(0, /*world_size=*/2).job());
  read.set_epoch(epoch);
  read.set_step(1);
  read.set_incarnation(TestJoin(0, /*world_size=*/2).incarnation());
  EXPECT_EQ(aggregator.ReadError(read).status().code(), absl::StatusCode::kOutOfRange);

  int writes = 0;
  disk.before_write = [&] { ++writes; };
  bool has_left = false;
  LeaveInto(aggregator, epoch, 0, has_left);
  EXPECT_EQ(aggregator.TakeSnapshots().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(has_left);
  EXPECT_TRUE(aggregator.TakeSnapshots().ok()) << "it is not tried again";
  EXPECT_EQ(writes, 0);
}

TEST(TakeSnapshots, LeavesNothingOfOneWhoseNameMayNotLast) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/names"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult join = Join(aggregator, TestJoin(0, /*world_size=*/1));
  disk.loses_names = true;
  EXPECT_FALSE(aggregator.TakeSnapshots().ok());
  disk.loses_names = false;
  EXPECT_THAT(*disk.List(), testing::Not(testing::Contains(testing::EndsWith(".snapshot"))));
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_TRUE(join.ok());
}

TEST(Join, EpochsAreNeverUsedAgain) {
  Aggregator aggregator({});
  std::set<uint64_t> epochs;
  for (int i = 0; i < 10; ++i) {
    const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
    EXPECT_TRUE(epochs.insert(epoch).second);
    ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/0).ok());
  }
}

}  // namespace
}  // namespace signpost
