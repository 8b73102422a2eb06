#include "client/one_call.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"

namespace signpost {
namespace {

TEST(OneCall, RefusesAnotherThreadAndNamesBothCalls) {
  OneCall calls;
  absl::Notification is_in_step, may_end;
  std::thread stepping([&] {
    const absl::Status status = calls.Run("Step", [&] {
      is_in_step.Notify();
      may_end.WaitForNotification();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
  is_in_step.WaitForNotification();
  const absl::Status refused = calls.Run("Leave", [] { return absl::OkStatus(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(refused.message(),
            "Leave was called while another thread is in Step; call it when that has returned");
  EXPECT_FALSE(calls.Try([] { ADD_FAILURE(); }));
  may_end.Notify();
  stepping.join();
  EXPECT_TRUE(calls.Run("Leave", [] { return absl::OkStatus(); }).ok());
  EXPECT_TRUE(calls.Try([] {}));
}

TEST(OneCall, HasOneCallAtATime) {
  OneCall calls;
  int inside = 0;  // not atomic: ThreadSanitizer sees two at once
  std::atomic<int> done = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        calls.Wait([&] { ++inside; });
        const absl::Status status = calls.Run("Step", [&] {
          ++inside;
          return absl::OkStatus();
        });
        if (status.ok()) ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(inside, 4000 + done);
}

}  // namespace
}  // namespace signpost
