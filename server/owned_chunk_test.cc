// Chunks that an earlier process served: which of its rounds closed without whom. What a chunk does
// otherwise, aggregator_test has.

#include "server/owned_chunk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/try_again.h"
#include "server/test_job.h"
#include "trace/merge.h"
#include "trace/recorder.h"

namespace signpost {
namespace {

using ::testing::DoubleEq;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr uint32_t kWorkers = 4;
constexpr uint64_t kOpenStep = 5;

// A frame is a thirtieth of the parameters' fp32 size: snapshots are not due soon.
Layout OneBlock() {
  JoinRequest join = TestJoin(0, kWorkers);
  join.mutable_options()->set_block_elements(512);
  join.mutable_options()->set_chunk_elements(512);
  join.mutable_options()->set_round_deadline_us(1'000'000);
  join.mutable_options()->set_min_workers(2);
  join.clear_tensors();
  Tensor& tensor = *join.add_tensors();
  tensor.set_name("tensor");
  tensor.add_shape(512);
  return LayoutOf(join);
}

// A chunk of a job that goes on with two of its workers. Rounds wait for a second; a restarted
// process waits for 30 until all have come back.
class OwnedChunkTest : public ::testing::Test {
 protected:
  using Result = std::shared_ptr<std::optional<absl::StatusOr<OwnedChunk::Reply>>>;

  ~OwnedChunkTest() override { chunk_->End(absl::CancelledError()); }

  // As an earlier process left it, with the rounds that it decided to close without some rank.
  void Restore(const LateRanks& late_ranks) {
    chunk_->Restore({.open_step = kOpenStep, .late_ranks = late_ranks}, generation_, now_);
  }

  Result Exchange(Frame frame) {
    auto result = std::make_shared<std::optional<absl::StatusOr<OwnedChunk::Reply>>>();
    chunk_->Exchange(std::move(frame), now_, [result](absl::StatusOr<OwnedChunk::Reply> reply) {
      *result = std::move(reply);
    });
    return result;
  }

  // The frame of a rank that has had the answers of the steps before, at least.
  Result Send(uint32_t rank, uint64_t step, uint64_t answered_steps = 0,
              std::vector<uint32_t> late_ranks = {}, Codec codec = ONE_BIT) {
    Frame frame = TestFrame(layout_, {rank, step, 0}, codec);
    frame.header.set_generation(generation_);
    frame.header.set_answered_steps(std::max(step, answered_steps));
    frame.header.mutable_late_ranks()->Add(late_ranks.begin(), late_ranks.end());
    return Exchange(std::move(frame));
  }

  Result Listen(uint32_t rank, uint64_t step) { return Exchange(ListenFrame(rank, step)); }
  // Of one that has had the step's answer before.
  Result ListenAgain(uint32_t rank, uint64_t step, const std::vector<uint32_t>& late_ranks,
                     std::optional<uint64_t> generation = {}) {
    Frame frame = ListenFrame(rank, step);
    frame.header.set_generation(generation.value_or(generation_));
    frame.header.set_answered_steps(step + 1);
    frame.header.mutable_late_ranks()->Add(late_ranks.begin(), late_ranks.end());
    return Exchange(std::move(frame));
  }
  static Frame ListenFrame(uint32_t rank, uint64_t step) {
    Frame frame;
    frame.header.set_rank(rank);
    frame.header.set_step(step);
    frame.header.set_codec(LISTEN);
    return frame;
  }

  std::vector<uint32_t> LeaveOutAfter(absl::Duration duration) {
    now_ += duration;
    return chunk_->LeaveOut(attendance_, now_);
  }

  static std::string BytesOf(const Result& result) {
    return signpost::BytesOf(*(*result)->value().answer);
  }

