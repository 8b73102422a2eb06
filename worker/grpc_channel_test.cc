#include "worker/grpc_channel.h"

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "proto/failure_timeout.h"

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

}  // namespace
}  // namespace signpost
