#include "worker/chunk_exchanges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/layout.h"
#include "proto/try_again.h"
#include "trace/merge.h"
#include "trace/recorder.h"
#include "worker/channel.h"

namespace signpost {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint32_t kChunks = 4;
constexpr uint64_t kGeneration = 1;

// (chunk, step), of frames as they were sent.
using Sent = std::vector<std::pair<uint32_t, uint64_t>>;

// Notes what it is sent, and answers nothing but questions.
class NotingChannel : public Channel {
 public:
  NotingChannel(Sent& sent, const bool& is_over, uint32_t shard)
      : sent_(sent), is_over_(is_over), shard_(shard) {}

  std::string target() const override { return "host:1"; }
  absl::StatusOr<JoinResponse> Join(const JoinRequest&, absl::Time, CheckMayWait) override {
    return absl::UnimplementedError("");
  }
  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload>, absl::Time,
                ExchangeDone) override {
    sent_.emplace_back(header.chunk(), header.step());
  }
  absl::Status Leave(const LeaveRequest&, absl::Time) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time) override {
    return is_over_ ? TryAgain(absl::FailedPreconditionError("epoch 1 is over"))
                    : absl::FailedPreconditionError("the round has closed");
  }
  absl::StatusOr<StatusResponse> Status(const StatusRequest&, absl::Time) override {
    StatusResponse response;
    JobStatus& job = *response.add_jobs();
    job.set_snapshot_us(40'000'000);
    if (shard_ == 1) return response;
    job.add_waiting_for_ranks(3);
    job.add_disconnected_ranks(3);
    job.set_state_error("No space left on device");
    job.set_held_us(12'300'000);
    return response;
  }

 private:
  Sent& sent_;
  const bool& is_over_;  // the job's epoch
  const uint32_t shard_;
};

// Sends nothing.
class FailingChannel final : public NotingChannel {
 public:
  using NotingChannel::NotingChannel;
  void Exchange(const FrameHeader&, std::shared_ptr<const Payload>, absl::Time,
                ExchangeDone done) override {
    done(absl::CancelledError("the channel was closed"));
  }
};

Layout FourChunks() {
  Tensor tensor;
  tensor.set_name("a");
  tensor.add_shape(8 * kChunks);
  JobOptions options;
  options.set_block_elements(8);
  options.set_chunk_elements(8);
  options.set_gamma(1.35f);
  return *Layout::Create({tensor}, options);
}

template <typename OneChannel = NotingChannel>
std::vector<std::unique_ptr<Channel>> TwoChannels(Sent& sent, const bool& is_over) {
  std::vector<std::unique_ptr<Channel>> channels;
  for (uint32_t shard = 0; shard < 2; ++shard) {
    channels.push_back(std::make_unique<OneChannel>(sent, is_over, shard));
  }
  return channels;
}

class ChunkExchangesTest : public testing::Test {
 protected:
  ChunkExchangesTest() {
    for (uint32_t shard = 0; shard < 2; ++shard) exchanges_.SetGeneration(shard, kGeneration);
  }

  void Send(uint32_t chunk, uint64_t step, Codec codec = ONE_BIT) {
    auto payload = std::make_shared<Payload>(
        codec == SKIP ? SkipPayload(0) : Payload(layout_.PayloadBytes(codec, chunk)));
    SentFrame frame{shards_.HeaderOf(chunk, step, codec), std::move(payload), ONE_BIT};
    exchanges_.Send(chunk, std::move(frame));
  }

  // Of a frame of ONE_BIT; its sign bits are all `bits`.
  Answer AnswerOf(uint32_t chunk, uint64_t step, uint8_t bits = 0) {
    Answer answer{.payload = Payload(layout_.PayloadBytes(ONE_BIT, chunk))};
    std::memset(answer.payload.data(), 0, answer.payload.size());
    answer.payload.data()[answer.payload.size() - 1] = bits;
    answer.header.set_step(step);
    answer.header.set_chunk(chunk);
    answer.header.set_codec(ONE_BIT);
    answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
    return answer;
  }

  // The aggregator was started again, and wants frames from that step on.
  Answer ReplayFrom(uint32_t chunk, uint64_t step) {
    Answer answer;
    answer.header.set_step(step);
    answer.header.set_chunk(chunk);
    answer.header.set_codec(REPLAY);
    answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
    answer.header.set_generation(kGeneration + 1);
    return answer;
  }

