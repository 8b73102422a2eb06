// Peers that hang, and connections that are cut or forgotten: both sides notice within the failure
// timeout, and an exchange goes on over a new connection with the same frame, counted once.

#include "proto/failure_timeout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cli/proxy.h"
#include "client/session.h"
#include "server/server.h"
#include "tests/pair.h"
#include "tests/server_process.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using cli::Proxy;
using ::testing::ElementsAre;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

FailureTimeout Seconds(double seconds) { return *FailureTimeout::Of(absl::Seconds(seconds)); }

const FailureTimeout kFast = Seconds(1);
// What is noticed within kFast plus the half second that gRPC's ping limit may add has been noticed
// by now, on a busy machine too. With the default it would not be: of 10 s half must pass at least,
// until bytes that are not acknowledged count as lost.
constexpr absl::Duration kNoticed = absl::Milliseconds(4500);

// Blocks until the pair's aggregator waits for exactly these ranks' frames or Joins.
template <typename Matcher>
void AwaitWaitingFor(Channel& channel, const Matcher& ranks) {
  while (true) {
    const absl::StatusOr<StatusResponse> status = channel.Status({}, Later());
    ASSERT_TRUE(status.ok()) << status.status();
    if (status->jobs_size() == 1 && ::testing::Value(status->jobs(0).waiting_for_ranks(), ranks)) {
      return;
    }
  }
}

std::string TargetOf(const Server& server) { return absl::StrCat("127.0.0.1:", server.port()); }

// An aggregator; rank 0 comes to it through a proxy, rank 1 does not.
class FailureTimeoutTest : public ::testing::Test {
 protected:
  FailureTimeoutTest() : server_(*Server::Start({})), proxy_(server_->port()) {}

  std::unique_ptr<Channel> ConnectByProxy(const FailureTimeout& failure_timeout = kFast) {
    return ConnectToAggregator(proxy_.target(), failure_timeout);
  }

  std::unique_ptr<Channel> Connect() {
    return ConnectToAggregator(TargetOf(*server_), FailureTimeout());
  }

  const std::unique_ptr<Server> server_;
  Proxy proxy_;
  Pair pair_;
};

