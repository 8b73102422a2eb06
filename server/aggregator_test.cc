#include "server/aggregator.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/try_again.h"
#include "server/job.h"
#include "server/round.h"
#include "server/state_dir.h"
#include "server/test_job.h"
#include "storage/faulty_disk.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What became of a call. Not for calls that other threads end.
template <typename T>
class Result {
 public:
  // To be given to the call; copies share the result.
  auto done() {
    return [slot = slot_](absl::StatusOr<T> value) {
      EXPECT_FALSE(slot->has_value()) << "a callback was called twice";
      *slot = std::move(value);
    };
  }

  bool waits() const { return !slot_->has_value(); }
  bool ok() const { return slot_->has_value() && (*slot_)->ok(); }
  const T& value() const { return ***slot_; }
  absl::StatusCode code() const {
    return slot_->has_value() ? (*slot_)->status().code() : absl::StatusCode::kUnknown;
  }
  bool is_to_be_tried_again() const { return slot_->has_value() && IsTryAgain((*slot_)->status()); }
  std::string message() const {
    return slot_->has_value() ? std::string((*slot_)->status().message()) : "still waits";
  }

 private:
  std::shared_ptr<std::optional<absl::StatusOr<T>>> slot_ =
      std::make_shared<std::optional<absl::StatusOr<T>>>();
};
using JoinResult = Result<JoinResponse>;
using ExchangeResult = Result<Aggregator::Reply>;

class FakeClock {
 public:
  std::function<absl::Time()> function() {
    return [this] { return now_; };
  }
  void Advance(absl::Duration by) { now_ += by; }

 private:
  absl::Time now_ = absl::FromUnixSeconds(1700000000);
};

constexpr uint32_t kLargeChunkElements = 8 * 4096;

JoinResult Join(Aggregator& aggregator, const JoinRequest& request) {
  JoinResult result;
  aggregator.Join(request, result.done());
  return result;
}

ExchangeResult Exchange(Aggregator& aggregator, Frame frame) {
  ExchangeResult result;
  aggregator.Exchange(std::move(frame), result.done());
  return result;
}

// Joins all ranks and returns the epoch.
uint64_t JoinAll(Aggregator& aggregator, uint32_t world_size, const std::string& job = "job") {
  JoinResult last;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    last = Join(aggregator, TestJoin(rank, world_size, job));
  }
  EXPECT_TRUE(last.ok()) << last.message();
  return last.ok() ? last.value().epoch() : 0;
}

const Layout& TestLayout() {
  static const Layout& layout = *new Layout(LayoutOf(TestJoin(/*rank=*/0, /*world_size=*/1)));
  return layout;
}

Frame FrameOf(uint64_t epoch, const FrameKey& key, Codec codec, uint32_t seed = 0) {
  return Addressed(TestFrame(TestLayout(), key, codec, seed), "job", epoch);
}

absl::Status Leave(Aggregator& aggregator, uint64_t epoch, uint32_t rank,
                   const std::string& job = "job") {
  LeaveRequest request;
  request.set_job(job);
  request.set_epoch(epoch);
  request.set_rank(rank);
  request.set_incarnation(1000 + rank);
  absl::Status result = absl::UnknownError("still waits");
  aggregator.Leave(request, [&](absl::Status status) { result = status; });
  return result;
}

JobStatus StatusOf(const Aggregator& aggregator, const std::string& job = "job") {
  StatusRequest request;
  request.set_job(job);
  const StatusResponse response = aggregator.Status(request);
  EXPECT_EQ(response.jobs_size(), 1);
  return response.jobs_size() == 1 ? response.jobs(0) : JobStatus();
}

std::vector<std::string> JobNames(const Aggregator& aggregator) {
  std::vector<std::string> names;
  const StatusResponse response = aggregator.Status({});
  for (const JobStatus& job : response.jobs()) names.push_back(job.job());
  return names;
}

