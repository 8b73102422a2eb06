// What every Channel promises, held against each of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/cluster.h"
#include "tests/pair.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Milliseconds(300);

class ChannelConformance : public ::testing::TestWithParam<Transport> {
 protected:
  ChannelConformance() : cluster_({.transport = GetParam()}) {}

  std::unique_ptr<Channel> Connect() { return std::move(cluster_.Connect()[0]); }

  Cluster cluster_;
  Pair pair_;
};

TEST_P(ChannelConformance, ExchangeBringsEveryRankTheSameAnswer) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  ExpectMean(a.get(), 2.5f);
  ExpectMean(b.get(), 2.5f);
}

TEST_P(ChannelConformance, JoinEndsByItsDeadline) {
  auto channel = Connect();
  EXPECT_EQ(
      channel->Join(Pair::RequestOf(0), absl::Now() + kSoon, Channel::MayWait).status().code(),
      absl::StatusCode::kDeadlineExceeded);
}

TEST_P(ChannelConformance, JoinEndsWhenItIsNotToWaitAnyMore) {
  auto channel = Connect();
  int asked = 0;
  const auto check = [&asked] {
    return ++asked < 2 ? absl::OkStatus() : absl::FailedPreconditionError("in vain");
  };
  const absl::Status status = channel->Join(Pair::RequestOf(0), Later(), check).status();
  EXPECT_EQ(status, absl::FailedPreconditionError("in vain"));
  EXPECT_EQ(asked, 2);
  pair_.Join(*channel, *Connect());
}

TEST_P(ChannelConformance, ExchangeEndsByItsDeadlineAndCanBeSentAgain) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  auto early = Exchange(*first, pair_.FrameOf(0, 1), absl::Now() + kSoon);
  EXPECT_EQ(early.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  EXPECT_TRUE(a.get().ok());
  EXPECT_TRUE(b.get().ok());
}

TEST_P(ChannelConformance, ErrorsKeepTheirCodeAndMessage) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  const absl::Status status = Exchange(*first, pair_.FrameOf(0, 1, /*step=*/7)).get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("7"));
}

TEST_P(ChannelConformance, AResendAfterTheAnswerBringsItAgain) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  ASSERT_TRUE(a.get().ok());
  absl::StatusOr<Answer> again = Exchange(*first, pair_.FrameOf(0, 1)).get();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->header.payload_crc32c(), b.get()->header.payload_crc32c());
}

TEST_P(ChannelConformance, DestructionEndsWaitingCallsWithCancelled) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  auto waiting = Exchange(*first, pair_.FrameOf(0, 1));
  first.reset();
  ASSERT_EQ(waiting.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(waiting.get().status().code(), absl::StatusCode::kCancelled);
}

TEST_P(ChannelConformance, StatusSaysWhomTheAggregatorWaitsFor) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  auto waiting = Exchange(*first, pair_.FrameOf(0, 1), absl::Now() + kSoon);
  EXPECT_FALSE(waiting.get().ok());
  auto status = first->Status({}, Later());
  ASSERT_TRUE(status.ok()) << status.status();
  ASSERT_EQ(status->jobs_size(), 1);
  EXPECT_THAT(status->jobs(0).waiting_for_ranks(), ::testing::ElementsAre(1));
}

TEST_P(ChannelConformance, ReadErrorBringsTheErrorOfTheStepThatIsOpenAndNoOther) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  const auto as_bf16 = [&](uint32_t rank) {
    Sent sent = pair_.FrameOf(rank, 0);
    auto payload = std::make_shared<Payload>(sent.payload->size() / 2);
    for (size_t i = 0; i < payload->size() / 2; ++i) {
      // 1 and 1 + 2^-7: their mean is no bf16 number, and 2^-8 of it stays as error.
      reinterpret_cast<uint16_t*>(payload->data())[i] = 0x3f80 + rank;
    }
    sent.header.set_codec(BFLOAT16);
    sent.header.set_payload_crc32c(Crc32c(payload->span()));
    sent.payload = std::move(payload);
    return sent;
  };
  ReadErrorRequest request;
  request.set_job(Pair::RequestOf(0).job());
  request.set_epoch(pair_.epoch());
  request.set_incarnation(Pair::RequestOf(0).incarnation());
  const auto before = first->ReadError(request, Later());
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->payload().size(), 0u) << "all of it is zero";

  request.set_step(1);
  EXPECT_TRUE(absl::IsAborted(first->ReadError(request, Later()).status()));
  auto a = Exchange(*first, as_bf16(0));
  auto b = Exchange(*second, as_bf16(1));
  ASSERT_TRUE(a.get().ok());
  ASSERT_TRUE(b.get().ok());
  const auto after = first->ReadError(request, Later());
  ASSERT_TRUE(after.ok()) << after.status();
  std::vector<float> error(1 << 20);
  ASSERT_EQ(after->payload().size(), 4 * error.size());
  std::memcpy(error.data(), after->payload().data(), after->payload().size());
  EXPECT_THAT(error, ::testing::Each(0x1p-8f));

  request.set_step(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(first->ReadError(request, Later()).status()));
  request.set_chunk(2);
  EXPECT_TRUE(absl::IsInvalidArgument(first->ReadError(request, Later()).status()));
}

TEST_P(ChannelConformance, LeaveEndsTheMembership) {
  auto first = Connect(), second = Connect();
  pair_.Join(*first, *second);
  for (uint32_t rank : {0, 1}) {
    LeaveRequest request;
    request.set_job(Pair::RequestOf(rank).job());
    request.set_epoch(pair_.epoch());
    request.set_rank(rank);
    request.set_incarnation(Pair::RequestOf(rank).incarnation());
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