TEST_F(FailureTimeoutTest, ACallOnAHalfOpenConnectionEndsWithUnavailable) {
  auto channel = ConnectByProxy();
  ASSERT_TRUE(channel->Status({}, Later()).ok());
  proxy_.Stop();
  const absl::Time start = absl::Now();
  EXPECT_EQ(channel->Status({}, Later()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, kNoticed);
}

TEST_F(FailureTimeoutTest, AConnectionThatIsNeverGreetedIsTriedAgain) {
  auto first = ConnectByProxy();
  proxy_.Stop();
  const absl::Time start = absl::Now();
  auto status = std::async(std::launch::async, [&] { return first->Status({}, Later()); });
  proxy_.AwaitConnections(2);
  EXPECT_LT(absl::Now() - start, kNoticed);
  proxy_.Resume();
  EXPECT_TRUE(status.get().ok());
}

TEST_F(FailureTimeoutTest, AnAggregatorThatIsAwayIsLookedForAllTheTime) {
  Proxy nobody(/*port=*/1);
  auto channel = ConnectToAggregator(nobody.target(), kFast);
  const absl::Time start = absl::Now();
  auto exchange = Exchange(*channel, pair_.FrameOf(0, 1));
  // Less than 4 s when there is 250 ms between two, 17 s if what lies between them went on growing.
  nobody.AwaitConnections(12);
  EXPECT_LT(absl::Now() - start, absl::Seconds(12));
  channel.reset();
}

TEST_F(FailureTimeoutTest, AnExchangeOnAHalfOpenConnectionGoesOnOnceTheNetworkIsBack) {
  auto first = ConnectByProxy(), second = Connect();
  pair_.Join(*first, *second);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  AwaitWaitingFor(*second, ElementsAre(1));
  proxy_.Stop();
  const absl::Time start = absl::Now();
  proxy_.AwaitConnections(2);
  EXPECT_LT(absl::Now() - start, kNoticed);
  proxy_.Resume();
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  ExpectMean(a.get(), 2.5f);
  ExpectMean(b.get(), 2.5f);
}

// What a channel says of its connection.
class Said {
 public:
  OnConnection Listener() {
    return [this](const std::string& line) {
      absl::MutexLock lock(&mutex_);
      lines_.push_back(line);
    };
  }

  // The n-th line, from 0 on. Blocks until it comes.
  std::string Line(size_t n) {
    absl::MutexLock lock(&mutex_);
    const auto is_there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return lines_.size() > n; };
    mutex_.Await(absl::Condition(&is_there));
    return lines_[n];
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(FailureTimeoutTest, AWorkerSaysWhichAggregatorItWaitsForAndWhenItIsBack) {
  Said said;
  auto first = ConnectToAggregator(proxy_.target(), kFast, said.Listener()), second = Connect();
  pair_.Join(*first, *second);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  AwaitWaitingFor(*second, ElementsAre(1));
  proxy_.Stop();
  const absl::Time start = absl::Now();
  EXPECT_THAT(said.Line(0), StartsWith(absl::StrCat("waiting for aggregator ", proxy_.target(),
                                                    ", which does not answer (")));
  EXPECT_LT(absl::Now() - start, kNoticed);
  proxy_.Resume();
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  ExpectMean(a.get(), 2.5f);
  ExpectMean(b.get(), 2.5f);
  const std::string again = said.Line(1);
  const std::string words = absl::StrCat("aggregator ", proxy_.target(), " answers again, ");
  ASSERT_THAT(again, StartsWith(words));
  double lost = 0, silent = 0;
  ASSERT_EQ(std::sscanf(again.c_str() + words.size(),
                        "%lf s after a call to it failed and %lf s after the wait for it began",
                        &lost, &silent),
            2)
      << again;
  EXPECT_GE(silent - lost, absl::ToDoubleSeconds(kFast.keepalive_timeout()) - 0.02)
      << again << ", which is how long a ping waits before the connection is lost";
}

TEST_F(FailureTimeoutTest, AnExchangeWhoseAnswerIsLostGetsItAgain) {
  auto first = ConnectByProxy(), second = Connect();
  pair_.Join(*first, *second);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  AwaitWaitingFor(*second, ElementsAre(1));
  proxy_.StopAfter(Proxy::kToWorker, 0);
  ExpectMean(Exchange(*second, pair_.FrameOf(1, 4)).get(), 2.5f);
  proxy_.AwaitConnections(2);
  proxy_.Resume();
  ExpectMean(a.get(), 2.5f);
}

TEST_F(FailureTimeoutTest, AFrameThatIsStuckHalfWayIsSentAgain) {
  auto first = ConnectByProxy(), second = Connect();
  pair_.Join(*first, *second);
  proxy_.StopAfter(Proxy::kToAggregator, 1 << 20);
  auto a = Exchange(*first, pair_.FrameOf(0, 1));
  proxy_.AwaitStopped(Proxy::kToAggregator);
  const absl::Time start = absl::Now();
  proxy_.AwaitConnections(2);
  EXPECT_LT(absl::Now() - start, kNoticed);
  proxy_.Resume();
  auto b = Exchange(*second, pair_.FrameOf(1, 4));
  ExpectMean(a.get(), 2.5f);
  ExpectMean(b.get(), 2.5f);
}

TEST_F(FailureTimeoutTest, AConnectionThatIsCutHalfWayThroughAFrameIsMadeAgain) {
  for (const bool reset : {true, false}) {
    SCOPED_TRACE(reset ? "RST" : "FIN");
    const uint64_t step = reset ? 0 : 1;
    auto first = ConnectByProxy(), second = Connect();
    if (reset) pair_.Join(*first, *second);
    proxy_.StopAfter(Proxy::kToAggregator, 1 << 20);
    auto a = Exchange(*first, pair_.FrameOf(0, 1, step));
    proxy_.AwaitStopped(Proxy::kToAggregator);
    reset ? proxy_.Reset() : proxy_.Close();
    proxy_.Resume();
    auto b = Exchange(*second, pair_.FrameOf(1, 4, step));
    ExpectMean(a.get(), 2.5f);
    ExpectMean(b.get(), 2.5f);
  }
}

TEST_F(FailureTimeoutTest, AConnectionThatIsCutWhileAFrameWaitsIsMadeAgain) {
  for (const bool reset : {true, false}) {
    SCOPED_TRACE(reset ? "RST" : "FIN");
    const uint64_t step = reset ? 0 : 1;
    auto first = ConnectByProxy(), second = Connect();
    if (reset) pair_.Join(*first, *second);
    auto a = Exchange(*first, pair_.FrameOf(0, 1, step));
    AwaitWaitingFor(*second, ElementsAre(1));
    reset ? proxy_.Reset() : proxy_.Close();
    auto b = Exchange(*second, pair_.FrameOf(1, 4, step));
    ExpectMean(a.get(), 2.5f);
    ExpectMean(b.get(), 2.5f);
  }
}

// Blocks until the aggregator knows a connection of each rank of the pair.
void AwaitAllConnected(Channel& channel) {
  while (true) {
    const absl::StatusOr<StatusResponse> status = channel.Status({}, Later());
    ASSERT_TRUE(status.ok()) << status.status();
    ASSERT_EQ(status->jobs_size(), 1);
    if (status->jobs(0).disconnected_ranks().empty()) return;
  }
}

// As while a worker validates, or writes a checkpoint. A question about the job, which does not say
// who asks, may make the connection first.
TEST_F(FailureTimeoutTest,
       AConnectionThatIsCutWhileNothingIsSentIsMadeAgainAndTheAggregatorToldWhose) {
  auto first = ConnectByProxy(), second = Connect();
  pair_.Join(*first, *second);
  int connections = 1;
  for (const bool reset : {true, false}) {
    for (const bool asks : {false, true}) {
      SCOPED_TRACE(absl::StrCat(reset ? "RST" : "FIN", asks ? ", and asks" : ""));
      reset ? proxy_.Reset() : proxy_.Close();
      const absl::Time deadline = Later();
      while (asks && !first->Status({}, deadline).ok() && absl::Now() < deadline) {
      }
      proxy_.AwaitConnections(++connections);
      AwaitAllConnected(*second);
    }
  }
}

TEST_F(FailureTimeoutTest, AHalfOpenConnectionIsNoticedWhileNothingIsSentAndMadeAgain) {
  auto first = ConnectByProxy(), second = Connect();
  pair_.Join(*first, *second);
  proxy_.Stop();
  proxy_.AwaitConnections(2);
  proxy_.Resume();
  AwaitAllConnected(*second);
}

TEST_F(FailureTimeoutTest, WhoHasLeftDoesNotConnectAgain) {
  auto first = ConnectByProxy(), second = ConnectByProxy();
  pair_.Join(*first, *second);
  LeaveRequest request;
  request.set_job(Pair::RequestOf(0).job());
  request.set_epoch(pair_.epoch());
  request.set_incarnation(Pair::RequestOf(0).incarnation());
  ASSERT_TRUE(first->Leave(request, Later()).ok());
  const auto observer = Connect();
  for (const int connections : {3, 4}) {
    proxy_.Reset();
    proxy_.AwaitConnections(connections);
    // The other looks again a second later: when it has connected twice, this one could have.
    AwaitAllConnected(*observer);
  }
  first.reset();
  second.reset();
  EXPECT_EQ(proxy_.connections(), 4);
}

// gRPC disconnects clients that ping more often than it likes, unless told not to: here at the
// fourth ping, two seconds apart.
TEST_F(FailureTimeoutTest, AWorkerThatWaitsLongMayPingAsOftenAsItLikes) {
  auto first = ConnectByProxy(Seconds(4)), second = Connect();
  pair_.Join(*first, *second);
  const absl::StatusOr<Answer> answer =
      Exchange(*first, pair_.FrameOf(0, 1), absl::Now() + absl::Seconds(11)).get();
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kDeadlineExceeded) << answer.status();
  EXPECT_EQ(proxy_.connections(), 1);
}

TEST_F(FailureTimeoutTest, ASessionHandsItToItsChannels) {
  proxy_.Stop();
  SessionOptions options;
  options.worker.job = "job";
  options.worker.join_timeout = kNoticed;
  options.aggregators = {proxy_.target()};
  options.failure_timeout = kFast;
  std::vector<float> values(4);
  EXPECT_FALSE(Session::Join(options, {}, {{"w", {4}, absl::MakeSpan(values)}}).ok());
  EXPECT_GE(proxy_.connections(), 2) << "the first one was never greeted";
}

// The timeouts of this process's TCP connections to or from a port.
std::vector<int> TcpUserTimeoutsMs(uint16_t port) {
  std::vector<int> timeouts;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int fd, timeout;
    sockaddr_in here = {}, there = {};
    socklen_t here_size = sizeof here, there_size = sizeof there, size = sizeof timeout;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &fd) ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) != 0 ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) != 0 ||
        (ntohs(here.sin_port) != port && ntohs(there.sin_port) != port)) {
      continue;
    }
    EXPECT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size), 0);
    timeouts.push_back(timeout);
  }
  return timeouts;
}