// What Round makes of the same frames, one step after the other.
class SerialChunk {
 public:
  explicit SerialChunk(uint32_t chunk) : error_(TestLayout().chunks()[chunk].elements) {}

  std::string Step(std::vector<Frame> frames) {
    Round round(frames.size());
    for (Frame& frame : frames) EXPECT_TRUE(round.Contribute(std::move(frame)).ok());
    return BytesOf(*round.Close(TestLayout(), absl::MakeSpan(error_)));
  }

 private:
  std::vector<float> error_;
};

// ---- Join

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
  for (const JoinRequest& request :
       {no_name, long_name, no_block, TestJoin(2, /*world_size=*/2), TestJoin(0, 0)}) {
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
  EXPECT_EQ(returning.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(returning.is_to_be_tried_again());
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

TEST(Join, WhatAllJobsNeedIsReserved) {
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
    EXPECT_THAT(third.message(),
                AllOf(HasSubstr("--max-held-bytes"), HasSubstr(absl::StrCat(3 * of_one)),
                      HasSubstr(absl::StrCat(3 * of_one - 1))));
    EXPECT_THAT(JobNames(aggregator), ElementsAre("a", "b"));
  }
}

TEST(Join, AFrameOfEachOfManyRanksIsReserved) {
  JoinRequest request = LargeJoin(0, "a");
  request.set_world_size(1023);
  const uint64_t needed = ReservedBytes(1023, LayoutOf(request), {0, 1});
  EXPECT_GT(needed, uint64_t{1023} * 4 * kLargeChunkElements);
  Aggregator small({.limits = {.held_bytes = needed - 1}});
  EXPECT_EQ(Join(small, request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(JobNames(small), IsEmpty());
  Aggregator large({.limits = {.held_bytes = needed}});
  EXPECT_TRUE(Join(large, request).waits());
}

TEST(Join, ChunksOfOtherShardsNeedNothingHere) {
  const Layout layout = LayoutOf(LargeJoin(0, "a"));
  const uint64_t frame = 4 * kLargeChunkElements;
  EXPECT_EQ(ReservedBytes(2, layout, {0, 1}), 8 * frame + 4 * frame);
  EXPECT_EQ(ReservedBytes(2, layout, {0, 2}), 4 * frame + 4 * frame);
  EXPECT_EQ(ReservedBytes(2, layout, {4, 5}), 0);
}

TEST(Join, SeveralJobsGiveWayToOneThatNeedsTheirMemory) {
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

TEST(Join, AJobThatWasRestoredGoesOnWhateverItNeeds) {
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

TEST(TakeSnapshots, RemovesWhatItCouldNotTheNextTime) {
  FaultyDisk disk(absl::StrCat(::testing::TempDir(), "/read_only"));
  auto state_dir = *StateDir::Open(disk, {0, 1});
  Aggregator aggregator({}, state_dir.get());
  JoinResult join = Join(aggregator, TestJoin(0, /*world_size=*/1));
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  LeaveRequest leave;
  leave.set_job(TestJoin(0, /*world_size=*/1).job());
  leave.set_epoch(join.value().epoch());
  leave.set_incarnation(TestJoin(0, /*world_size=*/1).incarnation());
  bool has_left = false;
  aggregator.Leave(leave, [&](const absl::Status& status) { has_left = status.ok(); });
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  ASSERT_TRUE(has_left);
  EXPECT_THAT(*disk.List(), testing::Contains(testing::EndsWith(".snapshot")));
  disk.is_read_only = true;
  EXPECT_EQ(aggregator.TakeSnapshots().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(aggregator.TakeSnapshots().code(), absl::StatusCode::kUnavailable);
  disk.is_read_only = false;
  EXPECT_TRUE(aggregator.TakeSnapshots().ok());
  EXPECT_THAT(*disk.List(), testing::Not(testing::Contains(testing::EndsWith(".snapshot"))));
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

// ---- Exchange

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

TEST(Exchange, AnswersAllRanksWithTheSameBytesOnceTheLastFrameIsThere) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/3);
  ExchangeResult first = Exchange(aggregator, FrameOf(epoch, {.rank = 2}, ONE_BIT));
  ExchangeResult second = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, ONE_BIT));
  EXPECT_TRUE(first.waits() && second.waits());
  ExchangeResult third = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, ONE_BIT));
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  EXPECT_EQ(first.value().answer, third.value().answer);
  EXPECT_EQ(second.value().answer, third.value().answer);

  SerialChunk serial(/*chunk=*/0);
  std::vector<Frame> frames;
  for (uint32_t rank : {0, 1, 2}) frames.push_back(FrameOf(epoch, {.rank = rank}, ONE_BIT));
  EXPECT_EQ(BytesOf(*first.value().answer), serial.Step(std::move(frames)));
}

TEST(Exchange, TellsEachRankHowLongItWaited) {
  FakeClock clock;
  Aggregator aggregator({.now = clock.function()});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/3);
  ExchangeResult first = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  clock.Advance(absl::Seconds(2));
  ExchangeResult second = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
  ExchangeResult first_again = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  clock.Advance(absl::Seconds(3));
  ExchangeResult third = Exchange(aggregator, FrameOf(epoch, {.rank = 2}, FLOAT32));
  ASSERT_TRUE(first_again.ok() && second.ok() && third.ok());
  EXPECT_EQ(first_again.value().waited, absl::Seconds(5));
  EXPECT_EQ(second.value().waited, absl::Seconds(3));
  EXPECT_EQ(third.value().waited, absl::ZeroDuration());
}

