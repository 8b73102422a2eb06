// Processes that come back in the rank of one that is gone, as an aggregator sees them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/try_again.h"
#include "server/aggregator.h"
#include "server/job.h"
#include "server/state_desk.h"
#include "server/state_dir.h"
#include "server/test_calls.h"
#include "server/test_job.h"
#include "storage/faulty_disk.h"

namespace signpost {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kWorkers = 3;
constexpr uint64_t kNext = 77;  // incarnation of the process that comes back

class ReturningTest : public ::testing::Test {
 protected:
  void Start() {
    MakeAggregator();
    JoinResult last;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      last = JoinResult();
      aggregator_->Join(RequestOf(rank, 1000 + rank), last.done(), PeerOf(1000 + rank));
    }
    if (state_dir_ != nullptr) {
      ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
    }
    ASSERT_TRUE(last.status().ok()) << last.status();
    epoch_ = last.value().epoch();
    EXPECT_FALSE(last.value().returning());
  }

  void MakeAggregator() {
    AggregatorOptions options{
        .shard = shard_, .shard_count = shard_ + 1, .now = [this] { return now_; }};
    options.is_connected = [this](const std::string& peer) { return !gone_.contains(peer); };
    grace_ = 2 * options.restart_grace;
    aggregator_ = std::make_unique<Aggregator>(options, state_dir_.get());
  }

  // What is written down goes there from now on.
  FaultyDisk& MakeDurable() {
    disk_ = std::make_unique<FaultyDisk>(absl::StrCat(::testing::TempDir(), "/returning"));
    state_dir_ = *StateDir::Open(*disk_, {0, 1});
    return *disk_;
  }

  JoinRequest RequestOf(uint32_t rank, uint64_t incarnation) const {
    JoinRequest request = TestJoin(rank, kWorkers);
    request.set_incarnation(incarnation);
    request.mutable_options()->set_min_workers(min_workers_);
    request.mutable_options()->set_round_deadline_us(absl::ToInt64Microseconds(round_deadline_));
    request.mutable_options()->set_first_step(first_step_);
    request.set_shard(shard_);
    request.set_shard_count(shard_ + 1);
    return request;
  }

  static std::string PeerOf(uint64_t incarnation) { return absl::StrCat("of ", incarnation); }
  // The process has no connection any more.
  void Die(uint64_t incarnation) { gone_.insert(PeerOf(incarnation)); }
  void PassGrace() {
    for (absl::Time end = now_ + grace_; now_ <= end;) PassDeadline();
  }

  // For both chunks; the last chunk's result.
  ExchangeResult Send(uint32_t rank, uint64_t step, std::optional<uint64_t> incarnation = {}) {
    ExchangeResult result;
    for (uint32_t chunk : {0, 1}) result = SendChunk(rank, step, chunk, ONE_BIT, incarnation);
    return result;
  }

  ExchangeResult SendChunk(uint32_t rank, uint64_t step, uint32_t chunk, Codec codec,
                           std::optional<uint64_t> incarnation = {}, uint64_t answered_steps = 0,
                           uint32_t next_fetch = 0) {
    const Layout layout = LayoutOf(RequestOf(0, 0));
    Frame frame;
    if (IsContribution(codec)) {
      frame = TestFrame(layout, {rank, step, chunk}, codec);
      frame.header.set_answered_steps(answered_steps);
    } else {
      frame.header.set_rank(rank);
      frame.header.set_step(step);
      frame.header.set_chunk(chunk);
      frame.header.set_codec(codec);
      frame.payload = Payload(layout.PayloadBytes(codec, chunk));
      frame.header.set_answered_steps(answered_steps);
      if (codec == STATE) std::fill_n(frame.payload.data(), frame.payload.size(), step);
      frame.header.set_payload_crc32c(Crc32c(frame.payload.span()));
    }
    frame = Addressed(std::move(frame), "job", epoch_);
    // Who comes back does not know of the process.
    if (IsContribution(codec)) frame.header.set_generation(generation_);
    frame.header.set_next_fetch(next_fetch);
    if (incarnation) frame.header.set_incarnation(*incarnation);
    const std::string peer = PeerOf(frame.header.incarnation());
    ExchangeResult result;
    aggregator_->Exchange(std::move(frame), result.done(), peer);
    return result;
  }

  // In another process, after MakeDurable().
  void Restart() {
    state_dir_ = *StateDir::Open(*disk_, {0, 1});
    MakeAggregator();
    absl::StatusOr<StateDir::Recovered> recovered =
        state_dir_->Recover(/*allow_error_reset=*/false);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    ASSERT_TRUE(aggregator_->Restore(*std::move(recovered)).ok());
    generation_ = state_dir_->generation();
  }

  JoinResult Claim(uint32_t rank, uint64_t incarnation = kNext) {
    JoinResult result;
    call_ = aggregator_->Join(RequestOf(rank, incarnation), result.done(), PeerOf(incarnation));
    return result;
  }

  void Leave(uint32_t rank, absl::Status& left, std::optional<uint64_t> incarnation = {},
             uint64_t steps = 0) {
    LeaveRequest leave;
    leave.set_job("job");
    leave.set_epoch(epoch_);
    leave.set_rank(rank);
    leave.set_steps(steps);
    leave.set_incarnation(incarnation.value_or(1000 + rank));
    left = absl::UnknownError("still waits");
    aggregator_->Leave(leave, [&left](const absl::Status& status) { left = status; });
  }

  absl::Status LeaveOf(uint32_t rank) { return signpost::Leave(*aggregator_, epoch_, rank); }

  void PassDeadline() {
    now_ += absl::Seconds(2);
    aggregator_->CloseLateRounds();
  }

  uint32_t min_workers_ = 2;
  uint32_t shard_ = 0;       // the last one
  uint64_t first_step_ = 0;  // not 0: the job goes on from a checkpoint
  absl::Duration round_deadline_ = absl::Seconds(1);
  absl::Time now_ = absl::FromUnixSeconds(1700000000);
  std::unique_ptr<FaultyDisk> disk_;
  std::unique_ptr<StateDir> state_dir_;
  std::unique_ptr<Aggregator> aggregator_;
  uint64_t epoch_ = 0;
  uint64_t generation_ = 0;
  uint64_t call_ = 0;  // of the last Claim
  std::set<std::string> gone_;
  absl::Duration grace_;
};

TEST_F(ReturningTest, GetsTheRankOnceARoundHasClosedWithoutIt) {
  Start();
  const auto claim = Claim(1);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(claim.waits()) << "nobody misses rank 1 yet";
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  EXPECT_TRUE(claim.value().returning());
  EXPECT_EQ(claim.value().epoch(), epoch_);

  const auto refused = Send(1, 1);
  EXPECT_THAT(refused.message(), HasSubstr("another process"));
  EXPECT_TRUE(refused.is_to_be_tried_again());
  EXPECT_TRUE(IsTryAgain(LeaveOf(1)));
  for (uint32_t rank : {0, 2}) Send(rank, 1);
  EXPECT_TRUE(Send(1, 1, kNext).status().ok());
}

// Two have died, say, with frames of this step still to send elsewhere, where the last waits for
// them: they come there when they have been here.
TEST_F(ReturningTest, OrOnceItsProcessHasBeenGoneForLongWhereNoRoundIsOpen) {
  Start();
  for (uint32_t rank : {0, 1, 2}) Send(rank, 0);
  const auto claim = Claim(1);
  PassGrace();
  EXPECT_TRUE(claim.waits()) << "its process may only have nothing to send";
  Die(1001);
  PassDeadline();
  gone_.clear();
  PassGrace();
  EXPECT_TRUE(claim.waits()) << "it has connected again";
  Die(1001);
  PassDeadline();
  EXPECT_TRUE(claim.waits()) << "it may connect again";
  // Two failure timeouts: with six the others would have given up.
  for (const absl::Time end = now_ + grace_ / 3; now_ < end;) PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  EXPECT_TRUE(claim.value().returning());

  for (uint32_t rank : {0, 2}) Send(rank, 1);
  EXPECT_TRUE(Send(1, 1, kNext).status().ok());
}