// A ping cannot overtake a frame that is stuck: the kernel has to notice.
TEST(TcpUserTimeout, IsHalfOfEachSidesFailureTimeout) {
  const auto server = *Server::Start({.failure_timeout = kFast});
  auto channel = ConnectToAggregator(TargetOf(*server), Seconds(3));
  ASSERT_TRUE(channel->Status({}, Later()).ok());
  EXPECT_THAT(TcpUserTimeoutsMs(server->port()), UnorderedElementsAre(500, 1500));
}

class Process : public ServerProcess {
 public:
  Process() : ServerProcess("aggregator --failure-timeout 1s") {}

  uint16_t port() const {
    int port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(target().substr(target().rfind(':') + 1), &port));
    return port;
  }
};

TEST(AggregatorProcess, ForgetsAWorkerThatHangsWhileItJoins) {
  Process aggregator;
  Proxy proxy(aggregator.port());
  auto first = ConnectToAggregator(proxy.target(), FailureTimeout());
  auto second = ConnectToAggregator(aggregator.target(), FailureTimeout());
  auto join = std::async(std::launch::async, [&] {
    return first->Join(Pair::RequestOf(0), Later(), Channel::MayWait);
  });
  AwaitWaitingFor(*second, ElementsAre(1));
  proxy.Stop();
  const absl::Time start = absl::Now();
  AwaitWaitingFor(*second, ElementsAre(0, 1));
  EXPECT_LT(absl::Now() - start, kNoticed);
  proxy.Resume();
  // It has joined again by itself.
  EXPECT_TRUE(second->Join(Pair::RequestOf(1), Later(), Channel::MayWait).ok());
  EXPECT_TRUE(join.get().ok());
}

