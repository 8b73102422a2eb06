#include "worker/replica_fetch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/try_again.h"
#include "worker/channel.h"
#include "worker/clock.h"
#include "worker/kept_frames.h"
#include "worker/onebit_adam.h"

namespace signpost {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr uint64_t kStep = 3;

// Gives chunk 0 as it is before kStep, and any other as it is `ahead` steps later; in each round
// that it is asked for rank 1 was late. All numbers are zero.
class OthersChannel : public Channel {
 public:
  OthersChannel(const Layout& layout, const Schedule& schedule)
      : layout_(layout), schedule_(schedule) {}

  std::string target() const override { return "host:1"; }
  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload>, absl::Time,
                ExchangeDone done) override {
    if (asked != nullptr) asked->push_back(absl::StrCat(CodecName(header.codec()), header.chunk()));
    Answer answer;
    answer.header.set_chunk(header.chunk());
    answer.header.set_open_step(open_step);
    if (header.codec() == FETCH) {
      fetched.push_back(header.chunk());
      least_steps.push_back(header.step());
      first_steps.push_back(header.answered_steps());
      answer.header.set_codec(STATE);
      answer.header.set_step(kStep + (header.chunk() > 0 ? ahead : 0));
      if (fetched.size() > restarted_after) generation = 2;
      answer.header.set_generation(generation);
      if (freezes) schedule_.set_freeze_step(kStep);
      schedule_.set_begun_steps(answer.header.step());
      *answer.header.add_later_rates()->mutable_schedule() = schedule_;
    } else {
      if (++listened > 1000) return done(absl::UnavailableError("it is enough"));
      if (listened <= too_slow) return done(absl::FailedPreconditionError("no longer kept"));
      answer.header.set_codec(freezes ? SKIP : FLOAT32);
      answer.header.set_step(header.step());
      answer.header.add_late_ranks(1);
      if (header.step() >= restarted_before) generation = 2;
      answer.header.set_generation(generation);
      if (saves) answer.header.set_durable_step(header.step());
      schedule_.set_begun_steps(header.step() + 1);
      *answer.header.add_later_rates() = MessageOf({GroupRates()}, schedule_);
    }
    if (answer.header.codec() == SKIP) {
      answer.payload = SkipPayload(/*block=*/0);
    } else {
      answer.payload = Payload(layout_.PayloadBytes(answer.header.codec(), header.chunk()));
      std::memset(answer.payload.data(), 0, answer.payload.size());
    }
    answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
    done(std::move(answer));
  }
  absl::StatusOr<JoinResponse> Join(const JoinRequest&, absl::Time, CheckMayWait) override {
    return absl::UnimplementedError("");
  }
  absl::Status Leave(const LeaveRequest&, absl::Time) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest&, absl::Time) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<StatusResponse> Status(const StatusRequest&, absl::Time) override {
    return absl::UnimplementedError("");
  }

  uint64_t ahead = 1;
  bool saves = false;  // with each answer all rounds before are durable
  // The step whose LISTEN another process of the aggregator answers, as all that come then.
  uint64_t restarted_before = std::numeric_limits<uint64_t>::max();
  size_t restarted_after = std::numeric_limits<size_t>::max();  // likewise: how many were fetched
  uint64_t generation = 0;                                      // of the process that answers
  uint64_t open_step = 0;         // that others are in, as answers say
  bool freezes = false;           // the variance, before kStep; later rounds are skipped
  uint32_t listened = 0;          // how often
  uint32_t too_slow = 0;          // so often, at first
  std::vector<uint32_t> fetched;  // chunks
  std::vector<std::string>* asked = nullptr;       // for what, of all channels that have it
  std::vector<uint64_t> least_steps, first_steps;  // that were said with it

 private:
  const Layout& layout_;
  Schedule schedule_;
};

Layout TwoChunks() {
  Tensor tensor;
  tensor.set_name("a");
  tensor.add_shape(16);
  JobOptions options;
  options.set_block_elements(8);
  options.set_chunk_elements(8);
  options.set_gamma(1.35f);
  return *Layout::Create({tensor}, options);
}

class FetchReplicaTest : public ::testing::Test {
 protected:
  absl::StatusOr<Replica> Fetch() { return FetchFrom(channel_, channel_); }
  // The chunks.
  absl::StatusOr<Replica> FetchFrom(OthersChannel& first, OthersChannel& second,
                                    uint32_t window = 2) {
    const ReplicaSource source = {.channel_of_chunk = {&first, &second},
                                  .header_of =
                                      [](uint32_t chunk) {
                                        FrameHeader header;
                                        header.set_chunk(chunk);
                                        return header;
                                      },
                                  .clock = &Clock::Real(),
                                  .timeout = absl::Seconds(10),
                                  .window = window};
    return FetchReplica(source, layout_, adam_);
  }

  const Layout layout_ = TwoChunks();
  std::vector<float> values_ = std::vector<float>(16);
  OneBitAdam adam_{layout_, {}, {{"a", {16}, absl::MakeSpan(values_)}}};
  OthersChannel channel_{layout_, adam_.schedule()};
};