  const Layout layout_ = OneBlock();
  const uint64_t generation_ = 2;
  Attendance attendance_ = {.is_absent = std::vector<bool>(kWorkers),
                            .absent_since = std::vector<absl::Time>(kWorkers),
                            .has_left = std::vector<bool>(kWorkers),
                            .first_step = std::vector<uint64_t>(kWorkers),
                            .restart_grace = absl::Seconds(30)};
  absl::Time now_ = absl::FromUnixSeconds(1700000000);
  Bell bell_;
  std::unique_ptr<OwnedChunk> chunk_ =
      std::make_unique<OwnedChunk>(layout_, /*chunk=*/0, kWorkers, &bell_);
};

// Frames of 2 KiB, which take their memory from a room.
class ChunkInARoomTest : public OwnedChunkTest {
 protected:
  Result Ask(uint32_t rank, uint64_t step, uint64_t most) {
    Frame frame = TestFrame(layout_, {rank, step, 0}, FLOAT32);
    frame.header.set_generation(generation_);
    frame.header.set_answered_steps(step);
    auto result = std::make_shared<std::optional<absl::StatusOr<OwnedChunk::Reply>>>();
    const auto done = [result](absl::StatusOr<OwnedChunk::Reply> reply) {
      *result = std::move(reply);
    };
    chunk_->Exchange(std::move(frame), now_, done, {&room_, most, /*limit=*/most});
    return result;
  }

