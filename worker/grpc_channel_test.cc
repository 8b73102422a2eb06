#include "worker/grpc_channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "trace/merge.h"
#include "trace/recorder.h"

namespace signpost {
namespace {

// When the last channel of a process goes, so does gRPC's callback queue with its threads. Whoever
// lets go last must not be one of those threads.
TEST(GrpcChannel, TheLastOneOfAProcessMayGoRightAfterItsLastCallback) {
  auto payload = std::make_shared<const Payload>(0);
  for (int i = 0; i < 300; ++i) {
    auto channel = ConnectToAggregator("127.0.0.1:1", FailureTimeout());
    absl::Notification done;
    channel->Exchange({}, payload, absl::Now(), [&](absl::StatusOr<Answer> answer) {
      EXPECT_FALSE(answer.ok());
      done.Notify();
    });
    done.WaitForNotification();
  }
}

// A server of calls that come to it, on a port that another may have had.
std::unique_ptr<grpc::Server> Serve(AggregatorService::Service& aggregator, int& port) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(),
                           &port);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);  // as aggregators
  builder.RegisterService(&aggregator);
  return builder.BuildAndStart();
}

TEST(GrpcChannel, RecordsNoRetryOfACallThatItGivesUp) {
  const std::string directory = testing::TempDir() + "/trace";
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(trace::Start(directory, "the test").ok());
  absl::Status given_up;
  {
    const auto channel = ConnectToAggregator("127.0.0.1:1", FailureTimeout());
    channel->Exchange({}, std::make_shared<const Payload>(0), SteadyNow() + absl::Minutes(10),
                      [&](absl::StatusOr<Answer> answer) { given_up = answer.status(); });
  }
  EXPECT_TRUE(absl::IsCancelled(given_up)) << given_up;
  const absl::StatusOr<trace::Timeline> timeline = trace::ReadRecordings({directory});
  ASSERT_TRUE(timeline.ok()) << timeline.status();
  for (const trace::Event& event : timeline->processes.at(0).events) {
    EXPECT_NE(event.kind, trace::Kind::kRetry);
  }
}

// As gRPC's servers do to the calls that come while they shut down.
class CancellingAggregator final : public AggregatorService::Service {
 public:
  grpc::Status Leave(grpc::ServerContext*, const LeaveRequest*, LeaveResponse*) override {
    ++calls;
    return grpc::Status(grpc::StatusCode::CANCELLED, "");
  }
  std::atomic<int> calls = 0;
};

TEST(GrpcChannel, TriesAgainWhatItsServerCancelsAndDoesNotSayThatTheCallerDid) {
  CancellingAggregator aggregator;
  int port = 0;
  const std::unique_ptr<grpc::Server> server = Serve(aggregator, port);
  ASSERT_NE(server, nullptr);
  const auto channel = ConnectToAggregator(absl::StrCat("127.0.0.1:", port), FailureTimeout());
  const absl::Status status = channel->Leave({}, SteadyNow() + absl::Seconds(2));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "has cancelled the call")) << status;
  EXPECT_GE(aggregator.calls, 2);
}

// Takes everybody in, and notes who asks it for an error.
class NotingAggregator final : public AggregatorService::Service {
 public:
  grpc::Status Join(grpc::ServerContext*, const JoinRequest*, JoinResponse* response) override {
    response->set_epoch(7);
    return grpc::Status::OK;
  }
  grpc::Status ReadError(grpc::ServerContext*, const ReadErrorRequest* request,
                         ReadErrorResponse*) override {
    const absl::MutexLock lock(&mutex_);
    requests_.push_back(*request);
    // The first time it is about to end.
    return grpc::Status(
        requests_.size() == 1 ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::INVALID_ARGUMENT,
        "");
  }

  // Blocks until there are so many.
  std::vector<ReadErrorRequest> AwaitRequests(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto are_there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return requests_.size() >= count;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&are_there), absl::Seconds(30));
    return requests_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<ReadErrorRequest> requests_ ABSL_GUARDED_BY(mutex_);
};

TEST(GrpcChannel, TellsAnAggregatorThatWasStartedAgainWhoIsThereWithoutACall) {
  NotingAggregator aggregator;
  int port = 0;
  std::unique_ptr<grpc::Server> server = Serve(aggregator, port);
  ASSERT_NE(server, nullptr);
  const auto channel = ConnectToAggregator(absl::StrCat("127.0.0.1:", port), FailureTimeout());
  JoinRequest request;
  request.set_job("job");
  request.set_rank(3);
  request.set_incarnation(5);
  const absl::Time deadline = SteadyNow() + absl::Seconds(30);
  ASSERT_TRUE(channel->Join(request, deadline, Channel::MayWait).ok());

  server->Shutdown();
  server = Serve(aggregator, port);
  ASSERT_NE(server, nullptr);
  const std::vector<ReadErrorRequest> requests = aggregator.AwaitRequests(2);
  ASSERT_EQ(requests.size(), 2u) << "it is told again until it answers";
  EXPECT_EQ(requests[1].job(), "job");
  EXPECT_EQ(requests[1].epoch(), 7u);
  EXPECT_EQ(requests[1].rank(), 3u);
  EXPECT_EQ(requests[1].incarnation(), 5u);
}

TEST(GrpcChannel, SaysForHowLongItHasWaitedWithoutTheTimeBefore) {
  NotingAggregator aggregator;
  int port = 0;
  std::unique_ptr<grpc::Server> server = Serve(aggregator, port);
  ASSERT_NE(server, nullptr);
  absl::Mutex mutex;
  std::vector<std::string> lines;
  absl::Notification waits;
  const auto channel = ConnectToAggregator(absl::StrCat("127.0.0.1:", port), FailureTimeout(),
                                           [&](const std::string& line) {
                                             const absl::MutexLock lock(&mutex);
                                             lines.push_back(line);
                                             if (lines.size() == 1) waits.Notify();
                                           });
  const absl::Time deadline = SteadyNow() + absl::Seconds(30);
  ASSERT_TRUE(channel->Join({}, deadline, Channel::MayWait).ok());
  server->Shutdown();
  absl::SleepFor(absl::Milliseconds(300));  // as a worker that computes
  const absl::Time start = SteadyNow();
  auto second = std::async(std::launch::async,
                           [&] { return channel->Join({}, deadline, Channel::MayWait).status(); });
  waits.WaitForNotification();
  server = Serve(aggregator, port);
  ASSERT_NE(server, nullptr);
  EXPECT_TRUE(second.get().ok());
  const double most = absl::ToDoubleSeconds(SteadyNow() - start) + 0.01;
  const absl::MutexLock lock(&mutex);
  ASSERT_EQ(lines.size(), 2u);
  const size_t at = lines[1].find(" and ");
  ASSERT_NE(at, std::string::npos) << lines[1];
  EXPECT_LE(std::atof(lines[1].c_str() + at + 5), most) << lines[1];
}

}  // namespace
}  // namespace signpost