  absl::StatusOr<std::optional<Answer>> Receive(uint32_t chunk, absl::StatusOr<Answer> answer) {
    return exchanges_.Receive(chunk, std::move(answer), report_);
  }

  // What was sent since the last call.
  Sent TakeSent() { return std::exchange(sent_, {}); }

  const Layout layout_ = FourChunks();
  const WorkerOptions options_ = {.job = "job"};
  Sent sent_;
  bool is_over_ = false;
  Shards shards_{options_, layout_, TwoChannels(sent_, is_over_)};
  StepReport report_;
  ChunkExchanges exchanges_{shards_, layout_, [](uint32_t, absl::StatusOr<Answer>) {}};
};

TEST_F(ChunkExchangesTest, OnlyTheFirstAnswerToAFrameIsNews) {
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0))->has_value());
  exchanges_.OfferAll(0);
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 0), std::pair(0, 0)));
  EXPECT_FALSE(Receive(0, AnswerOf(0, 0))->has_value());
  EXPECT_FALSE(exchanges_.is_any_under_way());
}

TEST_F(ChunkExchangesTest, AFrameFollowsTheOneThatIsUnderWay) {
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  exchanges_.OfferAll(0);
  TakeSent();
  Send(0, 1);
  EXPECT_THAT(TakeSent(), IsEmpty());
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 1)));
}

TEST_F(ChunkExchangesTest, AFrameFollowsAnOfferThatHasFailed) {
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  exchanges_.OfferAll(0);
  Send(0, 1);
  TakeSent();
  EXPECT_FALSE(Receive(0, absl::UnavailableError("gone"))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 1)));
}

// Which may be waited for: the answer was lost on its way, and came too late when it was sent again.
TEST_F(ChunkExchangesTest, AfterAFrameThatIsTooOldTheNewestIsOffered) {
  for (uint64_t step = 0; step < 3; ++step) {
    Send(0, step);
    ASSERT_TRUE(Receive(0, AnswerOf(0, step)).ok());
  }
  exchanges_.OfferAll(0);
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 0)).ok());
  TakeSent();
  EXPECT_FALSE(Receive(0, absl::FailedPreconditionError("no longer kept"))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 2)));
  EXPECT_FALSE(Receive(0, absl::FailedPreconditionError("no longer kept"))->has_value());
  EXPECT_THAT(TakeSent(), IsEmpty()) << "it is the newest";
}

TEST_F(ChunkExchangesTest, FramesAreKeptUntilTheyAreDurable) {
  for (uint64_t step = 0; step < 3; ++step) {
    Send(0, step);
    ASSERT_TRUE(Receive(0, AnswerOf(0, step)).ok());
  }
  EXPECT_EQ(exchanges_.kept_bytes(), 3 * layout_.PayloadBytes(ONE_BIT, 0));
  Send(0, 3);
  Answer answer = AnswerOf(0, 3);
  answer.header.set_durable_step(2);
  ASSERT_TRUE(Receive(0, std::move(answer)).ok());
  EXPECT_EQ(exchanges_.kept_bytes(), 2 * layout_.PayloadBytes(ONE_BIT, 0));
}

TEST_F(ChunkExchangesTest, AnAggregatorThatWasStartedAgainGetsWhatItHasLost) {
  for (uint64_t step = 0; step < 2; ++step) {
    Send(0, step);
    ASSERT_TRUE(Receive(0, AnswerOf(0, step)).ok());
  }
  Send(1, 0);
  ASSERT_TRUE(Receive(1, AnswerOf(1, 0)).ok());
  Send(0, 2);
  TakeSent();
  ASSERT_EQ(shards_.ShardOf(0), shards_.ShardOf(2)) << "and chunk 1 is another shard's";
  ASSERT_FALSE(Receive(0, ReplayFrom(0, 1))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 1)));
  EXPECT_FALSE(Receive(0, AnswerOf(0, 1))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 2)));
  EXPECT_TRUE(Receive(0, AnswerOf(0, 2))->has_value());
  EXPECT_EQ(report_.restarted_aggregators, 1);
  EXPECT_EQ(report_.replayed_frames, 1);
}