  Room room_;
};

TEST_F(ChunkInARoomTest, WhoIsRefusedIsNotLate) {
  const Result first = Ask(0, 0, 2048), second = Ask(1, 0, 4096);
  ASSERT_FALSE(first->has_value() || second->has_value());
  now_ += absl::Milliseconds(900);
  EXPECT_TRUE(absl::IsResourceExhausted((*Ask(2, 0, 4096))->status()));
  EXPECT_THAT(LeaveOutAfter(absl::Milliseconds(900)), IsEmpty());
  EXPECT_FALSE(chunk_->IsOverdue(2, now_));
  EXPECT_THAT(LeaveOutAfter(absl::Milliseconds(100)), ElementsAre(2, 3));
}

TEST_F(ChunkInARoomTest, IsGivenBackByFramesThatMayBeSentAgain) {
  const Result first = Ask(0, 0, 2048);
  EXPECT_EQ(room_.taken(), 2048);
  chunk_->GiveRoomBack(absl::ResourceExhaustedError("somebody needs it"));
  EXPECT_TRUE(absl::IsResourceExhausted((*first)->status()));
  EXPECT_EQ(room_.taken(), 0);
}

TEST_F(ChunkInARoomTest, IsKeptByARoundThatMayHaveBeenAnsweredBeforeARestart) {
  Restore({});
  const Result first = Ask(0, kOpenStep, 2048);
  chunk_->GiveRoomBack(absl::ResourceExhaustedError("somebody needs it"));
  EXPECT_FALSE(first->has_value());
  EXPECT_EQ(room_.taken(), 2048);
}

RoundMetrics MetricsOf(const OwnedChunk& chunk) {
  RoundMetrics rounds;
  RetainedBytes retained;
  NormMetrics norms;
  chunk.AddMetrics(rounds, retained, norms);
  return rounds;
}

using RestoredChunkTest = OwnedChunkTest;

TEST_F(RestoredChunkTest, CountsRoundsThatAnEarlierProcessHadClosedAsReplayed) {
  Restore({});
  Send(0, kOpenStep, /*answered_steps=*/kOpenStep + 1);
  for (uint32_t rank : {1, 2, 3}) Send(rank, kOpenStep);
  EXPECT_EQ(MetricsOf(*chunk_).rounds_replayed, 1);
  EXPECT_EQ(MetricsOf(*chunk_).rounds_full, 0);
  for (uint32_t rank : {0, 1, 2, 3}) Send(rank, kOpenStep + 1);
  EXPECT_EQ(MetricsOf(*chunk_).rounds_replayed, 1);
  EXPECT_EQ(MetricsOf(*chunk_).rounds_full, 1);
}

TEST_F(RestoredChunkTest, CountsTheFramesThatItAnswersWithARequestForEarlierOnes) {
  Restore({});
  Send(0, kOpenStep + 2);
  Send(1, kOpenStep);
  EXPECT_EQ(MetricsOf(*chunk_).replays_asked, 1);
}

TEST_F(OwnedChunkTest, CountsForHowLongARoundIsHeldUntilEarlierOnesAreDurable) {
  Result last;
  uint64_t steps = 0;
  do {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) last = Send(rank, steps);
    ++steps;
  } while (last->has_value() && steps < 100);
  ASSERT_FALSE(last->has_value());
  const RoundMetrics before = MetricsOf(*chunk_);
  EXPECT_EQ(before.holding.count(), steps - 1);
  EXPECT_EQ(before.holding.sum_seconds(), 0);
  now_ += absl::Seconds(3);
  chunk_->SetDurable(steps - 1, now_);
  ASSERT_TRUE(last->has_value());
  EXPECT_EQ((*last)->value().waited, absl::ZeroDuration()) << "for no other worker";
  EXPECT_EQ(MetricsOf(*chunk_).holding.sum_seconds(), 3);
  EXPECT_EQ(MetricsOf(*chunk_).gathering.sum_seconds(), 0);
}

TEST_F(RestoredChunkTest, ClosesARoundWithoutTheRanksThatThoseTellWhoHadItsAnswer) {
  Restore({{kOpenStep, {3}}});
  for (uint32_t rank : {0, 1}) Send(rank, kOpenStep);
  const std::string expected = BytesOf(Send(2, kOpenStep));

  chunk_ = std::make_unique<OwnedChunk>(layout_, 0, kWorkers, &bell_);
  Restore({});  // what was written down is damaged
  Send(1, kOpenStep);
  const Result late = Send(3, kOpenStep);
  Send(0, kOpenStep, /*answered_steps=*/kOpenStep + 1, /*late_ranks=*/{3});
  EXPECT_FALSE(late->has_value());
  EXPECT_EQ(BytesOf(Send(2, kOpenStep)), expected);
  EXPECT_EQ(BytesOf(late), expected);
}

TEST_F(RestoredChunkTest, ClosesARoundWithoutTheRanksThatThoseTellWhoListenedToIt) {
  Restore({{kOpenStep, {2, 3}}});
  Send(0, kOpenStep);
  const std::string expected = BytesOf(Send(1, kOpenStep));

  for (const bool comes_first : {true, false}) {
    chunk_ = std::make_unique<OwnedChunk>(layout_, 0, kWorkers, &bell_);
    Restore({});  // what was written down is damaged
    Result listens;
    if (comes_first) listens = ListenAgain(3, kOpenStep, /*late_ranks=*/{2, 3});
    const Result late = Send(2, kOpenStep);
    Send(0, kOpenStep);
    const Result last = Send(1, kOpenStep);
    if (!comes_first) listens = ListenAgain(3, kOpenStep, /*late_ranks=*/{2, 3});
    for (const Result& result : {late, last, listens}) {
      ASSERT_TRUE(result->has_value());
      EXPECT_EQ(BytesOf(result), expected);
    }
  }
}

TEST_F(RestoredChunkTest, TellsWhoListensWhichProcessAnswers) {
  const Result before = Listen(3, 0);
  for (uint32_t rank = 0; rank < kWorkers; ++rank) Send(rank, 0);
  EXPECT_EQ(OwnedChunk::HeaderOf((*before)->value()).generation(), 0);
  chunk_ = std::make_unique<OwnedChunk>(layout_, 0, kWorkers, &bell_);
  Restore({});
  const Result after = Listen(3, kOpenStep);
  for (uint32_t rank = 0; rank < kWorkers; ++rank) Send(rank, kOpenStep);
  EXPECT_EQ(OwnedChunk::HeaderOf((*after)->value()).generation(), generation_);
  EXPECT_EQ(OwnedChunk::HeaderOf((*Listen(3, kOpenStep))->value()).generation(), generation_);
}

TEST_F(RestoredChunkTest, ClosesNoRoundOtherwiseThatSomebodyHasListenedTo) {
  Restore({});
  for (uint32_t rank : {0, 1}) Send(rank, kOpenStep);
  ListenAgain(3, kOpenStep, /*late_ranks=*/{});
  EXPECT_THAT(LeaveOutAfter(absl::Hours(1)), IsEmpty());
}

// A frame of it that comes late says nothing: its answers have gone with it.
TEST_F(RestoredChunkTest, NobodyWaitsForARoundThatOnlyAProcessHadTheAnswerOfThatWasWithdrawn) {
  Restore({});
  chunk_->Withdraw(3, /*incarnation=*/7);
  chunk_->SetReturning(3, /*has_state=*/false);
  FrameHeader header;
  header.set_rank(3);
  header.set_step(kOpenStep + 1);
  header.set_incarnation(7);
  header.set_generation(generation_);
  header.set_answered_steps(kOpenStep + 1);
  EXPECT_FALSE(chunk_->Meet(header));
  EXPECT_EQ(chunk_->GenerationOfState(header), std::nullopt);
  for (uint32_t rank : {0, 1, 2}) Send(rank, kOpenStep);
  EXPECT_THAT(LeaveOutAfter(absl::Seconds(30)), ElementsAre(3));
}

TEST_F(RestoredChunkTest, TellsWhoListensAgainOfTheRestart) {
  Restore({});
  for (const Result& result :
       {ListenAgain(3, kOpenStep, {}, generation_ - 1), ListenAgain(3, kOpenStep + 1, {})}) {
    ASSERT_TRUE(result->has_value());
    const AnswerHeader header = OwnedChunk::HeaderOf((*result)->value());
    EXPECT_EQ(header.codec(), REPLAY);
    EXPECT_EQ(header.generation(), generation_);
  }
}

TEST_F(RestoredChunkTest, LeavesOutMoreRanksWhenNobodyCanHaveHadTheAnswer) {
  Restore({{kOpenStep, {3}}});
  const Result first = Send(0, kOpenStep);
  Send(1, kOpenStep);
  EXPECT_THAT(LeaveOutAfter(absl::Seconds(29)), IsEmpty()) << "rank 2 may have had the answer";
  EXPECT_THAT(LeaveOutAfter(absl::Seconds(1)), ElementsAre(2, 3));
  EXPECT_FALSE(first->has_value()) << "it is not written down yet";
  EXPECT_THAT(chunk_->late_ranks(), ElementsAre(Pair(kOpenStep, ElementsAre(2, 3))));
  chunk_->SetLateRanksDurable(now_);
  EXPECT_THAT((*first)->value().answer->header.late_ranks(), ElementsAre(2, 3));
}

TEST_F(RestoredChunkTest, WaitsNoLongerThanBeforeOnceAllRanksAreBack) {
  Restore({});
  for (uint32_t rank = 0; rank < kWorkers; ++rank) Send(rank, kOpenStep);
  for (uint32_t rank : {0, 1, 2}) Send(rank, kOpenStep + 1);
  EXPECT_THAT(LeaveOutAfter(absl::Seconds(1)), ElementsAre(3));
}

// What each rank has of the errors is needed, however late it comes.
TEST_F(OwnedChunkTest, NobodyIsLeftOutOfARoundThatRestoresErrors) {
  JobOptions options = layout_.options();
  options.set_first_step(1);
  const Layout resumed = *Layout::Create(layout_.tensors(), options);
  chunk_ = std::make_unique<OwnedChunk>(resumed, /*chunk=*/0, kWorkers, &bell_);
  const auto restore = [&](uint32_t rank) {
    Frame frame;
    frame.header.set_rank(rank);
    frame.header.set_codec(RESTORE);
    frame.header.set_generation(generation_);
    return Exchange(std::move(frame));
  };
  for (uint32_t rank : {0, 1, 2}) restore(rank);
  EXPECT_THAT(LeaveOutAfter(absl::Hours(1)), IsEmpty());
  EXPECT_FALSE(chunk_->IsOverdue(3, now_)) << "nobody may take its rank";
  const Result last = restore(3);
  ASSERT_TRUE(last->has_value());
  EXPECT_TRUE((*last)->ok()) << (*last)->status();
  chunk_ = std::make_unique<OwnedChunk>(layout_, /*chunk=*/0, kWorkers, &bell_);
}

TEST_F(RestoredChunkTest, LeavesOutTheSameRanksWhenSomebodyHasHadTheAnswer) {
  Restore({{kOpenStep, {3}}});
  Send(0, kOpenStep);
  Send(1, kOpenStep, /*answered_steps=*/kOpenStep + 1, /*late_ranks=*/{3});
  EXPECT_THAT(LeaveOutAfter(absl::Hours(1)), IsEmpty());
}

TEST_F(RestoredChunkTest, RefusesAFrameThatTellsOfAnswersThatCannotBe) {
  Restore({});
  const Result absurd = Send(0, kOpenStep, /*answered_steps=*/kOpenStep + 65);
  EXPECT_EQ((*absurd)->status().code(), absl::StatusCode::kDataLoss);
  for (uint32_t rank : {0, 1}) Send(rank, kOpenStep);
  EXPECT_THAT(LeaveOutAfter(absl::Minutes(1)), ElementsAre(2, 3)) << "it was not believed";
}

TEST_F(RestoredChunkTest, RefusesARankThatHasHadAnotherAnswerOfARound) {
  Restore({});
  for (uint32_t rank : {0, 1}) Send(rank, kOpenStep);
  EXPECT_THAT(LeaveOutAfter(absl::Minutes(1)), ElementsAre(2, 3)) << "nobody knows better";
  chunk_->SetLateRanksDurable(now_);
  const Result had_it = Send(2, kOpenStep + 1);
  EXPECT_TRUE(absl::IsDataLoss((*had_it)->status())) << (*had_it)->status();
  ASSERT_TRUE((*Send(3, kOpenStep))->ok());
  EXPECT_FALSE(Send(3, kOpenStep + 1)->has_value()) << "it is one of the round's";
}

TEST_F(OwnedChunkTest, NoMoreRoundsAreClosedThanARankMayTellOfAfterACrash) {
  const auto send_all = [&](uint64_t step) {
    Result last;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) last = Send(rank, step, 0, {}, SKIP);
    return last;
  };
  for (uint64_t step = 0; step < 64; ++step) EXPECT_TRUE(send_all(step)->has_value()) << step;
  const Result held = send_all(64);
  EXPECT_FALSE(held->has_value());
  chunk_->SetDurable(1, now_);
  EXPECT_TRUE(held->has_value());
}