TEST(Exchange, ResendTakesThePlaceOfTheWaitingCall) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ExchangeResult lost = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  ExchangeResult resend = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  EXPECT_EQ(lost.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(lost.message(), AllOf(HasSubstr("rank 0"), HasSubstr("step 0")));
  EXPECT_TRUE(resend.waits());
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32)).ok());
  EXPECT_TRUE(resend.ok());
}

TEST(Exchange, ResendAfterTheRoundHasClosedGetsTheSameAnswer) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, ONE_BIT));
  ExchangeResult answered = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, ONE_BIT));
  ASSERT_TRUE(answered.ok());
  // Rank 1 is already at the next step.
  Exchange(aggregator, FrameOf(epoch, {.rank = 1, .step = 1}, ONE_BIT));
  ExchangeResult resend = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, ONE_BIT));
  ASSERT_TRUE(resend.ok()) << resend.message();
  EXPECT_EQ(resend.value().answer, answered.value().answer);
}

TEST(Exchange, OtherBytesUnderTheSameKeyAreRefusedBeforeAndAfterTheRoundHasClosed) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ExchangeResult waiting = Exchange(aggregator, FrameOf(epoch, {.rank = 0, .chunk = 1}, FLOAT32));
  const auto forged = [&](Codec codec) {
    return Exchange(aggregator, FrameOf(epoch, {.rank = 0, .chunk = 1}, codec, /*seed=*/1));
  };
  for (int closed = 0; closed < 2; ++closed) {
    for (Codec codec : {FLOAT32, ONE_BIT}) {
      EXPECT_EQ(forged(codec).code(), absl::StatusCode::kAlreadyExists);
      EXPECT_THAT(forged(codec).message(),
                  AllOf(HasSubstr("rank 0"), HasSubstr("step 0"), HasSubstr("chunk 1")));
    }
    if (closed) break;
    EXPECT_TRUE(waiting.waits());
    EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.rank = 1, .chunk = 1}, FLOAT32)).ok());
    EXPECT_TRUE(waiting.ok());
  }
}

