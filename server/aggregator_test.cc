#include "server/aggregator.h"

#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/round.h"
#include "server/test_calls.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

// ---- Exchange

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
  EXPECT_EQ(first.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(second.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Exchange(aggregator, frame(0, 1, 1e30f)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(Exchange(aggregator, frame(0, 0, 1)).ok()) << "the last answer is still there";
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
