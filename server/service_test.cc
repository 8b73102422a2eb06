// The service as clients see it, over real gRPC.

#include "server/service.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "log/log.h"
#include "nlohmann/json.hpp"
#include "proto/aggregator.grpc.pb.h"
#include "proto/message.h"
#include "server/server.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Layout& TestLayout() {
  static const Layout& layout = *new Layout(LayoutOf(TestJoin(/*rank=*/0, /*world_size=*/1)));
  return layout;
}

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    server_ = *Server::Start({});
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    channel_ = grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                         grpc::InsecureChannelCredentials(), arguments);
    stub_ = AggregatorService::NewStub(channel_);
  }

  grpc::Status Join(const JoinRequest& request, JoinResponse& response) {
    grpc::ClientContext context;
    return stub_->Join(&context, request, &response);
  }

  grpc::Status Exchange(const ExchangeRequest& request, ExchangeResponse& response) {
    grpc::ClientContext context;
    return stub_->Exchange(&context, request, &response);
  }

  // With bytes as they are, which need be no message.
  grpc::Status Call(const std::string& method, const grpc::ByteBuffer& request,
                    grpc::ByteBuffer& response) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::Status status;
    absl::Notification ended;
    stub.UnaryCall(&context, absl::StrCat("/signpost.AggregatorService/", method), {}, &request,
                   &response, [&](grpc::Status result) {
                     status = std::move(result);
                     ended.Notify();
                   });
    ended.WaitForNotification();
    return status;
  }

  grpc::Status Call(const std::string& method, const std::string& bytes) {
    const grpc::Slice slice(bytes);
    grpc::ByteBuffer response;
    return Call(method, grpc::ByteBuffer(&slice, 1), response);
  }

  JobStatus StatusOfJob() {
    grpc::ClientContext context;
    StatusResponse response;
    EXPECT_TRUE(stub_->Status(&context, {}, &response).ok());
    return response.jobs_size() == 1 ? response.jobs(0) : JobStatus();
  }

  // Asks until it is so; the test's time limit bounds it.
  void AwaitStatus(const std::function<bool(const JobStatus&)>& is_so) {
    while (!is_so(StatusOfJob())) std::this_thread::yield();
  }

  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<AggregatorService::Stub> stub_;
};

ExchangeRequest RequestOf(const Frame& frame) {
  ExchangeRequest request;
  *request.mutable_header() = frame.header;
  request.set_payload(frame.payload.data(), frame.payload.size());
  return request;
}

std::string PayloadOf(const Answer& answer) {
  return {reinterpret_cast<const char*>(answer.payload.data()), answer.payload.size()};
}

TEST_F(ServiceTest, RawAndGeneratedClientsGetTheSameAnswer) {
  JoinResponse joined, other_joined;
  grpc::Status other_status;
  std::thread other([&] { other_status = Join(TestJoin(1, /*world_size=*/2), other_joined); });
  ASSERT_TRUE(Join(TestJoin(0, /*world_size=*/2), joined).ok());
  other.join();
  ASSERT_TRUE(other_status.ok());
  EXPECT_EQ(joined.epoch(), other_joined.epoch());
  EXPECT_EQ(joined.layout_fingerprint(), TestLayout().Fingerprint());

  // Rank 0 by hand, in raw bytes.
  Frame raw_frame = Addressed(TestFrame(TestLayout(), {.rank = 0}, ONE_BIT), "job", joined.epoch());
  const grpc::ByteBuffer raw_request = SerializeRequest(
      raw_frame.header, std::make_shared<const Payload>(std::move(raw_frame.payload)));
  grpc::ByteBuffer raw_response;
  grpc::Status raw_status;
  std::thread raw([&] { raw_status = Call("Exchange", raw_request, raw_response); });
  // Rank 1 by the generated stub.
  ExchangeResponse response;
  const grpc::Status status = Exchange(
      RequestOf(Addressed(TestFrame(TestLayout(), {.rank = 1}, ONE_BIT), "job", joined.epoch())),
      response);
  raw.join();

  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_TRUE(raw_status.ok()) << raw_status.error_message();
  Answer answer;
  ASSERT_TRUE(ParseResponse(raw_response, /*max_payload_bytes=*/1 << 20, answer).ok());
  EXPECT_EQ(PayloadOf(answer), response.payload());
  EXPECT_EQ(answer.header.payload_crc32c(), response.header().payload_crc32c());
  EXPECT_EQ(response.header().codec(), ONE_BIT);
  const FrameHeader header = TestFrame(TestLayout(), {}, ONE_BIT).header;
  EXPECT_TRUE(CheckAnswer(answer.header, answer.payload.span(), header, TestLayout()).ok());
}