constexpr uint64_t kGone = 9;  // an incarnation

TEST_F(OwnedChunkTest, WhatAProcessThatIsGoneContributedToAnOpenRoundIsDropped) {
  for (uint32_t rank : {0, 1}) Send(rank, 0);
  EXPECT_EQ(chunk_->Withdraw(1, kGone), 0);
  EXPECT_EQ(chunk_->missing(), 3);
}

TEST_F(OwnedChunkTest, ItsCallsEnd) {
  const Result waits = Send(1, 0), other = Send(0, 0), listens = Listen(1, 1);
  chunk_->Withdraw(1, kGone);
  chunk_->EndCallsOf(1);
  for (const Result& ended : {waits, listens}) {
    ASSERT_TRUE(ended->has_value());
    EXPECT_TRUE(absl::IsFailedPrecondition((*ended)->status())) << (*ended)->status();
    EXPECT_TRUE(IsTryAgain((*ended)->status()));
  }
  EXPECT_FALSE(other->has_value());
}

TEST_F(OwnedChunkTest, WhoListensInVainCountsOnlyWhileItIsThere) {
  Send(0, 0);
  Listen(1, 0);
  attendance_.is_absent = {false, true, true, true};
  attendance_.gone = {1};
  EXPECT_THAT(LeaveOutAfter(absl::Minutes(1)), IsEmpty()) << "two are needed";
  attendance_.gone = {};
  EXPECT_THAT(LeaveOutAfter(absl::ZeroDuration()), ElementsAre(1, 2, 3));
}