TEST(Exchange, WrongStepIsRefusedNamingTheExpectedOne) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  for (uint64_t step = 0; step < 3; ++step) {
    for (uint64_t wrong : {step + 1, step + 2, step - 2, UINT64_MAX}) {
      ExchangeResult result = Exchange(aggregator, FrameOf(epoch, {.step = wrong}, FLOAT32));
      EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition) << wrong;
      EXPECT_THAT(result.message(), HasSubstr(absl::StrCat("step ", step, " is expected")));
    }
    ASSERT_TRUE(Exchange(aggregator, FrameOf(epoch, {.step = step}, FLOAT32)).ok());
  }
}

TEST(Exchange, MixedCodecsAreRefused) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ExchangeResult waiting = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  ExchangeResult other = Exchange(aggregator, FrameOf(epoch, {.rank = 1}, BFLOAT16));
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(waiting.waits());
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32)).ok());
}

TEST(Exchange, WrongJobOrEpochIsRefusedAndNamed) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  ExchangeResult other_epoch = Exchange(aggregator, FrameOf(epoch + 1, {}, FLOAT32));
  EXPECT_EQ(other_epoch.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(other_epoch.message(), HasSubstr(absl::StrCat("epoch ", epoch, " is expected")));
  ExchangeResult other_job =
      Exchange(aggregator, Addressed(TestFrame(TestLayout(), {}, FLOAT32), "another", epoch));
  EXPECT_EQ(other_job.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(other_job.message(), HasSubstr("'another'"));
}

TEST(Exchange, IsRefusedBeforeTheJobIsComplete) {
  FakeClock clock;
  Aggregator aggregator({.now = clock.function()});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/0).ok());
  Join(aggregator, TestJoin(0, /*world_size=*/2));
  ExchangeResult guess = Exchange(aggregator, FrameOf(epoch + 1, {}, FLOAT32));
  EXPECT_EQ(guess.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(guess.message(), HasSubstr("before all of its ranks have joined"));
  EXPECT_EQ(Leave(aggregator, epoch + 1, /*rank=*/0).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Exchange, FramesThatDoNotPassCheckFrameAreRefused) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  Frame changed = FrameOf(epoch, {.rank = 0}, ONE_BIT);
  changed.payload.data()[0] ^= 1;
  EXPECT_EQ(Exchange(aggregator, std::move(changed)).code(), absl::StatusCode::kInvalidArgument);
  Frame no_such_rank = FrameOf(epoch, {.rank = 2}, ONE_BIT);
  EXPECT_EQ(Exchange(aggregator, std::move(no_such_rank)).code(),
            absl::StatusCode::kInvalidArgument);
  Frame no_such_chunk = FrameOf(epoch, {.rank = 0}, ONE_BIT);
  no_such_chunk.header.set_chunk(2);
  EXPECT_EQ(Exchange(aggregator, std::move(no_such_chunk)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(StatusOf(aggregator).waiting_for_ranks(), IsEmpty());
}

TEST(Exchange, ChunkOfAnotherShardIsRefusedNamingItsOwner) {
  const std::vector<uint32_t> owners = TestLayout().ShardOfChunk(2);
  ASSERT_THAT(owners, ElementsAre(0, 1));
  Aggregator aggregator({.shard = 1, .shard_count = 2});
  JoinRequest request = TestJoin(0, /*world_size=*/1);
  request.set_shard(1);
  request.set_shard_count(2);
  JoinResult joined = Join(aggregator, request);
  ASSERT_TRUE(joined.ok());
  const uint64_t epoch = joined.value().epoch();

  ExchangeResult misdirected = Exchange(aggregator, FrameOf(epoch, {.chunk = 0}, FLOAT32));
  EXPECT_EQ(misdirected.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(misdirected.message(), HasSubstr("belongs to shard 0"));
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.chunk = 1}, FLOAT32)).ok());
  EXPECT_EQ(StatusOf(aggregator).chunks(), 1);
}