TEST_F(ReturningTest, WhileItsProcessTakesPartTheRankIsNotTaken) {
  Start();
  Send(1, 0);
  const auto claim = Claim(1);
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Send(1, 1);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(absl::IsAlreadyExists(claim.status())) << claim.status();
  for (uint32_t rank : {0, 2}) Send(rank, 1);
  EXPECT_TRUE(Send(1, 1).status().ok());
}

TEST_F(ReturningTest, AClaimWhoseCallerIsGoneIsForgotten) {
  Start();
  const auto claim = Claim(1);
  aggregator_->CancelJoin(call_, absl::CancelledError("gone"));
  EXPECT_TRUE(absl::IsCancelled(claim.status()));
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  PassDeadline();
  EXPECT_TRUE(Send(1, 0).status().ok()) << "it was only late";
}

TEST_F(ReturningTest, ALeaveThatIsNotWrittenDownYetEndsWhenAnotherProcessTakesTheRank) {
  MakeDurable();
  Start();
  absl::Status left;
  Leave(1, left);
  const auto claim = Claim(1);
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  PassDeadline();
  ASSERT_TRUE(absl::IsUnknown(left)) << left;
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(left.ok()) << left;
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(claim.status().ok()) << claim.status();
}

// It has the steps that the rank is needed for, but the process before as the rank's.
TEST_F(ReturningTest, ASnapshotThatBeganBeforeTheRankWasGivenDoesNotCount) {
  FaultyDisk& disk = MakeDurable();
  Start();
  for (uint64_t step : {0, 1}) {  // after which a snapshot is due
    for (uint32_t rank : {0, 1, 2}) Send(rank, step);
  }
  const auto claim = Claim(1);
  for (uint32_t rank : {0, 2}) Send(rank, 2);
  bool is_given = false;
  disk.before_write = [&] {
    if (!std::exchange(is_given, true)) PassDeadline();
  };
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(is_given);
  EXPECT_THAT(std::string(Send(1, 3).status().message()), HasSubstr("another process"));
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(claim.waits()) << "if this one is damaged, the one before is gone on from";
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(claim.status().ok()) << claim.status();
}

// Before any round has closed, too.
TEST_F(ReturningTest, OneSnapshotFromBeforeARestartDoesNotSufficeEither) {
  MakeDurable();
  Start();
  SendChunk(0, 0, 0, ONE_BIT);  // which says that all could begin
  Die(1001);
  const auto lost = Claim(1);
  PassGrace();
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(lost.waits());
  Restart();
  SendChunk(0, 0, 0, ONE_BIT);
  const auto claim = Claim(1);
  EXPECT_TRUE(claim.waits()) << "the snapshot before names the process that is gone";
  PassDeadline();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_TRUE(claim.value().returning());
}

// The last one's, when those before it are gone and another process has come for one of them.
TEST_F(ReturningTest, ALeaveThatIsNotWrittenDownYetEndsWhenTheJobGivesWay) {
  MakeDurable();
  Start();
  absl::Status first, second, last;
  Leave(0, first);
  Leave(1, second);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(first.ok() && second.ok()) << first << second;
  Leave(2, last);
  ASSERT_TRUE(absl::IsUnknown(last)) << last;
  const auto claim = Claim(0);
  EXPECT_TRUE(claim.waits()) << claim.status();
  EXPECT_TRUE(last.ok()) << last;
}

TEST_F(ReturningTest, AJobThatNobodyWasToldHadBegunIsNotDesertedWhileAClaimWaits) {
  FaultyDisk& disk = MakeDurable();
  MakeAggregator();
  disk.is_full = true;
  std::vector<uint64_t> calls;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    Claim(rank, 1000 + rank);
    calls.push_back(call_);
  }
  EXPECT_FALSE(aggregator_->TakeSnapshots().ok());
  const auto claim = Claim(1);
  for (const uint64_t call : calls) {
    aggregator_->CancelJoin(call, absl::DeadlineExceededError("timed out"));
  }
  EXPECT_TRUE(claim.waits());
  EXPECT_FALSE(aggregator_->AwaitNoJobs(absl::ZeroDuration()));
  aggregator_->CancelJoin(call_, absl::CancelledError("gone"));
  EXPECT_TRUE(absl::IsCancelled(claim.status()));
  EXPECT_TRUE(aggregator_->AwaitNoJobs(absl::ZeroDuration()));
}

TEST_F(ReturningTest, AnIncarnationOfZeroIsOneLikeAnyOther) {
  Start();
  const auto claim = Claim(1, /*incarnation=*/0);
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  PassDeadline();
  EXPECT_TRUE(claim.status().ok()) << claim.status();
  for (uint32_t rank : {2, 0}) {
    const auto sent = Send(rank, 1);
    EXPECT_TRUE(sent.waits() || sent.status().ok()) << sent.status();
  }
}

