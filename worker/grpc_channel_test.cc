#include "worker/grpc_channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"

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
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&aggregator);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const auto channel = ConnectToAggregator(absl::StrCat("127.0.0.1:", port), FailureTimeout());
  const absl::Status status = channel->Leave({}, SteadyNow() + absl::Seconds(2));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "has cancelled the call")) << status;
  EXPECT_GE(aggregator.calls, 2);
}

}  // namespace
}  // namespace signpost
