#include "server/server.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/failure_timeout.h"
#include "server/raw_client.h"
#include "server/test_job.h"

namespace {
bool is_localhost_elsewhere = false;  // for getaddrinfo, in this process
}  // namespace

extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto original = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (is_localhost_elsewhere && node != nullptr && std::string(node) == "localhost") {
    node = "127.0.0.2";
  }
  return original(node, service, hints, found);
}

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

grpc::Status Leave(AggregatorService::Stub& stub, uint64_t epoch,
                   absl::Duration timeout = absl::Minutes(1)) {
  LeaveRequest request;
  request.set_job("job");
  request.set_epoch(epoch);
  request.set_incarnation(1000);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  LeaveResponse response;
  return stub.Leave(&context, request, &response);
}

bool IsRefused(const char* host, uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  inet_pton(AF_INET, host, &address.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool is_refused =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0;
  close(fd);
  return is_refused;
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

std::unique_ptr<Server> StartWithMetrics() {
  auto server = Server::Start({.metrics_listen = "127.0.0.1:0"});
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

// The value of a metric without labels, in Prometheus's format.
double ValueOf(const std::string& metrics, const std::string& name) {
  const size_t at = metrics.find(absl::StrCat("\n", name, " "));
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? 0 : std::atof(metrics.c_str() + at + name.size() + 2);
}

TEST(Metrics, AreServedOnAPortOfTheirOwn) {
  const auto server = StartWithMetrics();
  AggregatorService::Stub stub(ConnectTo(*server));
  const uint64_t epoch = JoinAlone(stub);
  const std::string metrics = HttpGet(server->metrics_port(), "/metrics");
  EXPECT_THAT(metrics, AllOf(HasSubstr("text/plain; version=0.0.4"),
                             HasSubstr("\nsignpost_job_workers{shard=\"0\",job_name=\"job\"} 1\n"),
                             HasSubstr("\nsignpost_insecure_plain_text{shard=\"0\"} 0\n")));
  EXPECT_THAT(HttpGet(server->metrics_port(), "/status.json"),
              AllOf(HasSubstr("application/json"), HasSubstr("\"job\":\"job\"")));
  EXPECT_THAT(HttpGet(server->metrics_port(), "/"),
              AllOf(HasSubstr("text/html"), HasSubstr("script-src 'sha256-")));
  EXPECT_THAT(HttpGet(server->port(), "/metrics"), testing::Not(HasSubstr("signpost_")));
  EXPECT_TRUE(Leave(stub, epoch).ok());
}

TEST(Metrics, SayWhatTheProcessTakes) {
  const auto server = StartWithMetrics();
  const std::string metrics = HttpGet(server->metrics_port(), "/metrics");
  const auto value = [&](const std::string& name) { return ValueOf(metrics, name); };
  EXPECT_GT(value("process_cpu_seconds_total"), 0);
  EXPECT_GT(value("process_resident_memory_bytes"), 1e6);
  EXPECT_GT(value("process_virtual_memory_bytes"), value("process_resident_memory_bytes"));
  EXPECT_GT(value("process_open_fds"), 3);
  EXPECT_GE(value("process_max_fds"), value("process_open_fds"));
  EXPECT_GT(value("process_threads"), 1);
  // The boot's time has whole seconds.
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_NEAR(value("process_start_time_seconds"), now, 300);
}

TEST(Metrics, TakeNothingFromWorkersWhenTheirPortIsMisused) {
  const auto server = StartWithMetrics();
  const double fds_before =
      ValueOf(HttpGet(server->metrics_port(), "/metrics"), "process_open_fds");
  std::vector<RawClient> misused;
  for (const std::string& begun :
       {std::string(), std::string("GET /metr"),
        std::string("POST / HTTP/1.1\r\nContent-Length: 9"),
        absl::StrCat("GET /", std::string(100000, 'x')), std::string(100000, '\0')}) {
    for (int i = 0; i < 40; ++i) misused.emplace_back(server->metrics_port()).SendSome(begun);
  }
  AggregatorService::Stub stub(ConnectTo(*server));
  const uint64_t epoch = JoinAlone(stub);
  EXPECT_TRUE(Leave(stub, epoch).ok());
  misused.clear();
  // Until it has noticed, it takes no more connections from this peer.
  std::string metrics;
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (metrics.empty() && absl::Now() < deadline)
    metrics = HttpGet(server->metrics_port(), "/metrics");
  EXPECT_LE(ValueOf(metrics, "process_open_fds"), fds_before + 40);
}

TEST(Metrics, AreNotServedUnlessAskedFor) {
  const auto server = Server::Start({});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->metrics_port(), 0);
}

TEST(Metrics, TellWhyTheyCannotBeServed) {
  const auto first = StartWithMetrics();
  const std::string taken = absl::StrCat("127.0.0.1:", first->metrics_port());
  EXPECT_EQ(Server::Start({.metrics_listen = taken}).status().code(),
            absl::StatusCode::kUnavailable);
  for (const char* address : {"nonsense", "unix:/tmp/metrics"}) {
    const absl::Status status = Server::Start({.metrics_listen = address}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr(address), HasSubstr("host:port")));
  }
}

TEST(Server, StartsOnAPortThatTheKernelChose) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE((*server)->port(), 0);
  EXPECT_NE(JoinAlone(*AggregatorService::NewStub(ConnectTo(**server))), 0);
}