TEST_F(OwnedChunkTest, WhatItContributedToARoundThatClosesWithoutOthersIsKept) {
  std::string answers[2];
  for (const bool withdraws : {false, true}) {
    chunk_ = std::make_unique<OwnedChunk>(layout_, /*chunk=*/0, kWorkers, &bell_);
    const Result first = Send(0, 0);
    for (uint32_t rank : {1, 2}) Send(rank, 0);
    EXPECT_THAT(LeaveOutAfter(absl::Seconds(1)), ElementsAre(3));
    if (withdraws) {
      EXPECT_EQ(chunk_->Withdraw(2, kGone), 1);
    }
    chunk_->SetLateRanksDurable(now_);
    ASSERT_TRUE(first->has_value());
    answers[withdraws] = BytesOf(first);
  }
  EXPECT_EQ(answers[true], answers[false]);
}

TEST_F(OwnedChunkTest, WhatItContributedToACompleteRoundThatIsHeldIsKept) {
  Result last;
  uint64_t step = 0;
  for (; step == 0 || (last->has_value() && step < 100); ++step) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) last = Send(rank, step);
  }
  ASSERT_FALSE(last->has_value());
  EXPECT_EQ(chunk_->Withdraw(2, kGone), step);
  chunk_->SetDurable(step - 1, now_);
  EXPECT_TRUE(last->has_value());
}