TEST_F(ReturningTest, WhereRoundsStandStillItIsLetInAndAWaitingRankGivesTheState) {
  Start();
  const auto waiting = Send(0, 0);  // two are needed
  const auto claim = Claim(1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  const auto fetched = SendChunk(1, 0, 0, FETCH, kNext);
  EXPECT_TRUE(fetched.waits());
  const auto waits_too = SendChunk(0, 0, 0, ONE_BIT);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(waits_too.status().ok()) << waits_too.status();
  EXPECT_EQ(waits_too.value().answer->header.codec(), FETCH);
  EXPECT_THAT(waits_too.value().answer->header.wanted_chunks(), ElementsAre(0));
  SendChunk(0, 0, 0, STATE);
  ASSERT_TRUE(fetched.status().ok()) << fetched.status();
  EXPECT_EQ(fetched.value().answer->header.codec(), STATE);
  EXPECT_EQ(fetched.value().answer->payload.size(), 12 * 32);
  // Its frame still counts, and with that of rank 1 there are two.
  SendChunk(0, 0, 0, ONE_BIT);
  const auto sent = Send(1, 0, kNext);
  PassDeadline();
  EXPECT_TRUE(sent.status().ok()) << sent.status();
}

// Rank 1 and 2 die when chunk 0 has closed and chunk 1 has not: both come back for step 1.
TEST_F(ReturningTest, ARoundThatNobodyWhoCameBackIsToContributeToDoesNotWaitForThem) {
  Start();
  for (uint32_t rank : {0, 1, 2}) SendChunk(rank, 0, 0, ONE_BIT);
  const auto waiting = SendChunk(0, 0, 1, ONE_BIT);
  const auto claim = Claim(1);
  const auto other_claim = Claim(2, kNext + 1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  ASSERT_TRUE(other_claim.status().ok()) << other_claim.status();
  EXPECT_EQ(claim.value().first_step(), 1);
  EXPECT_EQ(other_claim.value().first_step(), 1);
  EXPECT_TRUE(waiting.waits()) << "two are needed";
  SendChunk(1, 0, 1, LISTEN, kNext);
  PassDeadline();
  EXPECT_TRUE(waiting.status().ok()) << waiting.status();
}

// Another shard is a step further, and its states are given when rank 0 is too.
TEST_F(ReturningTest, ARoundDoesNotWaitForWhoSaysThatItComesBackForALaterOne) {
  Start();
  const auto waiting = Send(0, 0);
  const auto claim = Claim(1);
  const auto other_claim = Claim(2, kNext + 1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  ASSERT_TRUE(other_claim.status().ok()) << other_claim.status();
  SendChunk(1, 0, 0, FETCH, kNext, /*answered_steps=*/0);
  const auto still_waiting = Send(0, 0);
  PassDeadline();
  ASSERT_TRUE(still_waiting.waits());
  SendChunk(1, 0, 0, LISTEN, kNext, /*answered_steps=*/1);
  PassDeadline();
  EXPECT_TRUE(still_waiting.status().ok()) << still_waiting.status();
}

// What it was told when it came, a process of the aggregator that was started since does not know.
TEST_F(ReturningTest, NorDoesOneInAnAggregatorThatWasStartedAgain) {
  MakeDurable();
  Start();
  Restart();
  const auto waiting = SendChunk(0, 0, 1, ONE_BIT);
  now_ += absl::Hours(1);  // nobody else comes back
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(waiting.waits()) << waiting.status();
  SendChunk(1, 0, 0, LISTEN, {}, /*answered_steps=*/1);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(waiting.status().ok()) << waiting.status();
}

// Who is asked has frozen the variance for that round, and has no state before its answer.
TEST_F(ReturningTest, ARoundDoesNotWaitForWhoGetsNoStateBeforeItHasClosed) {
  Start();
  Send(0, 0);
  const auto claim = Claim(1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  SendChunk(1, 0, 0, FETCH, kNext);
  const auto asked = SendChunk(0, 0, 0, ONE_BIT);
  ASSERT_TRUE(asked.status().ok()) << asked.status();
  ASSERT_EQ(asked.value().answer->header.codec(), FETCH);
  SendChunk(0, 0, 0, ONE_BIT);
  PassDeadline();
  ASSERT_TRUE(SendChunk(0, 0, 0, ONE_BIT).waits()) << "it may still give the state";
  now_ += absl::Seconds(6);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(SendChunk(0, 0, 0, ONE_BIT).waits()) << "who is asked now may give it";
  now_ += absl::Seconds(6);
  aggregator_->CloseLateRounds();
  const auto closed = SendChunk(0, 0, 0, ONE_BIT);
  ASSERT_TRUE(closed.status().ok()) << closed.status();
  EXPECT_EQ(closed.value().answer->header.codec(), ONE_BIT);
}

// Another shard's state may be given when this round has closed, which another rank is needed for.
TEST_F(ReturningTest, ARoundDoesNotWaitForWhoWaitsForItsAnswer) {
  Start();
  Send(0, 0);
  const auto claim = Claim(1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  const auto listens = SendChunk(1, 0, 0, LISTEN, kNext);
  now_ += absl::Seconds(9);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(listens.waits()) << "it may still come to it";
  now_ += absl::Seconds(1);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(listens.status().ok()) << listens.status();
}

TEST_F(ReturningTest, WhoGetsItsStateKeepsTheRankFromTheNextClaim) {
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Die(1001);
  Claim(1);
  PassDeadline();
  const auto fetch = SendChunk(1, 1, 0, FETCH, kNext);
  const auto next = Claim(1, kNext + 1);
  PassDeadline();
  EXPECT_TRUE(next.waits()) << next.status();
  ASSERT_EQ(SendChunk(0, 1, 0, ONE_BIT).value().answer->header.codec(), FETCH);
  SendChunk(0, 1, 0, STATE);
  EXPECT_TRUE(fetch.ok()) << fetch.status();
  const auto listens = SendChunk(1, 1, 0, LISTEN, kNext);
  PassDeadline();
  EXPECT_TRUE(next.waits()) << next.status();
  for (uint32_t rank : {0, 2}) Send(rank, 1);
  PassDeadline();
  EXPECT_TRUE(listens.ok()) << listens.status();
  const auto sent = Send(1, 2, kNext);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(absl::IsAlreadyExists(next.status())) << next.status();
  for (uint32_t rank : {0, 2}) Send(rank, 2);
  EXPECT_TRUE(sent.ok()) << sent.status();
}

TEST_F(ReturningTest, WhoHasTheRankKeepsItWhileThatIsWrittenDown) {
  MakeDurable();
  Start();
  Die(1001);
  Send(0, 0);
  Send(2, 0);
  const auto claim = Claim(1);
  PassDeadline();
  const auto next = Claim(1, kNext + 1);
  EXPECT_TRUE(claim.waits()) << "for two snapshots";
  EXPECT_EQ(next.code(), absl::StatusCode::kAlreadyExists) << next.message();
  Die(kNext);
  EXPECT_TRUE(Claim(1, kNext + 2).waits());
  EXPECT_EQ(claim.code(), absl::StatusCode::kAborted);
}

TEST_F(ReturningTest, TheNextClaimHasTheRankOfWhoDiedWithoutHavingContributed) {
  MakeDurable();
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  Restart();  // which hears of it from its FETCH
  SendChunk(1, 1, 0, FETCH, kNext);
  const auto next = Claim(1, kNext + 1);
  for (uint32_t rank : {0, 2}) Send(rank, 1);
  now_ += absl::Minutes(1);
  aggregator_->CloseLateRounds();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(next.waits()) << next.status();
  Die(kNext);
  PassDeadline();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_TRUE(next.ok()) << next.status();
}

// Who saves a checkpoint asks, and does not wait for it.
TEST_F(ReturningTest, IsReturningUntilItsFirstFrameAlsoAfterARestart) {
  MakeDurable();
  Start();
  const auto returning_ranks = [&] {
    const StatusResponse status = aggregator_->Status({});
    const auto& ranks = status.jobs(0).returning_ranks();
    return std::vector<uint32_t>(ranks.begin(), ranks.end());
  };
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  const auto claim = Claim(1);
  PassDeadline();
  EXPECT_THAT(returning_ranks(), ElementsAre(1));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(claim.ok()) << claim.status();
  Restart();
  EXPECT_THAT(returning_ranks(), IsEmpty());
  SendChunk(1, 1, 0, LISTEN, kNext, /*answered_steps=*/1);
  EXPECT_THAT(returning_ranks(), ElementsAre(1));
  Send(1, 1, kNext);
  EXPECT_THAT(returning_ranks(), IsEmpty());
}

// It has come back, and sends again what it has sent before a restart.
TEST_F(ReturningTest, WhoListensAgainTakesPart) {
  MakeDurable();
  Start();
  Restart();
  Frame listen;
  listen.header.set_rank(1);
  listen.header.set_codec(LISTEN);
  listen.header.set_generation(generation_);
  listen.header.set_answered_steps(3);
  aggregator_->Exchange(Addressed(std::move(listen), "job", epoch_), ExchangeResult().done());
  EXPECT_EQ(aggregator_->Status({}).jobs(0).returning_ranks_size(), 0);
  const auto waiting = SendChunk(0, 0, 1, ONE_BIT);
  now_ += absl::Hours(1);
  aggregator_->CloseLateRounds();
  EXPECT_TRUE(waiting.waits()) << "its frames of later rounds are needed";
}

// Rank 2 has come back, and rank 1 given it the state after the round of step 1, which has closed
// without it. Then the aggregator is started again, from before that round.
class GivenBeforeARestartTest : public ReturningTest {
 protected:
  void SetUp() override {
    min_workers_ = 1;
    MakeDurable();
    Start();
    for (uint32_t rank : {0, 1}) Send(rank, 0);
    const auto claim = Claim(2);
    PassDeadline();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
    ASSERT_TRUE(claim.ok()) << claim.status();
    SendChunk(0, 1, 0, ONE_BIT);
    const auto closed = SendChunk(1, 1, 0, ONE_BIT);
    PassDeadline();
    ASSERT_TRUE(closed.ok()) << closed.status();
    const auto fetched = SendChunk(2, 0, 0, FETCH, kNext);
    SendChunk(1, 2, 0, STATE);
    ASSERT_TRUE(fetched.ok()) << fetched.status();
    EXPECT_EQ(GenerationOf(fetched), 0);
    Restart();
  }

  static uint64_t GenerationOf(const ExchangeResult& result) {
    return OwnedChunk::HeaderOf(result.value()).generation();
  }

  // Rank 1 is not back in time.
  void CloseOtherwise() {
    const auto closed = SendChunk(0, 1, 0, ONE_BIT);
    PassGrace();
    ASSERT_TRUE(closed.ok()) << closed.status();
    EXPECT_THAT(closed.value().answer->header.late_ranks(), ElementsAre(1, 2));
  }

  ExchangeResult SendFirst() { return SendChunk(2, 2, 0, ONE_BIT, kNext, /*answered_steps=*/2); }
};

TEST_F(GivenBeforeARestartTest, IsToComeBackOnceMoreIfThatRoundClosesOtherwise) {
  CloseOtherwise();
  const auto sent = SendFirst();
  EXPECT_EQ(sent.code(), absl::StatusCode::kDataLoss) << sent.status();
  EXPECT_TRUE(sent.is_to_be_tried_again());
}

TEST_F(GivenBeforeARestartTest, AlsoIfItHasListenedSince) {
  SendChunk(2, 2, 0, LISTEN, kNext, /*answered_steps=*/2);
  CloseOtherwise();
  EXPECT_EQ(SendFirst().code(), absl::StatusCode::kDataLoss);
}

TEST_F(GivenBeforeARestartTest, ItsStateIsItsOwnIfItCloses) {
  const auto sent = SendFirst();
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent.value().answer->header.codec(), REPLAY);
  const auto waiting = SendChunk(0, 1, 0, ONE_BIT);
  PassGrace();
  EXPECT_TRUE(waiting.waits()) << "it has closed with rank 1";
  SendChunk(1, 1, 0, ONE_BIT);
  EXPECT_TRUE(waiting.ok()) << waiting.status();
  EXPECT_TRUE(SendFirst().waits());
}

TEST_F(GivenBeforeARestartTest, GetsAnotherWhereItAsks) {
  CloseOtherwise();
  const auto fetched = SendChunk(2, 0, 0, FETCH, kNext);
  SendChunk(0, 2, 0, STATE);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(GenerationOf(fetched), generation_);
  const auto sent = SendFirst();
  EXPECT_TRUE(sent.waits()) << sent.status();
}

// Rank 1 has had that round's answer, and comes back.
TEST_F(GivenBeforeARestartTest, AStateThatIsNotThatOfTheOthersIsNotPassedOn) {
  CloseOtherwise();
  const auto fetched = SendChunk(2, 0, 0, FETCH, kNext);
  const auto refused = SendChunk(1, 2, 0, ONE_BIT, {}, /*answered_steps=*/2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << "and it is not asked";
  const auto receipt = SendChunk(1, 2, 0, STATE);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt.value().answer->header.codec(), STATE);
  EXPECT_TRUE(fetched.waits());
  const auto asked = SendChunk(0, 2, 0, ONE_BIT);
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked.value().answer->header.codec(), FETCH);
  SendChunk(0, 2, 0, STATE);
  EXPECT_TRUE(fetched.ok()) << fetched.status();
}

// Rank 2 gives up, and its state comes late.
TEST_F(GivenBeforeARestartTest, NorIsThatOfWhoHasGivenUp) {
  CloseOtherwise();
  SendChunk(0, 1, 1, ONE_BIT);
  PassDeadline();
  absl::Status left;
  Leave(2, left, kNext, /*steps=*/2);
  const auto claim = Claim(1, kNext + 1);
  PassDeadline();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  ASSERT_TRUE(left.ok()) << left;
  ASSERT_TRUE(claim.ok()) << claim.status();
  const auto fetched = SendChunk(1, 0, 0, FETCH, kNext + 1);
  const auto receipt = SendChunk(2, 2, 0, STATE, kNext);
  EXPECT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_TRUE(fetched.waits());
  SendChunk(0, 2, 0, STATE);
  EXPECT_TRUE(fetched.ok()) << fetched.status();
}

// Rank 1 may die before its frame is here, and another process come in its place with another one.
TEST_F(GivenBeforeARestartTest, NorIsOneOfARoundThatIsStillToClose) {
  const auto waiting = SendChunk(0, 1, 0, ONE_BIT);
  const auto fetched = SendChunk(2, 0, 0, FETCH, kNext);
  SendChunk(1, 2, 0, STATE);
  EXPECT_TRUE(fetched.waits());
  const auto closing = SendChunk(1, 1, 0, ONE_BIT, {}, /*answered_steps=*/2);
  ASSERT_TRUE(closing.ok()) << closing.status();
  EXPECT_EQ(closing.value().answer->header.codec(), ONE_BIT) << "and it is not asked";
  EXPECT_TRUE(waiting.ok()) << waiting.status();
  const auto asked = SendChunk(1, 2, 0, ONE_BIT, {}, /*answered_steps=*/2);
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked.value().answer->header.codec(), FETCH);
  SendChunk(1, 2, 0, STATE);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(GenerationOf(fetched), generation_);
}

TEST_F(GivenBeforeARestartTest, WhoDoesNotKnowOfTheRestartIsNotAskedForAState) {
  const auto waiting = SendChunk(0, 1, 0, ONE_BIT);
  const auto fetched = SendChunk(2, 0, 0, FETCH, kNext);
  const uint64_t generation = std::exchange(generation_, generation_ - 1);
  const auto replay = SendChunk(1, 2, 0, ONE_BIT, {}, /*answered_steps=*/2);
  generation_ = generation;
  ASSERT_TRUE(replay.ok()) << replay.status();
  EXPECT_EQ(replay.value().answer->header.codec(), REPLAY);
  // It sends what was asked for.
  ASSERT_TRUE(SendChunk(1, 1, 0, ONE_BIT, {}, /*answered_steps=*/2).ok());
  EXPECT_TRUE(waiting.ok()) << waiting.status();
  const auto asked = SendChunk(1, 2, 0, ONE_BIT, {}, /*answered_steps=*/2);
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked.value().answer->header.codec(), FETCH);
  SendChunk(1, 2, 0, STATE);
  EXPECT_TRUE(fetched.ok()) << fetched.status();
}

// Ranks 1 and 2 have died, and other processes have come back in their places: rank 0 waits for
// them.
class TwoComeBackTest : public ReturningTest {
 protected:
  void BringTwoBack() {
    Start();
    for (uint32_t rank : {0, 1, 2}) Send(rank, 0);
    Die(1001);
    Die(1002);
    waiting_ = Send(0, 1);
    Claim(1);
    Claim(2, kNext + 1);
    PassDeadline();
    TakeSnapshots();
  }

  void TakeSnapshots() {
    for (int i = 0; i < 3 && state_dir_ != nullptr; ++i) {
      ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
    }
  }

  void ExpectAnotherCanComeInThePlaceOf(uint32_t rank) {
    const auto claim = Claim(rank, kNext + 2);
    PassDeadline();
    TakeSnapshots();
    ASSERT_TRUE(claim.ok()) << claim.status();
    const auto sent = Send(rank, 1, kNext + 2);
    PassDeadline();
    EXPECT_TRUE(sent.ok()) << sent.status();
  }

  ExchangeResult waiting_;
};

class GivingUpTest : public TwoComeBackTest {
 protected:
  void Begin() {
    BringTwoBack();
    fetch_ = SendChunk(1, 1, 0, FETCH, kNext);
    absl::Status one, two;
    Leave(1, one, kNext);
    Leave(2, two, kNext + 1);
    EXPECT_TRUE(one.ok() && two.ok()) << one << two;
  }

  ExchangeResult fetch_;
};

TEST_F(GivingUpTest, TheOthersGoOn) {
  Begin();
  EXPECT_TRUE(waiting_.waits()) << waiting_.status();
  const auto refused = SendChunk(1, 1, 0, FETCH, kNext);
  EXPECT_FALSE(refused.waits()) << "it has gone";
  EXPECT_THAT(fetch_.message(), HasSubstr("has left, or is another's"));
  // It may still be connected; the next process has the rank at once.
  ExpectAnotherCanComeInThePlaceOf(1);
  EXPECT_TRUE(waiting_.ok()) << waiting_.status();
}

TEST_F(GivingUpTest, ASecondCallSaysNothingNew) {
  Begin();
  absl::Status again;
  for (uint32_t rank : {1, 2}) Leave(rank, again, kNext + rank - 1);
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_TRUE(waiting_.waits()) << waiting_.status();
}

// It has come to the step at which rank 0 waits for others, and is told to stop, say.
class StoppedBeforeItsFirstFrameTest : public TwoComeBackTest {
 protected:
  void Begin() {
    BringTwoBack();
    GiveStatesTo(1, kNext);
    GiveStatesTo(2, kNext + 1);
    waiting_ = Send(0, 1);
  }

  void GiveStatesTo(uint32_t rank, uint64_t incarnation) {
    for (uint32_t chunk : {0, 1}) {
      const auto fetch = SendChunk(rank, 1, chunk, FETCH, incarnation, /*answered_steps=*/1);
      SendChunk(0, 1, chunk, STATE);
      EXPECT_TRUE(fetch.ok()) << fetch.status();
    }
  }

  // Both, after all steps that are done.
  void LeaveBoth() {
    absl::Status one, two;
    Leave(1, one, kNext, /*steps=*/1);
    TakeSnapshots();
    Leave(2, two, kNext + 1, /*steps=*/1);
    EXPECT_EQ(absl::IsUnknown(two), state_dir_ != nullptr) << "it is written down first";
    TakeSnapshots();
    EXPECT_TRUE(one.ok() && two.ok()) << one << two;
  }
};

TEST_F(StoppedBeforeItsFirstFrameTest, TheLastThatTrainsGoesOn) {
  Begin();
  LeaveBoth();
  EXPECT_TRUE(waiting_.waits()) << waiting_.status();
  ExpectAnotherCanComeInThePlaceOf(2);
  EXPECT_TRUE(waiting_.ok()) << waiting_.status();
}

TEST_F(StoppedBeforeItsFirstFrameTest, AFrameThatComesBehindItsLeaveDoesNotBringItBack) {
  Begin();
  LeaveBoth();
  EXPECT_FALSE(Send(2, 1, kNext + 1).ok());
  EXPECT_THAT(StatusOf(*aggregator_).absent_ranks(), Contains(2));
  ExpectAnotherCanComeInThePlaceOf(2);
}

TEST_F(StoppedBeforeItsFirstFrameTest, AlsoIfTheAggregatorIsStartedAgain) {
  MakeDurable();
  Begin();
  LeaveBoth();
  Restart();
  absl::Status again;  // its answer was lost
  Leave(2, again, kNext + 1, /*steps=*/1);
  TakeSnapshots();
  EXPECT_TRUE(again.ok()) << again;
  waiting_ = Send(0, 1);
  EXPECT_TRUE(waiting_.waits()) << waiting_.status();
  ExpectAnotherCanComeInThePlaceOf(2);
  EXPECT_TRUE(waiting_.ok()) << waiting_.status();
}

TEST_F(StoppedBeforeItsFirstFrameTest, AnAggregatorThatIsStartedAgainClosesRoundsWithoutIt) {
  MakeDurable();
  Begin();
  LeaveBoth();
  ExpectAnotherCanComeInThePlaceOf(1);
  TakeSnapshots();
  Restart();
  const auto others = {Send(0, 2), Send(1, 2, kNext + 2)};
  aggregator_->CloseLateRounds();
  for (const ExchangeResult& closed : others) EXPECT_TRUE(closed.ok()) << closed.status();
}

TEST_F(StoppedBeforeItsFirstFrameTest, AnAggregatorThatIsStartedAgainWaitsForThoseThatMayBeThere) {
  MakeDurable();
  Begin();
  LeaveBoth();
  ExpectAnotherCanComeInThePlaceOf(1);
  ExpectAnotherCanComeInThePlaceOf(2);
  TakeSnapshots();
  Restart();
  const auto others = {Send(0, 2), Send(1, 2, kNext + 2)};
  PassDeadline();
  for (const ExchangeResult& open : others) EXPECT_TRUE(open.waits()) << open.status();
}

TEST_F(StoppedBeforeItsFirstFrameTest, AJobThatAllOthersHaveLeftOrDiedOfIsOverAlsoAfterARestart) {
  MakeDurable();
  Begin();
  LeaveBoth();
  Restart();
  Send(0, 1);
  Die(1000);
  const auto claim = Claim(1, kNext + 2);
  PassDeadline();
  EXPECT_TRUE(claim.waits()) << "rank 0 may connect again: " << claim.status();
  PassGrace();
  EXPECT_THAT(claim.message(), HasSubstr("the job begins anew"));
}

TEST_F(StoppedBeforeItsFirstFrameTest, GivesUpAlsoIfNothingOfItHasComeToAnAggregatorSinceItsStart) {
  MakeDurable();
  Begin();
  for (int i = 0; i < 2; ++i) {
    TakeSnapshots();
    Restart();
  }
  LeaveBoth();
  waiting_ = Send(0, 1);
  EXPECT_TRUE(waiting_.waits()) << waiting_.status();
  ExpectAnotherCanComeInThePlaceOf(2);
  EXPECT_TRUE(waiting_.ok()) << waiting_.status();
}

TEST_F(StoppedBeforeItsFirstFrameTest, WhoHasContributedSinceLeavesForGood) {
  MakeDurable();
  Begin();
  TakeSnapshots();
  Restart();
  Send(0, 1);
  ASSERT_TRUE(Send(1, 1, kNext).waits());
  ASSERT_TRUE(Send(2, 1, kNext + 1).ok());
  TakeSnapshots();
  Restart();
  absl::Status left;
  for (uint32_t rank : {1, 2}) {
    Leave(rank, left, kNext + rank - 1, /*steps=*/2);
    TakeSnapshots();
    EXPECT_TRUE(left.ok()) << left;
  }
  EXPECT_THAT(Send(0, 2).message(), HasSubstr("has left"));
}

TEST_F(StoppedBeforeItsFirstFrameTest, ALeaveThatComesAgainIsAnsweredWhateverHasBecomeOfTheOthers) {
  MakeDurable();
  Begin();
  LeaveBoth();  // rank 1 has left, rank 2 would leave too few
  absl::Status left, again;
  Leave(0, left, {}, /*steps=*/1);
  Leave(1, again, kNext, /*steps=*/1);  // its answer was lost
  TakeSnapshots();
  EXPECT_TRUE(left.ok() && again.ok()) << left << again;
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(StoppedBeforeItsFirstFrameTest, AtItsEndTheJobIsForgottenWhenTheOthersHaveLeft) {
  MakeDurable();
  Begin();
  LeaveBoth();
  Restart();
  absl::Status left;
  Leave(0, left, {}, /*steps=*/1);
  TakeSnapshots();
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(StoppedBeforeItsFirstFrameTest, WhoWaitsForAStateThatNobodyHasAnyMoreIsToldAtOnce) {
  Begin();
  EXPECT_TRUE(LeaveOf(0).ok());
  const auto fetch = SendChunk(2, 1, 0, FETCH, kNext + 1, /*answered_steps=*/1);
  EXPECT_TRUE(fetch.waits()) << "rank 1 has it";
  absl::Status left;
  Leave(1, left, kNext, /*steps=*/1);
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_THAT(fetch.message(), HasSubstr("nobody has its state any more"));
  EXPECT_TRUE(fetch.is_to_be_tried_again());
}

TEST_F(ReturningTest, WhoGivesUpWhenAllOthersHaveLeftIsTheLastToLeave) {
  min_workers_ = 1;
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  SendChunk(1, 1, 0, FETCH, kNext);
  for (uint32_t rank : {0, 2}) EXPECT_TRUE(LeaveOf(rank).ok());
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
  absl::Status left;
  Leave(1, left, kNext);
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(ReturningTest, WhoWaitsForAStateInVainCountsOnlyWhileItIsThere) {
  Start();
  Send(0, 0);
  Die(1001);
  Die(1002);
  const auto claim = Claim(1);
  PassDeadline();
  ASSERT_TRUE(claim.ok()) << claim.status();
  SendChunk(1, 0, 0, FETCH, kNext);
  ASSERT_EQ(SendChunk(0, 0, 0, ONE_BIT).value().answer->header.codec(), FETCH);
  Die(kNext);
  for (int i = 0; i < 20; ++i) PassDeadline();
  EXPECT_EQ(StatusOf(*aggregator_).rounds_closed(), 0);
}

// Rank 1's next process comes when others were asked for the state for long, for the one before.
TEST_F(ReturningTest, WhoComesNextWaitsForAStateFromTheBeginning) {
  Start();
  Send(0, 0);
  Claim(1);
  PassDeadline();
  const auto before = SendChunk(1, 0, 0, FETCH, kNext);
  ASSERT_EQ(SendChunk(0, 0, 0, ONE_BIT).value().answer->header.codec(), FETCH);
  SendChunk(0, 0, 0, ONE_BIT);
  now_ += absl::Seconds(9);
  Die(kNext);
  const auto claim = Claim(1, kNext + 1);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_TRUE(before.is_to_be_tried_again()) << before.status();
  SendChunk(1, 0, 0, FETCH, kNext + 1);
  const auto asked = SendChunk(0, 0, 0, ONE_BIT);
  ASSERT_TRUE(asked.ok()) << "at once";
  EXPECT_EQ(asked.value().answer->header.codec(), FETCH);
  SendChunk(0, 0, 0, ONE_BIT);
  now_ += absl::Seconds(9);
  aggregator_->CloseLateRounds();
  EXPECT_EQ(StatusOf(*aggregator_).rounds_closed(), 0);
  now_ += absl::Seconds(1);
  aggregator_->CloseLateRounds();
  EXPECT_EQ(StatusOf(*aggregator_).rounds_closed(), 2) << "of both chunks";
}

TEST_F(ReturningTest, WhoseProcessIsGoneIsNotAskedForAState) {
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  const auto there = SendChunk(0, 1, 0, ONE_BIT), gone = SendChunk(2, 1, 0, ONE_BIT);
  ASSERT_TRUE(there.waits() && gone.waits());
  Die(1002);
  SendChunk(1, 1, 0, FETCH, kNext);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(there.ok()) << there.status();
  EXPECT_EQ(there.value().answer->header.codec(), FETCH);
}

TEST_F(ReturningTest, AQuestionThatWasLostWithItsConnectionIsAskedAgainAtOnce) {
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  SendChunk(1, 1, 0, FETCH, kNext);
  const auto send = [&](uint32_t chunk, uint32_t next_fetch) {
    return SendChunk(0, 1, chunk, ONE_BIT, {}, 0, next_fetch);
  };
  const auto is_question = [](const ExchangeResult& result) {
    return result.ok() && result.value().answer->header.codec() == FETCH;
  };
  EXPECT_TRUE(is_question(send(0, 1)));
  EXPECT_TRUE(send(1, 1).waits()) << "it has been asked";
  EXPECT_TRUE(is_question(send(0, 1))) << "that was lost";
  EXPECT_TRUE(send(0, 2).waits()) << "it gives the state";
}

TEST_F(ReturningTest, SoIsOneToACallThatWaited) {
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  const auto waiting = SendChunk(0, 1, 0, ONE_BIT, {}, 0, /*next_fetch=*/3);
  SendChunk(1, 1, 1, FETCH, kNext);
  aggregator_->CloseLateRounds();
  ASSERT_TRUE(waiting.ok()) << waiting.status();
  ASSERT_EQ(waiting.value().answer->header.codec(), FETCH);
  const auto again = SendChunk(0, 1, 0, ONE_BIT, {}, 0, /*next_fetch=*/3);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again.value().answer->header.codec(), FETCH);
  EXPECT_THAT(again.value().answer->header.wanted_chunks(), ElementsAre(1));
  EXPECT_TRUE(SendChunk(0, 1, 0, ONE_BIT, {}, 0, /*next_fetch=*/4).waits());
}

TEST_F(ReturningTest, IsLookedAfterEachSecondHoweverLongADeadlineIs) {
  round_deadline_ = absl::Hours(1);
  const absl::Duration second = absl::Seconds(1), minutes = absl::Minutes(5);
  Start();
  EXPECT_GT(aggregator_->CloseLateRounds(), minutes);
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  const auto claim = Claim(1);
  EXPECT_EQ(aggregator_->CloseLateRounds(), second);
  now_ += round_deadline_;
  EXPECT_EQ(aggregator_->CloseLateRounds(), second);
  ASSERT_TRUE(claim.ok()) << claim.status();
  const auto fetch = SendChunk(1, 1, 0, FETCH, kNext);
  EXPECT_EQ(aggregator_->CloseLateRounds(), second);
  Send(0, 1);
  SendChunk(0, 1, 0, STATE);
  Send(1, 1, kNext);
  EXPECT_GT(aggregator_->CloseLateRounds(), minutes) << "it takes part";
  EXPECT_TRUE(LeaveOf(0).ok());
  EXPECT_EQ(aggregator_->CloseLateRounds(), second) << "the others may be gone without a word";
}

TEST_F(ReturningTest, FollowsRoundsThatItHasNoPartIn) {
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  Claim(1);
  PassDeadline();
  const auto closed = SendChunk(1, 0, 0, LISTEN, kNext);
  ASSERT_TRUE(closed.status().ok()) << closed.status();
  EXPECT_EQ(closed.value().answer->header.codec(), ONE_BIT);
  EXPECT_EQ(closed.value().later_rates.size(), 1);
  const auto open = SendChunk(1, 1, 0, LISTEN, kNext);
  EXPECT_TRUE(open.waits());
  for (uint32_t rank : {0, 2}) Send(rank, 1);
  PassDeadline();
  EXPECT_TRUE(open.status().ok()) << open.status();
}

// The next attempt begins the job anew.
TEST_F(ReturningTest, WhereAllOthersHaveLeftItIsToTryAgain) {
  min_workers_ = 1;
  Start();
  for (uint32_t rank : {0, 2}) Send(rank, 0);
  const auto claim = Claim(1);
  PassDeadline();
  ASSERT_TRUE(claim.status().ok()) << claim.status();
  const auto fetch = SendChunk(1, 1, 0, FETCH, kNext);
  const auto listen = SendChunk(1, 1, 1, LISTEN, kNext);
  for (uint32_t rank : {0, 2}) EXPECT_TRUE(LeaveOf(rank).ok());
  for (const ExchangeResult& ended : {fetch, listen}) {
    EXPECT_THAT(ended.message(), HasSubstr("nobody has its state any more"));
    EXPECT_TRUE(ended.is_to_be_tried_again());
  }
}

TEST_F(ReturningTest, AClaimOfAJobThatIsOverIsToTryAgain) {
  Start();
  EXPECT_TRUE(LeaveOf(0).ok());
  const auto claim = Claim(1);
  for (uint32_t rank : {1, 2}) EXPECT_TRUE(LeaveOf(rank).ok());
  EXPECT_THAT(claim.message(), HasSubstr("the job is over"));
  EXPECT_TRUE(claim.is_to_be_tried_again());
}

// Rank 1's process is gone before any frame has come, and the others may wait for it elsewhere: at
// another shard, or in a round that nobody is left out of.
class BeginningTest : public ReturningTest {
 protected:
  void ExpectIsOver(const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("the process of rank 1 was gone"));
    EXPECT_TRUE(IsTryAgain(status)) << status;
  }

  // With these processes.
  void ExpectBeginsAnew(const std::vector<JoinResult>& joined) {
    for (const JoinResult& join : joined) {
      ASSERT_TRUE(join.ok()) << join.message();
      EXPECT_FALSE(join.value().returning());
      EXPECT_GT(join.value().epoch(), epoch_);
    }
  }
};

TEST_F(BeginningTest, ANextProcessOfARankThatIsGoneBeginsTheJobAnew) {
  Start();
  Die(1001);
  const JoinResult first = Claim(1);
  const auto told = Send(0, 0);
  EXPECT_TRUE(told.is_to_be_tried_again()) << told.status();
  EXPECT_THAT(told.message(), HasSubstr("is over"));
  ExpectBeginsAnew({Claim(2, 2002), Claim(0, 2000), first});
}

TEST_F(BeginningTest, SoDoTwo) {
  Start();
  Die(1001);
  Die(1002);
  const JoinResult first = Claim(1), second = Claim(2, kNext + 1);
  ExpectBeginsAnew({Claim(0, 2000), first, second});
}

TEST_F(BeginningTest, AlsoIfItsProcessIsFoundToBeGoneLater) {
  Start();
  const auto claim = Claim(1);
  PassGrace();
  EXPECT_TRUE(claim.waits()) << "the process before is only slow";
  EXPECT_TRUE(Send(0, 0).waits());
  Start();
  const auto other_claim = Claim(1);
  Die(1001);
  PassDeadline();
  EXPECT_EQ(other_claim.code(), absl::StatusCode::kUnavailable) << "its channel calls again";
  EXPECT_THAT(other_claim.message(), HasSubstr("begins anew"));
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(BeginningTest, AlsoIfItsProcessHasLeft) {
  Start();
  ASSERT_TRUE(LeaveOf(1).ok());
  const JoinResult first = Claim(1);
  ExpectBeginsAnew({Claim(0, 2000), Claim(2, 2002), first});
}

TEST_F(BeginningTest, AlsoIfItLeavesWhileAnotherWaits) {
  Start();
  const auto claim = Claim(1);
  ASSERT_TRUE(LeaveOf(1).ok());
  PassDeadline();
  EXPECT_EQ(claim.code(), absl::StatusCode::kUnavailable) << "its channel calls again";
}

TEST_F(BeginningTest, AFrameOfAnyRankTellsThatAllCouldBegin) {
  Start();
  Send(2, 0);
  Die(1001);
  const auto claim = Claim(1);
  EXPECT_TRUE(claim.waits()) << claim.status();
  Send(0, 0);
  PassDeadline();
  ASSERT_TRUE(claim.ok()) << claim.message();
  EXPECT_TRUE(claim.value().returning());
  EXPECT_EQ(claim.value().epoch(), epoch_);
}

// Which has let in who comes here, and may have frames already.
TEST_F(BeginningTest, AnotherShardLeavesThatToTheFirst) {
  shard_ = 1;
  Start();
  Die(1001);
  const auto claim = Claim(1);
  PassDeadline();
  EXPECT_TRUE(claim.waits()) << claim.status();
  for (const uint32_t rank : {0, 2}) SendChunk(rank, 0, 1, ONE_BIT);
  PassDeadline();
  ASSERT_TRUE(claim.ok()) << claim.message();
  EXPECT_TRUE(claim.value().returning());
}

TEST_F(BeginningTest, AJobWhoseErrorsGoBackHasNotTrainedYet) {
  first_step_ = 5;
  Start();
  const auto restores = SendChunk(0, 4, 0, RESTORE);
  ASSERT_TRUE(restores.waits()) << restores.status();
  Die(1001);
  const auto claim = Claim(1);
  EXPECT_TRUE(claim.waits()) << claim.status();
  ExpectIsOver(restores.status());
}

TEST_F(BeginningTest, NorHasItWhenAllOfThemHaveGoneBackHere) {
  first_step_ = 5;
  Start();
  for (uint32_t chunk : {0, 1}) {
    ExchangeResult restored;
    for (uint32_t rank : {0, 1, 2}) restored = SendChunk(rank, 4, chunk, RESTORE);
    ASSERT_TRUE(restored.ok()) << restored.message();
  }
  Die(1001);
  const JoinResult first = Claim(1);
  ExpectBeginsAnew({Claim(0, 2000), Claim(2, 2002), first});
}

// Ranks 1 and 2 come back to rank 0, which is alone and dies before it has given them anything.
class AloneTest : public ReturningTest {
 protected:
  void Begin() {
    min_workers_ = 1;
    Start();
    Send(0, 0);
    Die(1001);
    Die(1002);
    Claim(1);
    Claim(2, kNext + 1);
    PassDeadline();
    Send(0, 1);
    fetches_ = {SendChunk(1, 0, 0, FETCH, kNext), SendChunk(2, 0, 0, FETCH, kNext + 1)};
  }

  std::vector<ExchangeResult> fetches_;
};

TEST_F(AloneTest, AJobWhoseStateNobodyHasAnyMoreIsOver) {
  Begin();
  PassGrace();
  EXPECT_TRUE(fetches_[0].waits()) << "rank 0 may be slow";
  Die(1000);
  PassDeadline();
  EXPECT_TRUE(fetches_[0].waits()) << "it may connect again";
  PassGrace();
  for (const ExchangeResult& fetch : fetches_) {
    EXPECT_THAT(fetch.message(), HasSubstr("all of its processes are gone"));
    EXPECT_TRUE(fetch.is_to_be_tried_again());
  }
  std::vector<JoinResult> next;
  for (uint32_t rank : {0, 1, 2}) next.push_back(Claim(rank, 2000 + rank));
  for (const JoinResult& joined : next) {
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_FALSE(joined.value().returning());
    EXPECT_GT(joined.value().epoch(), epoch_);
  }
}

TEST_F(AloneTest, AnotherProcessInThePlaceOfTheLastWithTheStateIsNotWaitedFor) {
  Begin();
  Die(1000);
  const JoinResult claim = Claim(0, kNext + 2);
  for (const ExchangeResult& fetch : fetches_) {
    EXPECT_THAT(fetch.message(), HasSubstr("the process of rank 0 was gone, and its state"));
    EXPECT_TRUE(fetch.is_to_be_tried_again());
  }
  EXPECT_TRUE(claim.waits()) << "for the others, to begin anew";
}

TEST_F(AloneTest, ARankThatIsGivenStateMayHaveAllOfIt) {
  Begin();
  SendChunk(0, 1, 0, STATE);
  ASSERT_TRUE(fetches_[0].ok()) << fetches_[0].message();
  Die(1000);
  PassGrace();
  EXPECT_TRUE(SendChunk(1, 2, 0, FETCH, kNext).waits());
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
}

TEST_F(AloneTest, ARankThatConnectsAgainInTimeHasItsState) {
  Begin();
  Die(1000);
  for (absl::Time end = now_ + grace_ - absl::Seconds(5); now_ < end;) PassDeadline();
  gone_.erase(PeerOf(1000));
  PassDeadline();
  Die(1000);
  PassDeadline();
  EXPECT_TRUE(fetches_[0].waits());
}

// With a state directory, and rank 1 gone.
class EndingTest : public ReturningTest {
 protected:
  void Begin(uint32_t min_workers) {
    min_workers_ = min_workers;
    MakeDurable();
    Start();
    for (uint32_t rank : {0, 2}) Send(rank, 0);
    Die(1001);
    PassDeadline();
  }

  void LeaveDurably(uint32_t rank) {
    absl::Status left;
    Leave(rank, left);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
    EXPECT_TRUE(left.ok()) << left;
  }

  std::vector<JobState> Saved() {
    auto recovered = state_dir_->Recover(/*allow_error_reset=*/false);
    EXPECT_TRUE(recovered.ok()) << recovered.status();
    return std::move(recovered->jobs);
  }
};

TEST_F(EndingTest, AJobIsOverWhenItsRanksHaveLeftOrAreGone) {
  Begin(/*min_workers=*/2);
  LeaveDurably(0);
  PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job")) << "rank 2 is there";
  LeaveDurably(2);
  PassDeadline();
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job")) << "rank 1 may connect again";
  PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
  ASSERT_TRUE(aggregator_->TakeSnapshots().ok());
  EXPECT_THAT(Saved(), IsEmpty());
}

TEST_F(EndingTest, ThoseThatAreCutOffComeAgainIfTheyAreEnough) {
  Begin(/*min_workers=*/1);
  LeaveDurably(0);
  Die(1002);
  for (int i = 0; i < 2; ++i) PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
  now_ += absl::Minutes(10);
  for (int i = 0; i < 2; ++i) PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(EndingTest, AlsoIfAnotherProcessWaitsARankThatWasNotHeardOfMayBeThere) {
  Begin(/*min_workers=*/1);
  Restart();
  const auto claim = Claim(1);
  for (int i = 0; i < 4; ++i) PassGrace();
  EXPECT_TRUE(claim.waits()) << claim.status();
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
}

TEST_F(EndingTest, ARankThatARestartedAggregatorHasNotHeardOfMayBeThere) {
  Begin(/*min_workers=*/2);
  Restart();
  LeaveDurably(0);
  LeaveDurably(2);
  PassGrace();
  PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), ElementsAre("job"));
  now_ += absl::Minutes(10);
  PassGrace();
  EXPECT_THAT(JobNames(*aggregator_), IsEmpty());
}

TEST_F(ReturningTest, WithoutARoundDeadlineNobodyCanComeBack) {
  min_workers_ = kWorkers;
  Start();
  EXPECT_TRUE(absl::IsAlreadyExists(Claim(1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SendChunk(1, 0, 0, FETCH).status()));
}

FrameHeader HeaderOf(uint32_t rank, uint32_t chunk, uint32_t next_fetch = 0) {
  FrameHeader header;
  header.set_rank(rank);
  header.set_chunk(chunk);
  header.set_next_fetch(next_fetch);
  return header;
}

// Of tensor `size` in one chunk.
Layout LayoutOfSize(uint64_t size) {
  JoinRequest join = TestJoin(0, 1);
  join.mutable_options()->set_chunk_elements(1 << 21);
  join.clear_tensors();
  Tensor& tensor = *join.add_tensors();
  tensor.set_name("tensor");
  tensor.add_shape(size);
  return LayoutOf(join);
}

TEST(StateDesk, AsksAnotherAfterAWhile) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), IsEmpty());
  CallResult<OwnedChunk::Reply> first, second;
  desk.Fetch(HeaderOf(1, 1), first.done());
  desk.Fetch(HeaderOf(2, 1), second.done());
  EXPECT_THAT(desk.WaitingRanks(), ElementsAre(1, 2));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), ElementsAre(1));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(3, 0), now), IsEmpty());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now + absl::Seconds(6)), IsEmpty())
      << "others may be there";
  EXPECT_THAT(desk.TakeWanted(HeaderOf(3, 0), now + absl::Seconds(6)), ElementsAre(1));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now + absl::Seconds(12)), IsEmpty());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now + absl::Seconds(17)), ElementsAre(1)) << "or not";
  desk.Give({HeaderOf(0, 1), Payload(24)}, /*generation=*/5);
  EXPECT_EQ(first.value().answer, second.value().answer);
  EXPECT_EQ(OwnedChunk::HeaderOf(second.value()).generation(), 5);
  EXPECT_THAT(desk.WaitingRanks(), IsEmpty());
}