// 127.0.0.2 stands for what a hosts file or a name server may have for localhost.
TEST(Server, AsksNobodyWhatLocalhostIs) {
  is_localhost_elsewhere = true;
  auto server = Server::Start({.listen = "localhost:0", .metrics_listen = "localhost:0"});
  is_localhost_elsewhere = false;
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE(JoinAlone(*AggregatorService::NewStub(ConnectTo(**server))), 0);
  EXPECT_TRUE(IsRefused("127.0.0.2", (*server)->port()));
  EXPECT_TRUE(IsRefused("127.0.0.2", (*server)->metrics_port()));
}

TEST(Server, ASocketInTheFileSystemIsForItsUserOnly) {
  char directory[] = "/tmp/signpost-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string path = absl::StrCat(directory, "/s");
  const mode_t mask = umask(0);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start({.listen = "unix:" + path});
  EXPECT_EQ(umask(mask), 0) << "it is as before";
  ASSERT_TRUE(server.ok()) << server.status();
  struct stat facts = {};
  ASSERT_EQ(stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600);
  server->reset();
  rmdir(directory);
  EXPECT_EQ(
      Server::Start({.listen = "unix:" + path, .security = {.tls_dir = "tls"}}).status().code(),
      absl::StatusCode::kInvalidArgument);
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
            absl::StatusCode::kInvalidArgument);
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

TEST(Server, HoldsProcessesForGoneThatAreNotHeardOfForSixFailureTimeoutsAfterARestart) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/restarted");
  std::filesystem::remove_all(path);
  std::atomic<int64_t> now_ms = 1'700'000'000'000;
  const ServerOptions options = {
      .failure_timeout = *FailureTimeout::Of(absl::Seconds(2)),
      .aggregator = {.now = [&now_ms] { return absl::FromUnixMillis(now_ms); }},
      .state_dir = path};
  {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    JoinAlone(*AggregatorService::NewStub(ConnectTo(**server)));
  }
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  AggregatorService::Stub stub(ConnectTo(**server));
  const auto join_anew = [&stub] {
    JoinRequest request = TestJoin(0, /*world_size=*/1);
    request.set_incarnation(7);
    grpc::ClientContext context;
    JoinResponse response;
    return stub.Join(&context, request, &response).error_code();
  };
  now_ms += 11'999;
  EXPECT_EQ(join_anew(), grpc::StatusCode::ALREADY_EXISTS);
  now_ms += 1;
  EXPECT_EQ(join_anew(), grpc::StatusCode::OK);
}

TEST(Server, TriesASnapshotThatFailsAgainEachSecondHoweverOftenOneIsDue) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/failing");
  std::filesystem::remove_all(path);
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start({.state_dir = path, .metrics_listen = "127.0.0.1:0"});
  ASSERT_TRUE(server.ok()) << server.status();
  AggregatorService::Stub stub(ConnectTo(**server));
  const uint64_t epoch = JoinAlone(stub);
  const absl::Time begin = absl::Now();
  std::vector<std::string> obstacles;  // directories where files are to be written
  for (int sequence = 1; sequence <= 64; ++sequence) {
    obstacles.push_back(absl::StrFormat("%s/%016x-%016x.snapshot.tmp", path, epoch, sequence));
    std::filesystem::create_directory(obstacles.back());
  }
  const auto failures = [&] {
    const std::string metrics = HttpGet((*server)->metrics_port(), "/metrics");
    return ValueOf(metrics, "signpost_snapshot_failures_total{shard=\"0\",job_name=\"job\"}");
  };
  while (failures() < 3) {
    EXPECT_EQ(Leave(stub, epoch, absl::Milliseconds(20)).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(1990));
  for (const std::string& obstacle : obstacles) std::filesystem::remove(obstacle);
  EXPECT_TRUE(Leave(stub, epoch).ok());
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