TEST(Exchange, ErrorIsCommittedOncePerStepWhateverIsSentAgain) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  SerialChunk serial(/*chunk=*/0);
  for (uint64_t step = 0; step < 6; ++step) {
    const auto frame = [&](uint32_t rank) {
      return FrameOf(epoch, {.rank = rank, .step = step}, ONE_BIT);
    };
    Exchange(aggregator, frame(1));
    Exchange(aggregator, frame(1));
    Exchange(aggregator, frame(0));
    Exchange(aggregator, frame(0));
    ExchangeResult result = Exchange(aggregator, frame(1));
    ASSERT_TRUE(result.ok());
    std::vector<Frame> frames;
    frames.push_back(frame(0));
    frames.push_back(frame(1));
    EXPECT_EQ(BytesOf(*result.value().answer), serial.Step(std::move(frames))) << step;
  }
}

TEST(Exchange, JobsDoNotTouchEachOther) {
  Aggregator aggregator({});
  std::map<std::string, uint64_t> epochs;
  for (const char* job : {"a", "b"}) epochs[job] = JoinAll(aggregator, /*world_size=*/1, job);
  EXPECT_NE(epochs["a"], epochs["b"]);
  SerialChunk serial(/*chunk=*/0);
  const auto step = [&](const std::string& job, uint64_t step, uint32_t seed) {
    return Exchange(aggregator, Addressed(TestFrame(TestLayout(), {.step = step}, ONE_BIT, seed),
                                          job, epochs[job]));
  };
  for (uint64_t i = 0; i < 3; ++i) {
    ExchangeResult result = step("a", i, /*seed=*/0);
    ASSERT_TRUE(result.ok());
    std::vector<Frame> frames;
    frames.push_back(FrameOf(epochs["a"], {.step = i}, ONE_BIT));
    EXPECT_EQ(BytesOf(*result.value().answer), serial.Step(std::move(frames)));
    EXPECT_TRUE(step("b", i, /*seed=*/1).ok());
  }
  ASSERT_TRUE(Leave(aggregator, epochs["a"], /*rank=*/0, "a").ok());
  EXPECT_TRUE(step("b", 3, /*seed=*/1).ok());
}

TEST(Exchange, RoundOutOfRangeEndsItsChunkForAllRanks) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  const auto frame = [&](uint32_t rank, uint64_t step, float error_scale) {
    Frame frame = FrameOf(epoch, {.rank = rank, .step = step}, ONE_BIT);
    frame.header.set_error_scale(error_scale);
    return frame;
  };
  Exchange(aggregator, frame(0, 0, 1));
  ASSERT_TRUE(Exchange(aggregator, frame(1, 0, 1)).ok());
  ExchangeResult first = Exchange(aggregator, frame(0, 1, 1e30f));
  ExchangeResult second = Exchange(aggregator, frame(1, 1, 1e30f));
  EXPECT_EQ(first.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(second.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Exchange(aggregator, frame(0, 1, 1e30f)).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Exchange(aggregator, frame(0, 0, 1)).ok()) << "the last answer is still there";
}

// ---- Late ranks

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

// ---- Leave, Drain

TEST(Leave, EndsWaitingCallsNamingTheRank) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/3);
  ExchangeResult waiting = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/2).ok());
  EXPECT_EQ(waiting.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(waiting.message(), HasSubstr("rank 2 has left"));
  ExchangeResult later = Exchange(aggregator, FrameOf(epoch, {.rank = 1, .chunk = 1}, FLOAT32));
  EXPECT_THAT(later.message(), HasSubstr("rank 2 has left"));
}

TEST(Leave, KeepsTheLastAnswerForRanksThatHaveNotSeenIt) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/1).ok());
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32)).ok());
}

TEST(Leave, ForgetsTheJobWhenAllRanksHaveLeft) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/0).ok());
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/0).ok());
  EXPECT_THAT(JobNames(aggregator), ElementsAre("job"));
  EXPECT_THAT(StatusOf(aggregator).joined_ranks(), ElementsAre(1));
  ASSERT_TRUE(Leave(aggregator, epoch, /*rank=*/1).ok());
  EXPECT_THAT(JobNames(aggregator), IsEmpty());
  EXPECT_TRUE(Leave(aggregator, epoch, /*rank=*/1).ok()) << "a retry is not an error";
}