TEST(StateDesk, AsksAnotherAtOnceWhenThoseThatWereAskedAreGone) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  CallResult<OwnedChunk::Reply> fetch;
  desk.Fetch(HeaderOf(1, 1), fetch.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), ElementsAre(1));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(3, 0), now, /*gone=*/{2}), IsEmpty());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(3, 0), now, /*gone=*/{0, 2}), ElementsAre(1));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(2, 0), now, /*gone=*/{0}), IsEmpty()) << "rank 3 gives it";
}

// As before a freeze of the variance, which another shard is behind.
TEST(StateDesk, DoesNotAskWhoseStatesAreOfNoUse) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  FrameHeader fetch = HeaderOf(1, 1), frame = HeaderOf(0, 0);
  fetch.set_step(15);
  CallResult<OwnedChunk::Reply> state, other;
  desk.Fetch(fetch, state.done());
  frame.set_step(13);
  EXPECT_THAT(desk.TakeWanted(frame, now), IsEmpty());
  frame.set_answered_steps(14);  // it may have begun the step after
  EXPECT_THAT(desk.TakeWanted(frame, now), ElementsAre(1));
  frame = HeaderOf(3, 0);
  frame.set_step(14);
  EXPECT_THAT(desk.TakeWanted(frame, now + absl::Seconds(6)), ElementsAre(1));
  desk.Fetch(HeaderOf(2, 1), other.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now + absl::Seconds(17)), ElementsAre(1))
      << "it is of use to rank 2";
  desk.End(absl::CancelledError());
}