TEST_F(RestoredChunkTest, WhatItContributedToARoundThatMayHaveClosedBeforeIsKept) {
  Restore({});
  for (uint32_t rank : {0, 1}) Send(rank, kOpenStep);
  EXPECT_EQ(chunk_->Withdraw(1, kGone), kOpenStep + 1);
  EXPECT_EQ(chunk_->missing(), 2);
}

// Of the events that this process has recorded of the step.
std::map<trace::Kind, std::vector<uint32_t>> TracedRanks(uint64_t step,
                                                         const std::string& directory) {
  const absl::StatusOr<trace::Timeline> timeline = trace::ReadRecordings({directory});
  EXPECT_TRUE(timeline.ok()) << timeline.status();
  std::map<trace::Kind, std::vector<uint32_t>> ranks;
  for (const trace::Event& event : timeline->processes.at(0).events) {
    if (event.step == step) ranks[event.kind].push_back(event.rank);
  }
  return ranks;
}

TEST_F(OwnedChunkTest, ATraceSaysWhomARoundWaitedForThatClosesWithoutHim) {
  static const std::string& directory = *new std::string(testing::TempDir() + "/trace");
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(trace::Start(directory, "the test").ok());
  const auto close = [&](uint64_t step, absl::Duration after, uint32_t last,
                         const std::vector<uint32_t>& missing) {
    LeaveOutAfter(after);
    chunk_->SetLateRanksDurable(now_);
    auto ranks = TracedRanks(step, directory);
    EXPECT_THAT(ranks[trace::Kind::kRound], ElementsAre(last));
    EXPECT_THAT(ranks[trace::Kind::kGather], ElementsAre(last));
    EXPECT_EQ(ranks[trace::Kind::kMissing], missing);
  };
  for (uint32_t rank : {0, 3}) Send(rank, 0);
  close(0, absl::Seconds(1), 2, {1, 2});

  attendance_.has_left[0] = attendance_.is_absent[1] = true;
  for (uint32_t rank : {2, 3}) Send(rank, 1);
  close(1, absl::Milliseconds(1), 3, {});  // nobody waits for those who are absent

  // The sweep has just found it absent, in another chunk, whose round began a little earlier.
  for (uint32_t rank : {2, 3}) Send(rank, 2);
  close(2, absl::Milliseconds(999), 1, {1});  // and not for 0, which has left

  for (uint32_t rank : {0, 1, 2, 3}) Send(rank, 3);
  close(3, absl::Seconds(1), 3, {});  // it came last

  Send(2, 4);
  now_ += absl::Milliseconds(900);
  Send(3, 4);
  attendance_.absent_since[1] = now_;
  close(4, absl::Milliseconds(1), 1, {1});  // likewise, though rank 3 was hardly in time
}

TEST_F(OwnedChunkTest, AFrameThatIsTakenBackNeverCame) {
  Send(0, 0);
  now_ += absl::Seconds(3);  // for ranks 1, 2 and 3
  Send(1, 0);
  now_ += absl::Seconds(3);
  Send(3, 0);
  chunk_->Withdraw(1, kGone);
  now_ += absl::Seconds(3);
  Send(1, 0);
  now_ += absl::Seconds(3);  // for rank 2
  Send(2, 0);
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds,
              ElementsAre(0, DoubleEq(1 + 1 + 1.5), DoubleEq(1 + 1 + 1.5 + 3), DoubleEq(1 + 1)));
  EXPECT_DOUBLE_EQ(MetricsOf(*chunk_).gathering.sum_seconds(), 12);
}