TEST_F(FetchReplicaTest, KeepsWhatItHasListenedTo) {
  const absl::StatusOr<Replica> replica = Fetch();
  ASSERT_TRUE(replica.ok()) << replica.status();
  EXPECT_EQ(replica->step, kStep + 1);
  ASSERT_THAT(replica->followed, ElementsAre(SizeIs(1), IsEmpty()));
  const SentFrame& listen = replica->followed[0][0];
  EXPECT_EQ(listen.header.codec(), LISTEN);
  EXPECT_EQ(listen.header.step(), kStep);
  EXPECT_THAT(listen.header.late_ranks(), ElementsAre(1));
  EXPECT_TRUE(listen.answered);
  const std::vector<uint8_t> answer(layout_.PayloadBytes(FLOAT32, 0));
  EXPECT_EQ(listen.answer_crc32c, Crc32c(answer));
}

TEST_F(FetchReplicaTest, KeepsNothingThatIsDurable) {
  channel_.ahead = 3;
  channel_.saves = true;
  const absl::StatusOr<Replica> replica = Fetch();
  ASSERT_TRUE(replica.ok()) << replica.status();
  ASSERT_THAT(replica->followed, ElementsAre(SizeIs(1), IsEmpty()));
  EXPECT_EQ(replica->followed[0][0].header.step(), kStep + 2);
}

// Which may have closed what this rank has followed otherwise, and what it was given.
TEST_F(FetchReplicaTest, FetchesAgainWhatItFollowedBeforeTheAggregatorWasStartedAgain) {
  channel_.ahead = 2;
  channel_.restarted_before = kStep + 1;
  const absl::StatusOr<Replica> replica = Fetch();
  ASSERT_TRUE(replica.ok()) << replica.status();
  EXPECT_EQ(replica->step, kStep + 2);
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 1, 0, 1));
}

TEST_F(FetchReplicaTest, FetchesOnceWhatItFollowsAtOneProcessOfTheAggregator) {
  channel_.ahead = 2;
  channel_.generation = 1;
  ASSERT_TRUE(Fetch().ok());
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 1));
}

TEST_F(FetchReplicaTest, FetchesAgainWhatWasGivenBeforeTheAggregatorWasStartedAgain) {
  channel_.restarted_before = kStep;
  const absl::StatusOr<Replica> replica = Fetch();
  ASSERT_TRUE(replica.ok()) << replica.status();
  EXPECT_EQ(replica->step, kStep + 1);
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 1, 0, 1));
}

TEST_F(FetchReplicaTest, AlsoIfItHasNothingToFollow) {
  channel_.ahead = 0;
  channel_.restarted_after = 1;
  ASSERT_TRUE(Fetch().ok());
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 1, 0));
}

// Of what that process gave nothing is left but what it said of all chunks.
TEST_F(FetchReplicaTest, AlsoOfOtherAggregatorsIfItHasNoneOfThatOne) {
  OthersChannel other(layout_, adam_.schedule());
  other.ahead = 2;
  channel_.too_slow = 1;
  channel_.restarted_after = 1;
  ASSERT_TRUE(FetchFrom(channel_, other).ok());
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 0));
  EXPECT_THAT(other.fetched, ElementsAre(1, 1));
}

// Where too few others are left, each aggregator is to know who waits in vain.
TEST_F(FetchReplicaTest, AsksEachAggregatorWhileOthersStillOweAState) {
  std::vector<std::string> asked;
  OthersChannel other(layout_, adam_.schedule());
  channel_.asked = other.asked = &asked;
  ASSERT_TRUE(FetchFrom(channel_, other, /*window=*/1).ok());
  EXPECT_THAT(asked, ElementsAre("fetch0", "fetch1", "listen0"));
}

TEST_F(FetchReplicaTest, AlsoIfAllThatItHasOfOneIsBehindAFreeze) {
  OthersChannel other(layout_, adam_.schedule());
  channel_.freezes = other.freezes = true;
  channel_.ahead = other.ahead = 0;
  const absl::StatusOr<Replica> replica = FetchFrom(channel_, other);
  ASSERT_TRUE(replica.ok()) << replica.status();
  EXPECT_EQ(replica->step, kStep);
  EXPECT_EQ(channel_.listened, 1);
}

TEST_F(FetchReplicaTest, SaysFromWhichStepOnStatesCanBeGoneOnFrom) {
  channel_.ahead = 0;
  channel_.freezes = true;
  channel_.open_step = kStep + 1;
  EXPECT_FALSE(Fetch().ok());
  EXPECT_EQ(channel_.least_steps.front(), 0);
  EXPECT_EQ(channel_.first_steps.front(), 0);
  EXPECT_EQ(channel_.least_steps.back(), kStep + 1);
  EXPECT_EQ(channel_.first_steps.back(), kStep + 1);
}

// Another process may have come less far again.
TEST_F(FetchReplicaTest, AsksForAnyStateWhenTheAggregatorWasStartedAgain) {
  channel_.freezes = true;
  channel_.restarted_after = 2;
  ASSERT_TRUE(Fetch().ok());
  EXPECT_THAT(channel_.fetched, ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(channel_.least_steps, ElementsAre(0, 0, kStep + 1, 0));
}

// A state before the freeze, behind which another chunk is, is none to go on from. That one could
// be followed for ever.
TEST_F(FetchReplicaTest, GivesUpWhenNoStateOfAChunkCanBeGoneOnFrom) {
  channel_.freezes = true;
  const absl::Status status = Fetch().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(IsTryAgain(status));
  EXPECT_THAT(status.message(), HasSubstr("time and again"));
  EXPECT_EQ(absl::c_count(channel_.fetched, 0), 32);
}

}  // namespace
}  // namespace signpost