// Whatever the failure timeout: the kernel says so.
TEST(AggregatorProcess, IsNoticedAtOnceWhenItIsKilled) {
  Process aggregator;
  Said said;
  auto first = ConnectToAggregator(aggregator.target(), FailureTimeout(), said.Listener());
  auto second = ConnectToAggregator(aggregator.target(), FailureTimeout());
  Pair pair;
  pair.Join(*first, *second);
  auto a = Exchange(*first, pair.FrameOf(0, 1));
  AwaitWaitingFor(*second, ElementsAre(1));
  const absl::Time start = absl::Now();
  aggregator.Signal(SIGKILL);
  EXPECT_THAT(said.Line(0), StartsWith("waiting for aggregator " + aggregator.target()));
  const absl::Duration took = absl::Now() - start;
  EXPECT_LT(took, kNoticed);
  RecordProperty("noticed_us", static_cast<int>(absl::ToInt64Microseconds(took)));
  first.reset();
}

TEST(AggregatorProcess, IsNoticedWhenItIsStoppedAndGoesOnWhenItContinues) {
  Process aggregator;
  auto first = ConnectToAggregator(aggregator.target(), kFast);
  auto second = ConnectToAggregator(aggregator.target(), kFast);
  Pair pair;
  pair.Join(*first, *second);
  auto a = Exchange(*first, pair.FrameOf(0, 1));
  AwaitWaitingFor(*second, ElementsAre(1));

  aggregator.Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  EXPECT_EQ(first->Status({}, Later()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, kNoticed);
  // An exchange tries again until its deadline, and then says that nobody was there.
  EXPECT_EQ(Exchange(*second, pair.FrameOf(1, 4), absl::Now() + kNoticed).get().status().code(),
            absl::StatusCode::kUnavailable);

  aggregator.Continue();
  auto b = Exchange(*second, pair.FrameOf(1, 4));
  ExpectMean(a.get(), 2.5f);
  ExpectMean(b.get(), 2.5f);
}

}  // namespace
}  // namespace signpost::testing