TEST_F(OwnedChunkTest, WhoIsAbsentIsWaitedForWhenNobodyElseIsMissing) {
  attendance_.is_absent[2] = attendance_.has_left[3] = true;
  Send(0, 0);
  now_ += absl::Milliseconds(500);
  Send(1, 0);
  EXPECT_THAT(LeaveOutAfter(absl::Milliseconds(250)), ElementsAre(2, 3));
  chunk_->SetLateRanksDurable(now_);
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, ElementsAre(0, 0.5, 0.25, 0))
      << "and not for who has left";
  EXPECT_EQ(MetricsOf(*chunk_).gathering.sum_seconds(), 0.75);
}

TEST_F(OwnedChunkTest, WhoIsAbsentOnlySinceTheRoundBeganIsWaitedForAsAllOthers) {
  attendance_.is_absent[2] = attendance_.is_absent[3] = true;
  attendance_.absent_since[2] = now_;
  Send(0, 0);
  now_ += absl::Milliseconds(500);  // for ranks 1 and 3
  Send(1, 0);
  attendance_.absent_since[3] = now_;
  EXPECT_THAT(LeaveOutAfter(absl::Milliseconds(250)), ElementsAre(2, 3));
  chunk_->SetLateRanksDurable(now_);
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, ElementsAre(0, 0.25, 0, 0.25 + 0.25));
}

TEST_F(OwnedChunkTest, NoRoundWaitsForARankThatComesBackForALaterOne) {
  attendance_.first_step[3] = 1;
  for (uint32_t rank : {0, 1}) Send(rank, 0);
  EXPECT_THAT(LeaveOutAfter(absl::Seconds(1)), ElementsAre(2, 3));
  chunk_->SetLateRanksDurable(now_);
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, ElementsAre(0, 0, 1, 0));
}

TEST_F(OwnedChunkTest, ARoundThatIsForgottenWaitedForNobody) {
  Send(0, 0);
  now_ += absl::Seconds(1);
  Send(1, 0);
  for (uint32_t rank : {0, 1}) {
    chunk_->Withdraw(rank, kGone);
    chunk_->EndCallsOf(rank);
  }
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, Each(0));
  EXPECT_EQ(MetricsOf(*chunk_).gathering.count(), 0);
}

TEST_F(RestoredChunkTest, WhomAnEarlierProcessLeftOutIsWaitedForUntilThatIsTold) {
  Restore({});
  Send(0, kOpenStep);
  now_ += absl::Seconds(1);  // for rank 1
  Send(1, kOpenStep);
  now_ += absl::Seconds(2);  // for ranks 2 and 3
  ListenAgain(0, kOpenStep, /*late_ranks=*/{2, 3});
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, ElementsAre(0, 1, 1, 1));
  EXPECT_EQ(MetricsOf(*chunk_).gathering.sum_seconds(), 3);
}

TEST_F(RestoredChunkTest, ItIsNoneOfTheRoundsWhenThatIsKnown) {
  Restore({{kOpenStep, {2, 3}}});
  Send(0, kOpenStep);
  now_ += absl::Seconds(1);
  Send(1, kOpenStep);
  EXPECT_THAT(MetricsOf(*chunk_).straggler_seconds, ElementsAre(0, 1, 0, 0));
}

TEST_F(OwnedChunkTest, WhenARankSeemsGoneASnapshotIsDueThatNeedsNoFramesOfIt) {
  const auto close_without_rank_3 = [&](uint64_t step) {
    for (uint32_t rank : {0, 1, 2}) Send(rank, step);
    EXPECT_THAT(LeaveOutAfter(absl::Seconds(1)), ElementsAre(3)) << step;
    chunk_->SetLateRanksDurable(now_);
    return chunk_->snapshot_due();
  };
  EXPECT_FALSE(close_without_rank_3(0)) << "it may only be late";
  EXPECT_TRUE(close_without_rank_3(1));
  ChunkState state;
  ASSERT_TRUE(chunk_->Save(/*with_answer=*/false, state).ok());
  EXPECT_FALSE(close_without_rank_3(2)) << "once is enough";
}

}  // namespace
}  // namespace signpost