TEST(StateDesk, AsksForALargeStateAgainWhenASlowLinkWouldHaveSentIt) {
  const Layout layout = LayoutOfSize(1 << 21);  // 25 MB
  StateDesk desk(layout);
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  CallResult<OwnedChunk::Reply> fetch;
  desk.Fetch(HeaderOf(1, 0), fetch.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), ElementsAre(0));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(2, 0), now + absl::Seconds(28)), IsEmpty());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(2, 0), now + absl::Seconds(31)), ElementsAre(0));
  desk.End(absl::CancelledError());
}

TEST(StateDesk, AsksAgainAtOnceWhenTheFrameComesAgainAsItWas) {
  const Layout layout = LayoutOfSize(1 << 21);
  StateDesk desk(layout);
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  const FrameHeader frame = HeaderOf(0, 0, 1), next = HeaderOf(0, 0, 2), other = HeaderOf(0, 5, 1);
  CallResult<OwnedChunk::Reply> fetch;
  desk.Fetch(HeaderOf(1, 0), fetch.done());
  EXPECT_THAT(desk.TakeWanted(frame, now), ElementsAre(0));
  EXPECT_THAT(desk.TakeWanted(other, now), IsEmpty()) << "it was on its way";
  EXPECT_THAT(desk.TakeWanted(frame, now), ElementsAre(0)) << "the question was lost";
  EXPECT_THAT(desk.TakeWanted(frame, now), ElementsAre(0)) << "once more";
  EXPECT_THAT(desk.TakeWanted(next, now), IsEmpty()) << "it has come";
  EXPECT_THAT(desk.TakeWanted(next, now + absl::Seconds(50)), IsEmpty()) << "and waits";
  desk.End(absl::CancelledError());
}