TEST(Leave, OfAnotherEpochOrRankChangesNothing) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  EXPECT_TRUE(Leave(aggregator, epoch - 1, /*rank=*/0).ok());
  EXPECT_EQ(Leave(aggregator, epoch, /*rank=*/1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {}, FLOAT32)).ok());
}

TEST(Drain, EndsAllWaitingCallsAndRefusesNewOnes) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  ExchangeResult exchange = Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  JoinResult join = Join(aggregator, TestJoin(0, /*world_size=*/2, "other"));
  aggregator.Drain();
  aggregator.Drain();
  EXPECT_EQ(exchange.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(join.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32)).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(Join(aggregator, TestJoin(0, /*world_size=*/1)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Leave(aggregator, epoch, /*rank=*/0).code(), absl::StatusCode::kUnavailable);
}

TEST(Drain, HappensAtDestruction) {
  ExchangeResult exchange;
  JoinResult join;
  {
    Aggregator aggregator({});
    const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
    aggregator.Exchange(FrameOf(epoch, {.rank = 0}, FLOAT32), exchange.done());
    aggregator.Join(TestJoin(0, /*world_size=*/2, "other"), join.done());
  }
  EXPECT_EQ(exchange.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(join.code(), absl::StatusCode::kUnavailable);
}

TEST(StopAdmitting, RefusesNewJobsWhileOthersGoOn) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  JoinResult beginning = Join(aggregator, TestJoin(0, /*world_size=*/2, "beginning"));
  aggregator.StopAdmitting();
  EXPECT_EQ(Join(aggregator, TestJoin(0, /*world_size=*/1, "new")).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Exchange(aggregator, FrameOf(epoch, {}, FLOAT32)).ok());
  EXPECT_TRUE(Join(aggregator, TestJoin(1, /*world_size=*/2, "beginning")).ok());
  EXPECT_TRUE(beginning.ok());
}

TEST(AwaitNoJobs, ReturnsWhenTheLastJobIsOverAndTakesDesertedOnesForOver) {
  Aggregator aggregator({});
  EXPECT_TRUE(aggregator.AwaitNoJobs(absl::ZeroDuration()));
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/1);
  JoinResult deserted;
  const uint64_t call = aggregator.Join(TestJoin(0, /*world_size=*/2, "deserted"), deserted.done());
  aggregator.CancelJoin(call, absl::DeadlineExceededError("timed out"));
  EXPECT_FALSE(aggregator.AwaitNoJobs(absl::ZeroDuration()));
  std::thread leaver([&] { EXPECT_TRUE(Leave(aggregator, epoch, /*rank=*/0).ok()); });
  EXPECT_TRUE(aggregator.AwaitNoJobs(absl::InfiniteDuration()));
  leaver.join();
}

// ---- Status

TEST(Status, BeforeTheJobIsCompleteItNamesTheRanksThatHaveNotJoined) {
  Aggregator aggregator({.shard = 1, .shard_count = 2});
  JoinRequest request = TestJoin(1, /*world_size=*/3);
  request.set_shard(1);
  request.set_shard_count(2);
  Join(aggregator, request);
  EXPECT_EQ(aggregator.Status({}).shard(), 1);
  EXPECT_EQ(aggregator.Status({}).shard_count(), 2);
  const JobStatus status = StatusOf(aggregator);
  EXPECT_EQ(status.world_size(), 3);
  EXPECT_EQ(status.parameters(), 57);
  EXPECT_EQ(status.chunks(), 1) << "there are two chunks for two shards";
  EXPECT_THAT(status.joined_ranks(), ElementsAre(1));
  EXPECT_THAT(status.waiting_for_ranks(), ElementsAre(0, 2));
}