TEST_F(ServiceTest, ErrorsKeepTheirCodeAndMessage) {
  JoinResponse joined;
  ASSERT_TRUE(Join(TestJoin(0, /*world_size=*/1), joined).ok());
  ExchangeResponse response;
  const grpc::Status wrong_step = Exchange(
      RequestOf(Addressed(TestFrame(TestLayout(), {.step = 5}, FLOAT32), "job", joined.epoch())),
      response);
  EXPECT_EQ(wrong_step.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(wrong_step.error_message(), HasSubstr("step 0 is expected"));
  const grpc::Status other_size = Join(TestJoin(0, /*world_size=*/2), joined);
  EXPECT_EQ(other_size.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(other_size.error_message(), HasSubstr("2 here but 1 in the job"));
}

TEST_F(ServiceTest, LeaveEndsTheJob) {
  JoinResponse joined;
  ASSERT_TRUE(Join(TestJoin(0, /*world_size=*/1), joined).ok());
  EXPECT_EQ(StatusOfJob().job(), "job");
  LeaveRequest request;
  request.set_job("job");
  request.set_epoch(joined.epoch());
  request.set_incarnation(1000);
  grpc::ClientContext context;
  LeaveResponse response;
  EXPECT_TRUE(stub_->Leave(&context, request, &response).ok());
  EXPECT_EQ(StatusOfJob().job(), "");
}

TEST_F(ServiceTest, JoinThatTimesOutNoLongerHoldsTheJobButStillCountsAsJoined) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  JoinResponse response;
  EXPECT_EQ(stub_->Join(&context, TestJoin(0, /*world_size=*/2), &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(StatusOfJob().waiting_for_ranks(), ElementsAre(1));
  // Another process's job of other tensors may take its place as soon as the server has noticed.
  JoinRequest fixed = TestJoin(0, /*world_size=*/1);
  fixed.set_incarnation(9);
  fixed.mutable_tensors(0)->set_name("renamed");
  while (!Join(fixed, response).ok()) std::this_thread::yield();
}

TEST_F(ServiceTest, JoinThatIsCancelledGivesItsRankFree) {
  grpc::ClientContext context;
  std::thread joiner([&] {
    JoinResponse response;
    EXPECT_EQ(stub_->Join(&context, TestJoin(0, /*world_size=*/2), &response).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  AwaitStatus([](const JobStatus& job) { return job.joined_ranks_size() == 1; });
  context.TryCancel();
  joiner.join();
  AwaitStatus([](const JobStatus& job) { return job.joined_ranks_size() == 0; });
}

TEST_F(ServiceTest, BytesThatAreNoRequestAreRefused) {
  const std::string garbage = "\xff\xff\xff\xff garbage";
  for (const char* method : {"Exchange", "Join", "Leave", "ReadError", "Status"}) {
    EXPECT_EQ(Call(method, garbage).error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
  }
}

// Two bytes each, of which any parser makes objects.
TEST_F(ServiceTest, CallsWithFieldsWithoutEndAreRefused) {
  static_assert(JoinRequest::kTensorsFieldNumber == 8);
  std::string tensors;
  for (int i = 0; i < (1 << 20); ++i) tensors += std::string("\x42\x00", 2);
  for (const char* method : {"Join", "Leave", "ReadError", "Status"}) {
    const grpc::Status status = Call(method, tensors);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_EQ(status.error_message(), "the message has too many fields");
  }
}

TEST_F(ServiceTest, SaysInJsonWhichRoundOfWhomHasFailedOrIsSkipped) {
  JoinResponse joined;
  ASSERT_TRUE(Join(TestJoin(0, /*world_size=*/1), joined).ok());
  // What is written until the answer is there.
  const auto written_for = [&](const FrameKey& key, Codec codec) {
    ExchangeResponse response;
    testing::internal::CaptureStderr();
    Exchange(RequestOf(Addressed(TestFrame(TestLayout(), key, codec), "job", joined.epoch())),
             response);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(written_for({.rank = 0, .step = 7, .chunk = 1}, ONE_BIT), "");
  ASSERT_TRUE(log::SetFormat("json").ok());
  const std::string failed = written_for({.rank = 0, .step = 7, .chunk = 1}, ONE_BIT);
  const std::string skipped = written_for({.rank = 0, .step = 0, .chunk = 1}, SKIP);
  EXPECT_EQ(written_for({.rank = 0, .step = 1, .chunk = 1}, ONE_BIT), "");
  ASSERT_TRUE(log::SetFormat("text").ok());

  const nlohmann::json failure = nlohmann::json::parse(failed);
  EXPECT_THAT(failure.at("message").get<std::string>(), HasSubstr("but step 0 is expected"));
  EXPECT_EQ(failure.at("level"), "warning");
  EXPECT_EQ(failure.at("job"), "job");
  EXPECT_EQ(failure.at("step"), 7);
  EXPECT_EQ(failure.at("chunk"), 1);
  EXPECT_EQ(failure.at("worker"), 0);
  EXPECT_EQ(failure.at("shard"), 0);
  const nlohmann::json skip = nlohmann::json::parse(skipped);
  EXPECT_THAT(skip.at("message").get<std::string>(), HasSubstr("a round is skipped"));
  EXPECT_EQ(skip.at("step"), 0);
  EXPECT_EQ(skip.at("chunk"), 1);
}

TEST_F(ServiceTest, CallThatWaitsIsEndedByDrain) {
  JoinResponse joined, other_joined;
  std::thread other([&] { EXPECT_TRUE(Join(TestJoin(1, /*world_size=*/2), other_joined).ok()); });
  ASSERT_TRUE(Join(TestJoin(0, /*world_size=*/2), joined).ok());
  other.join();
  grpc::Status exchange_status;
  std::thread exchanger([&] {
    ExchangeResponse response;
    exchange_status =
        Exchange(RequestOf(Addressed(TestFrame(TestLayout(), {}, FLOAT32), "job", joined.epoch())),
                 response);
  });
  AwaitStatus([](const JobStatus& job) { return job.waiting_for_ranks_size() == 1; });

  EXPECT_TRUE(server_->Drain(absl::ZeroDuration()).ok());
  exchanger.join();
  EXPECT_EQ(exchange_status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(exchange_status.error_message(), HasSubstr("shutting down"));
}

}  // namespace
}  // namespace signpost
