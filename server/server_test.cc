#include "server/server.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/aggregator.grpc.pb.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

std::shared_ptr<grpc::Channel> ConnectTo(const Server& server) {
  return ConnectTo(absl::StrCat("127.0.0.1:", server.port()));
}

uint64_t JoinAlone(AggregatorService::Stub& stub) {
  grpc::ClientContext context;
  JoinResponse response;
  const grpc::Status status = stub.Join(&context, TestJoin(0, /*world_size=*/1), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.epoch();
}

grpc::Status Leave(AggregatorService::Stub& stub, uint64_t epoch) {
  LeaveRequest request;
  request.set_job("job");
  request.set_epoch(epoch);
  request.set_incarnation(1000);
  grpc::ClientContext context;
  LeaveResponse response;
  return stub.Leave(&context, request, &response);
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// grpc.health.v1.Health/Check of the whole server. The messages are small enough to write out: an
// empty HealthCheckRequest, and a HealthCheckResponse whose field 1 says 1, SERVING, or 2,
// NOT_SERVING.
constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";
std::string CheckHealth(const std::shared_ptr<grpc::Channel>& channel) {
  const grpc::Slice nothing("");
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::Status status;
  absl::Notification ended;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request, &response,
                 [&](grpc::Status result) {
                   status = std::move(result);
                   ended.Notify();
                 });
  ended.WaitForNotification();
  return status.ok() ? BytesOf(response) : status.error_message();
}

TEST(Server, StartsOnAPortThatTheKernelChose) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE((*server)->port(), 0);
  EXPECT_NE(JoinAlone(*AggregatorService::NewStub(ConnectTo(**server))), 0);
}

TEST(Server, ListensOnAUnixSocket) {
  char directory[] = "/tmp/signpost-XXXXXX";  // a socket's path has at most 107 characters
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string address = absl::StrCat("unix:", directory, "/s");
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({.listen = address});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->port(), 0);
  EXPECT_NE(JoinAlone(*AggregatorService::NewStub(ConnectTo(address))), 0);
  EXPECT_TRUE((*server)->Drain(absl::ZeroDuration()).ok());
  EXPECT_EQ(rmdir(directory), 0) << "the socket is gone with its server";
}

TEST(Server, RefusesAnAddressBeyondLoopback) {
  EXPECT_EQ(Server::Start({.listen = "0.0.0.0:0"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Server::Start({.listen = "0.0.0.0:0", .security = {.insecure = true}}).ok());
}

TEST(Server, RefusesAShardThatDoesNotExist) {
  EXPECT_EQ(Server::Start({.aggregator = {.shard = 2, .shard_count = 2}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Server, SecondOnAPortFailsAndSaysSo) {
  absl::StatusOr<std::unique_ptr<Server>> first = Server::Start({});
  ASSERT_TRUE(first.ok());
  const std::string address = absl::StrCat("127.0.0.1:", (*first)->port());
  const absl::Status second = Server::Start({.listen = address}).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.message(), HasSubstr(address));
}

TEST(Server, RefusesAMessageOverTheLimitBeforeItIsReadWhole) {
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start({.aggregator = {.limits = {.payload_bytes = 1 << 20}}});
  ASSERT_TRUE(server.ok());
  const auto stub = AggregatorService::NewStub(ConnectTo(**server));
  for (const auto& [bytes, code] : {std::pair(size_t{1} << 20, grpc::StatusCode::DATA_LOSS),
                                    {(size_t{1} << 20) + 1, grpc::StatusCode::INVALID_ARGUMENT},
                                    {size_t{5} << 20, grpc::StatusCode::RESOURCE_EXHAUSTED}}) {
    ExchangeRequest request;
    request.mutable_header()->set_job("job");
    request.set_payload(std::string(bytes, 'p'));
    grpc::ClientContext context;
    ExchangeResponse response;
    EXPECT_EQ(stub->Exchange(&context, request, &response).error_code(), code) << bytes;
  }
}

TEST(Server, DrainLetsRunningJobsEndWhileHealthSaysNotServing) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({});
  ASSERT_TRUE(server.ok());
  const std::shared_ptr<grpc::Channel> channel = ConnectTo(**server);
  const auto stub = AggregatorService::NewStub(channel);
  const uint64_t epoch = JoinAlone(*stub);
  EXPECT_EQ(CheckHealth(channel), kServing);

  std::thread drain([&] { EXPECT_TRUE((*server)->Drain(absl::InfiniteDuration()).ok()); });
  while (CheckHealth(channel) != kNotServing) std::this_thread::yield();
  grpc::ClientContext context;
  JoinResponse response;
  EXPECT_EQ(stub->Join(&context, TestJoin(0, /*world_size=*/1, "late"), &response).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Leave(*stub, epoch).ok());
  drain.join();
  (*server)->Wait();
}

TEST(Server, DrainWithLessGraceEndsOneWithMore) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({});
  ASSERT_TRUE(server.ok());
  JoinAlone(*AggregatorService::NewStub(ConnectTo(**server)));
  std::thread patient([&] { EXPECT_TRUE((*server)->Drain(absl::InfiniteDuration()).ok()); });
  EXPECT_TRUE((*server)->Drain(absl::ZeroDuration()).ok());
  patient.join();
  EXPECT_TRUE((*server)->Drain(absl::ZeroDuration()).ok());
  (*server)->Wait();
}

TEST(Server, WaitReturnsWhenTheServerHasStopped) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({});
  ASSERT_TRUE(server.ok());
  std::thread waiter([&] { (*server)->Wait(); });
  EXPECT_TRUE((*server)->Drain(absl::ZeroDuration()).ok());
  waiter.join();
}

}  // namespace
}  // namespace signpost