TEST(Status, NamesTheRanksThatTheChunkFurthestBehindWaitsFor) {
  FakeClock clock;
  Aggregator aggregator({.now = clock.function()});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/3);
  EXPECT_THAT(StatusOf(aggregator).waiting_for_ranks(), IsEmpty());
  for (uint32_t rank : {0, 1, 2}) Exchange(aggregator, FrameOf(epoch, {.rank = rank}, ONE_BIT));
  EXPECT_EQ(StatusOf(aggregator).step(), 0) << "chunk 1 is still there";
  // Chunk 0 waits for 1 and 2 at step 1, chunk 1 for 2 at step 0.
  Exchange(aggregator, FrameOf(epoch, {.rank = 0, .step = 1}, ONE_BIT));
  EXPECT_EQ(StatusOf(aggregator).step(), 1) << "nobody waits at chunk 1";
  clock.Advance(absl::Seconds(1));
  Exchange(aggregator, FrameOf(epoch, {.rank = 0, .chunk = 1}, ONE_BIT));
  clock.Advance(absl::Seconds(1));
  Exchange(aggregator, FrameOf(epoch, {.rank = 1, .chunk = 1}, ONE_BIT));
  clock.Advance(absl::Seconds(1));

  const JobStatus status = StatusOf(aggregator);
  EXPECT_EQ(status.step(), 0);
  EXPECT_THAT(status.waiting_for_ranks(), ElementsAre(2));
  EXPECT_EQ(status.waiting_us(), 2'000'000);
  EXPECT_THAT(status.joined_ranks(), ElementsAre(0, 1, 2));
  EXPECT_EQ(status.chunks(), 2);
}

TEST(Status, CountsRoundsAndPayloadBytes) {
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, /*world_size=*/2);
  Exchange(aggregator, FrameOf(epoch, {.rank = 0}, FLOAT32));
  Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
  Exchange(aggregator, FrameOf(epoch, {.rank = 1}, FLOAT32));
  Exchange(aggregator, FrameOf(epoch, {.rank = 0, .step = 1}, SKIP));
  Exchange(aggregator, FrameOf(epoch, {.rank = 1, .step = 1}, ONE_BIT));
  const uint64_t dense = TestLayout().PayloadBytes(FLOAT32, 0);
  const uint64_t onebit = TestLayout().PayloadBytes(ONE_BIT, 0);
  const uint64_t skip = TestLayout().PayloadBytes(SKIP, 0);
  const JobStatus status = StatusOf(aggregator);
  EXPECT_EQ(status.rounds_closed(), 2);
  EXPECT_EQ(status.rounds_skipped(), 1);
  EXPECT_EQ(status.payload_bytes_received(), 3 * dense + skip + onebit);
  EXPECT_EQ(status.payload_bytes_sent(), 3 * dense + 2 * skip);
}

TEST(Status, OfAJobThatIsNotThereIsEmpty) {
  Aggregator aggregator({});
  JoinAll(aggregator, /*world_size=*/1);
  StatusRequest request;
  request.set_job("another");
  EXPECT_EQ(aggregator.Status(request).jobs_size(), 0);
  EXPECT_EQ(aggregator.Status({}).jobs_size(), 1);
}

// ---- Threads

Codec CodecOfStep(uint64_t step) {
  constexpr Codec kCodecs[] = {FLOAT32, ONE_BIT, BFLOAT16, ONE_BIT, ONE_BIT};
  return kCodecs[step % 5];
}

// Rank 1 skips every seventh step.
Frame HammerFrame(const FrameKey& key) {
  const bool skips = key.rank == 1 && key.step % 7 == 6;
  return TestFrame(TestLayout(), key, skips ? SKIP : CodecOfStep(key.step));
}

// Answers by (chunk, step), as the first rank to see each got it. Thread-safe.
class AnswerLog {
 public:
  void Record(const Answer& answer) {
    const std::string bytes = BytesOf(answer);
    absl::MutexLock lock(&mutex_);
    const auto [entry, is_new] =
        answers_.try_emplace({answer.header.chunk(), answer.header.step()}, bytes);
    EXPECT_EQ(entry->second, bytes) << answer.header.ShortDebugString();
  }
  std::string Find(uint32_t chunk, uint64_t step) {
    absl::MutexLock lock(&mutex_);
    return answers_[{chunk, step}];
  }