TEST_F(ChunkExchangesTest, ItsOtherChunksAreOfferedWhenOneAsksForAReplay) {
  for (const uint32_t chunk : {0, 1, 2}) {
    Send(chunk, 0);
    ASSERT_TRUE(Receive(chunk, AnswerOf(chunk, 0)).ok());
  }
  exchanges_.OfferToIdleShards();
  EXPECT_THAT(TakeSent(), testing::IsSupersetOf({std::pair(0, 0), std::pair(1, 0)}));
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 0)).ok());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 0), std::pair(2, 0)));
}

// Otherwise the others may wait for it, and this rank, a step further, has no room to send it.
TEST_F(ChunkExchangesTest, AlsoThoseThatTheEarlierProcessAnswersAfterwards) {
  Send(0, 0);
  Send(2, 0);
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 0)).ok());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 0), std::pair(2, 0), std::pair(0, 0)));
  ASSERT_TRUE(Receive(2, AnswerOf(2, 0))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(2, 0)));
  EXPECT_FALSE(Receive(2, AnswerOf(2, 0))->has_value());
  EXPECT_THAT(TakeSent(), IsEmpty()) << "the process that is there has it";
}

TEST_F(ChunkExchangesTest, WhoWaitsElsewhereHearsOfTheEpochsEndByAnOffer) {
  const absl::Status refused = TryAgain(absl::FailedPreconditionError("refused"));
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  Send(1, 0);
  exchanges_.OfferToIdleShards();
  EXPECT_TRUE(Receive(0, refused).ok())
      << "as a frame that is too old is, or one after a rank left";
  is_over_ = true;
  exchanges_.OfferToIdleShards();
  EXPECT_THAT(Receive(0, refused).status().message(), HasSubstr("epoch 1 is over"));
  ASSERT_TRUE(Receive(1, AnswerOf(1, 0)).ok());
  exchanges_.OfferToIdleShards();
  EXPECT_TRUE(Receive(0, refused).ok()) << "nothing more is needed";
}

TEST_F(ChunkExchangesTest, AReplayOfWhatWasDurableIsALoss) {
  Send(0, 0);
  Answer answer = AnswerOf(0, 0);
  answer.header.set_durable_step(1);
  ASSERT_TRUE(Receive(0, std::move(answer)).ok());
  Send(0, 1);
  const absl::Status status = Receive(0, ReplayFrom(0, 0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("aggregator host:1 (shard 0 of 2) was started again"));
  EXPECT_FALSE(exchanges_.is_any_under_way());
}

TEST_F(ChunkExchangesTest, AReplayOfRoundsBeforeThisRankCameBackIsNone) {
  exchanges_.SetFirstStep(5);
  Send(0, 5);
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 3)).ok());
  TakeSent();
  // The frame that has been sent since says that it knows of the restart.
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 4)).ok());
  EXPECT_THAT(TakeSent(), IsEmpty());
  EXPECT_TRUE(exchanges_.is_any_under_way());
  exchanges_.OfferToIdleShards();
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 5)));
}

TEST_F(ChunkExchangesTest, ARoundThatThisRankHasListenedToIsToldOfInAReplay) {
  const FrameHeader listen = shards_.HeaderOf(0, /*step=*/4, LISTEN);
  exchanges_.SetFirstStep(5);
  exchanges_.Keep(0, {.header = listen,
                      .payload = std::make_shared<Payload>(),
                      .answered = true,
                      .answer_crc32c = AnswerOf(0, 4).header.payload_crc32c()});
  Send(0, 5);
  TakeSent();
  ASSERT_TRUE(Receive(0, ReplayFrom(0, 4)).ok());
  ASSERT_THAT(TakeSent(), ElementsAre(std::pair(0, 4)));
  EXPECT_FALSE(Receive(0, AnswerOf(0, 4))->has_value());
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 5)));
}

TEST_F(ChunkExchangesTest, AnotherResultThanBeforeIsALoss) {
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  exchanges_.OfferAll(0);
  const absl::Status status = Receive(0, AnswerOf(0, 0, /*bits=*/1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("comes to another result than before"));
}

TEST_F(ChunkExchangesTest, AfterAnAnswerThatIsRefusedTheNextFrameGoesOut) {
  Send(0, 0);
  ASSERT_TRUE(Receive(0, AnswerOf(0, 0)).ok());
  exchanges_.OfferAll(0);
  TakeSent();
  Answer damaged = AnswerOf(0, 0);
  damaged.header.set_payload_crc32c(1);
  EXPECT_EQ(Receive(0, std::move(damaged)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(exchanges_.is_any_under_way());
  Send(0, 1);
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 1)));
}

