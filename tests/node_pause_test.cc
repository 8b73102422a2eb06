// A process of a node that stands still before it reads its parameters, and loses its place
// meanwhile.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "client/session.h"
#include "failpoint/failpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/nodes.h"

namespace signpost::testing {
namespace {

using ::testing::ContainsRegex;

// A training process.
struct Process {
  Process(const Nodes& nodes, uint32_t number) : number(number), replica({}, number) {
    auto joined = Session::Join(nodes.OptionsOf(number), {.freeze_step = 5}, replica.Parameters());
    EXPECT_TRUE(joined.ok()) << joined.status();
    session = *std::move(joined);
  }

  absl::Status Step() {
    replica.gradient = GradientOf(number, session->steps(), replica.values.size());
    return session->Step(replica.Gradients(), {GroupRates{.learning_rate = 0.01}}).status();
  }

  const uint32_t number;
  Replica replica;
  std::unique_ptr<Session> session;
};

TEST(Node, AProcessThatStoodStillDoesNotTakeLaterParametersForThoseOfItsStep) {
  // Two passes by the failpoint are of joins. The third process to pass stands still.
  ASSERT_TRUE(ArmFailpoints("worker.node_answered=sleep:5s@3").ok());
  Nodes nodes({.nodes = 1});
  std::atomic<int> stepped = 0;
  absl::Notification is_gone, have_gone_on;
  absl::Status told;
  OnEachRank(4, [&](uint32_t thread) {
    if (thread < 2) {
      Process process(nodes, thread);
      const absl::Status status = process.Step();
      if (++stepped == 1) {  // the other one stands still
        EXPECT_TRUE(status.ok()) << status;
        process.session.reset();
        is_gone.Notify();
      } else {
        EXPECT_TRUE(have_gone_on.HasBeenNotified());
        told = status;
      }
    } else {
      is_gone.WaitForNotification();
      Process process(nodes, thread - 2);
      EXPECT_EQ(process.session->steps(), 1);
      const absl::Status status = process.Step();
      EXPECT_TRUE(status.ok()) << status;
      if (thread == 2) have_gone_on.Notify();
      EXPECT_TRUE(process.session->Leave().ok());
    }
  });
  EXPECT_TRUE(absl::IsAborted(told)) << told;
  EXPECT_THAT(std::string(told.message()), ContainsRegex("local rank [01].* is gone"));
}

}  // namespace
}  // namespace signpost::testing
