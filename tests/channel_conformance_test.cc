// What every Channel promises, held against each of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "absl/time/clock.h"
#include "tests/cluster.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Milliseconds(300);

absl::Time Later() { return absl::Now() + absl::Seconds(30); }

// Two workers of one tensor of 2^21 elements in two chunks, one aggregator.
class ChannelConformance : public ::testing::TestWithParam<Transport> {
 protected:
  static constexpr uint64_t kElements = 1 << 21;

  ChannelConformance() : cluster_({.transport = GetParam()}) {}

  std::unique_ptr<Channel> Connect() { return std::move(cluster_.Connect()[0]); }

  static JoinRequest RequestOf(uint32_t rank) {
    JoinRequest request;
    request.set_job("conformance");
    request.set_rank(rank);
    request.set_world_size(2);
    request.set_incarnation(rank + 1);
    request.set_shard_count(1);
    request.mutable_options()->set_block_elements(4096);
    request.mutable_options()->set_chunk_elements(1 << 20);
    request.mutable_options()->set_gamma(1.35f);
    Tensor& tensor = *request.add_tensors();
    tensor.set_name("w");
    tensor.add_shape(kElements);
    return request;
  }

  // Both ranks join.
  void JoinBoth(Channel& first, Channel& second) {
    auto other = std::async(std::launch::async, [&] { return second.Join(RequestOf(1), Later()); });
    auto response = first.Join(RequestOf(0), Later());
    ASSERT_TRUE(response.ok()) << response.status();
    ASSERT_TRUE(other.get().ok());
    epoch_ = response->epoch();
  }

  // A dense frame with the same value everywhere.
  struct Sent {
    FrameHeader header;
    std::shared_ptr<const Payload> payload;
  };
  Sent FrameOf(uint32_t rank, float value, uint64_t step = 0) {
    auto payload = std::make_shared<Payload>(4 << 20);
    for (size_t i = 0; i < payload->size(); i += 4) std::memcpy(payload->data() + i, &value, 4);
    Sent sent;
    sent.header.set_job("conformance");
    sent.header.set_epoch(epoch_);
    sent.header.set_rank(rank);
    sent.header.set_step(step);
    sent.header.set_codec(FLOAT32);
    sent.header.set_payload_crc32c(Crc32c(payload->span()));
    sent.payload = std::move(payload);
    return sent;
  }

  static std::future<absl::StatusOr<Answer>> Exchange(Channel& channel, const Sent& sent,
                                                      absl::Time deadline = Later()) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<Answer>>>();
    channel.Exchange(sent.header, sent.payload, deadline, [promise](absl::StatusOr<Answer> answer) {
      promise->set_value(std::move(answer));
    });
    return promise->get_future();
  }

  Cluster cluster_;
  uint64_t epoch_ = 0;
};

TEST_P(ChannelConformance, ExchangeBringsEveryRankTheSameAnswer) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  auto a = Exchange(*first, FrameOf(0, 1));
  auto b = Exchange(*second, FrameOf(1, 4));
  absl::StatusOr<Answer> to_first = a.get(), to_second = b.get();
  ASSERT_TRUE(to_first.ok()) << to_first.status();
  ASSERT_TRUE(to_second.ok()) << to_second.status();
  for (const Answer* answer : {&*to_first, &*to_second}) {
    EXPECT_EQ(answer->header.codec(), FLOAT32);
    ASSERT_EQ(answer->payload.size(), 4 << 20);
    float value;
    std::memcpy(&value, answer->payload.data() + answer->payload.size() - 4, 4);
    EXPECT_EQ(value, 2.5f);
  }
}

TEST_P(ChannelConformance, JoinEndsByItsDeadline) {
  auto channel = Connect();
  EXPECT_EQ(channel->Join(RequestOf(0), absl::Now() + kSoon).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_P(ChannelConformance, ExchangeEndsByItsDeadlineAndCanBeSentAgain) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  auto early = Exchange(*first, FrameOf(0, 1), absl::Now() + kSoon);
  EXPECT_EQ(early.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  auto a = Exchange(*first, FrameOf(0, 1));
  auto b = Exchange(*second, FrameOf(1, 4));
  EXPECT_TRUE(a.get().ok());
  EXPECT_TRUE(b.get().ok());
}

TEST_P(ChannelConformance, ErrorsKeepTheirCodeAndMessage) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  const absl::Status status = Exchange(*first, FrameOf(0, 1, /*step=*/7)).get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("7"));
}

TEST_P(ChannelConformance, AResendAfterTheAnswerBringsItAgain) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  auto a = Exchange(*first, FrameOf(0, 1));
  auto b = Exchange(*second, FrameOf(1, 4));
  ASSERT_TRUE(a.get().ok());
  absl::StatusOr<Answer> again = Exchange(*first, FrameOf(0, 1)).get();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->header.payload_crc32c(), b.get()->header.payload_crc32c());
}

TEST_P(ChannelConformance, DestructionEndsWaitingCallsWithCancelled) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  auto waiting = Exchange(*first, FrameOf(0, 1));
  first.reset();
  ASSERT_EQ(waiting.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(waiting.get().status().code(), absl::StatusCode::kCancelled);
}

TEST_P(ChannelConformance, StatusSaysWhomTheAggregatorWaitsFor) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  auto waiting = Exchange(*first, FrameOf(0, 1), absl::Now() + kSoon);
  EXPECT_FALSE(waiting.get().ok());
  auto status = first->Status({}, Later());
  ASSERT_TRUE(status.ok()) << status.status();
  ASSERT_EQ(status->jobs_size(), 1);
  EXPECT_THAT(status->jobs(0).waiting_for_ranks(), ::testing::ElementsAre(1));
}

TEST_P(ChannelConformance, LeaveEndsTheMembership) {
  auto first = Connect(), second = Connect();
  JoinBoth(*first, *second);
  for (uint32_t rank : {0, 1}) {
    LeaveRequest request;
    request.set_job("conformance");
    request.set_epoch(epoch_);
    request.set_rank(rank);
    EXPECT_TRUE((rank == 0 ? first : second)->Leave(request, Later()).ok());
  }
  EXPECT_EQ(first->Status({}, Later())->jobs_size(), 0);
}

INSTANTIATE_TEST_SUITE_P(Transports, ChannelConformance,
                         ::testing::Values(Transport::kLoopback, Transport::kGrpc),
                         [](const auto& info) {
                           return info.param == Transport::kGrpc ? "Grpc" : "Loopback";
                         });

}  // namespace
}  // namespace signpost::testing