TEST_F(ChunkExchangesTest, ASkippedFrameMayBeAnsweredInTheRoundsCodecOnly) {
  Send(0, 0, SKIP);
  Answer answer{.payload = Payload(layout_.PayloadBytes(FLOAT32, 0))};
  std::memset(answer.payload.data(), 0, answer.payload.size());
  answer.header.set_step(0);
  answer.header.set_codec(FLOAT32);
  answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
  answer.header.add_late_ranks(0);
  EXPECT_FALSE(Receive(0, std::move(answer)).ok());
}

TEST_F(ChunkExchangesTest, AFetchIsForWhoeverHasTheStates) {
  Send(0, 0);
  Answer fetch;
  fetch.header.set_codec(FETCH);
  fetch.header.add_wanted_chunks(2);
  fetch.header.set_payload_crc32c(Crc32c(fetch.payload.span()));
  const absl::StatusOr<std::optional<Answer>> received = Receive(0, std::move(fetch));
  ASSERT_TRUE(received.ok()) << received.status();
  ASSERT_TRUE(received->has_value());
  EXPECT_THAT((*received)->header.wanted_chunks(), ElementsAre(2));
  TakeSent();
  exchanges_.Exchange(0, 0);
  EXPECT_THAT(TakeSent(), ElementsAre(std::pair(0, 0)));
}

TEST_F(ChunkExchangesTest, WhatRanOutOfAnEarlierCallsTimeIsSentAgainInThisOnes) {
  for (const absl::Status& late :
       {absl::DeadlineExceededError("no answer"), absl::UnavailableError("no connection")}) {
    const uint32_t chunk = absl::IsUnavailable(late);
    exchanges_.SetDeadline(absl::FromUnixSeconds(1));
    Send(chunk, 0);
    exchanges_.SetDeadline(absl::FromUnixSeconds(2));
    TakeSent();
    const absl::StatusOr<std::optional<Answer>> again = Receive(chunk, late);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_FALSE(again->has_value());
    EXPECT_THAT(TakeSent(), ElementsAre(std::pair(chunk, 0)));
    EXPECT_EQ(Receive(chunk, late).status().code(), late.code());
    EXPECT_THAT(TakeSent(), IsEmpty());
    EXPECT_FALSE(exchanges_.is_any_under_way());
  }
}

TEST_F(ChunkExchangesTest, WhatKeepsTheAggregatorIsSaidWhenTimeRunsOut) {
  Send(0, 0);
  EXPECT_THAT(
      Receive(0, absl::DeadlineExceededError("no answer")).status().message(),
      HasSubstr(
          "step 0, chunk 0 of job 'job': aggregator host:1 (shard 0 of 2): no answer; "
          "it is waiting for rank 3; it has no connection to rank 3 (has the process ended?); "
          "it cannot save the job's state: No space left on device; "
          "it has waited for its disk for 12.3 s"));
  Send(1, 0);
  EXPECT_THAT(Receive(1, absl::DeadlineExceededError("no answer")).status().message(),
              HasSubstr("(shard 1 of 2): no answer; it has been writing a snapshot for 40.0 s"));
}

TEST_F(ChunkExchangesTest, ATraceSaysWhichExchangesHaveFailed) {
  const std::string directory = testing::TempDir() + "/trace";
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(trace::Start(directory, "the test").ok());
  Shards cut_off(options_, layout_, TwoChannels<FailingChannel>(sent_, is_over_));
  ChunkExchanges exchanges(cut_off, layout_, [](uint32_t, absl::StatusOr<Answer>) {});
  exchanges.Send(
      3, {cut_off.HeaderOf(3, 7, SKIP), std::make_shared<Payload>(SkipPayload(0)), ONE_BIT});
  const absl::StatusOr<trace::Timeline> timeline = trace::ReadRecordings({directory});
  ASSERT_TRUE(timeline.ok()) << timeline.status();
  const std::vector<trace::Event>& events = timeline->processes.at(0).events;
  ASSERT_EQ(events.size(), 2);
  EXPECT_EQ(events[0].kind, trace::Kind::kExchange);
  EXPECT_EQ(events[1].kind, trace::Kind::kFailed);
  EXPECT_EQ(trace::KeyOf(events[1]), trace::KeyOf(events[0]));
  EXPECT_EQ(events[1].begin, events[0].end);
}

}  // namespace
}  // namespace signpost