 private:
  absl::Mutex mutex_;
  std::map<std::tuple<uint32_t, uint64_t>, std::string> answers_ ABSL_GUARDED_BY(mutex_);
};

// Sends a frame, sometimes several times without waiting, until one of the calls is answered.
// False if the step is over: another thread of the rank was faster.
bool ExchangeStubbornly(Aggregator& aggregator, uint64_t epoch, const FrameKey& key,
                        std::mt19937& random, AnswerLog& log) {
  struct Call {
    absl::Notification ended;
    absl::StatusOr<Aggregator::Reply> reply;
  };
  while (true) {
    std::vector<std::unique_ptr<Call>> calls(1 + random() % 3);
    for (std::unique_ptr<Call>& call : calls) {
      call = std::make_unique<Call>();
      aggregator.Exchange(Addressed(HammerFrame(key), "job", epoch),
                          [&call = *call](absl::StatusOr<Aggregator::Reply> reply) {
                            call.reply = std::move(reply);
                            call.ended.Notify();
                          });
    }
    bool answered = false, over = false;
    for (const std::unique_ptr<Call>& call : calls) {
      call->ended.WaitForNotification();
      const absl::Status& status = call->reply.status();
      if (status.ok()) log.Record(*call->reply->answer);
      answered |= status.ok();
      over |= absl::IsFailedPrecondition(status);
      EXPECT_TRUE(status.ok() || absl::IsAborted(status) || absl::IsFailedPrecondition(status))
          << status;
    }
    if (answered || over) return answered;
  }
}

TEST(Aggregator, UnderManyThreadsAndResendsItGivesWhatASerialRunGives) {
  constexpr uint32_t kWorkers = 5;
  constexpr uint32_t kChunks = 2;
  constexpr uint64_t kSteps = 40;
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, kWorkers);
  AnswerLog log;
  std::vector<std::thread> threads;
  // Two threads per rank and chunk: a network that delivers everything twice, in any order.
  for (uint32_t i = 0; i < 2 * kWorkers * kChunks; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      FrameKey key = {.rank = i % kWorkers, .chunk = i / kWorkers % kChunks};
      for (; key.step < kSteps; ++key.step) {
        ExchangeStubbornly(aggregator, epoch, key, random, log);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    SerialChunk serial(chunk);
    for (uint64_t step = 0; step < kSteps; ++step) {
      std::vector<Frame> frames;
      for (uint32_t rank = 0; rank < kWorkers; ++rank) {
        frames.push_back(HammerFrame({.rank = rank, .step = step, .chunk = chunk}));
      }
      ASSERT_EQ(log.Find(chunk, step), serial.Step(std::move(frames)))
          << "chunk " << chunk << " step " << step;
    }
  }
  EXPECT_EQ(StatusOf(aggregator).rounds_closed(), kChunks * kSteps);
}

TEST(Aggregator, DrainUnderLoadEndsEveryCall) {
  constexpr uint32_t kWorkers = 4;
  Aggregator aggregator({});
  const uint64_t epoch = JoinAll(aggregator, kWorkers);
  absl::Notification running;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      for (uint64_t step = 0;; ++step) {
        absl::Notification ended;
        absl::Status status;
        aggregator.Exchange(FrameOf(epoch, {.rank = rank, .step = step}, ONE_BIT),
                            [&](absl::StatusOr<Aggregator::Reply> reply) {
                              status = reply.status();
                              ended.Notify();
                            });
        ended.WaitForNotification();
        if (rank == 0 && step == 20) running.Notify();
        if (status.ok()) continue;
        EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
        break;
      }
    });
  }
  running.WaitForNotification();
  aggregator.Drain();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace signpost