TEST(StateDesk, DoesNotAskAgainWhenAnotherHasBeenAskedSince) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  CallResult<OwnedChunk::Reply> fetch;
  desk.Fetch(HeaderOf(1, 0), fetch.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0, 1), now), ElementsAre(0));
  const absl::Time later = now + absl::Seconds(6);
  EXPECT_THAT(desk.TakeWanted(HeaderOf(2, 0, 1), later), ElementsAre(0));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0, 1), later), IsEmpty());
  desk.End(absl::CancelledError());
}

// As an older one, which would send each state for ever.
TEST(StateDesk, TakesNoFrameOfAWorkerThatDoesNotCountForOneWhoseQuestionWasLost) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  CallResult<OwnedChunk::Reply> fetch;
  desk.Fetch(HeaderOf(1, 0), fetch.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), ElementsAre(0));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), IsEmpty());
  desk.End(absl::CancelledError());
}

TEST(StateDesk, ForgetsWhatAProcessThatIsGoneHasAskedFor) {
  StateDesk desk(TestLayout());
  const absl::Time now = absl::FromUnixSeconds(1700000000);
  CallResult<OwnedChunk::Reply> gone, other;
  desk.Fetch(HeaderOf(1, 0), gone.done());
  desk.Fetch(HeaderOf(2, 1), other.done());
  EXPECT_THAT(desk.TakeWanted(HeaderOf(0, 0), now), ElementsAre(0, 1));
  EXPECT_THAT(desk.RanksInVain(now + absl::Seconds(9)), IsEmpty());
  EXPECT_THAT(desk.RanksInVain(now + absl::Seconds(10)), ElementsAre(1, 2));
  desk.Withdraw(1, absl::AbortedError("gone"));
  EXPECT_TRUE(absl::IsAborted(gone.status())) << gone.status();
  EXPECT_THAT(desk.RanksInVain(now + absl::Seconds(10)), ElementsAre(2));
  EXPECT_THAT(desk.TakeWanted(HeaderOf(3, 0), now + absl::Minutes(1)), ElementsAre(1));
  desk.End(absl::CancelledError());
}

TEST(StateDesk, EndsEveryCall) {
  StateDesk desk(TestLayout());
  CallResult<OwnedChunk::Reply> before, again, after;
  desk.Fetch(HeaderOf(1, 0), before.done());
  desk.Fetch(HeaderOf(1, 0), again.done());
  EXPECT_TRUE(absl::IsAborted(before.status())) << before.status();
  desk.End(absl::UnavailableError("over"));
  EXPECT_TRUE(absl::IsUnavailable(again.status())) << again.status();
  desk.Fetch(HeaderOf(1, 0), after.done());
  EXPECT_TRUE(absl::IsUnavailable(after.status())) << after.status();
}

}  // namespace
}  // namespace signpost
