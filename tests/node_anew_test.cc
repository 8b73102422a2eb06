// Nodes that have left a job, and one that has not: whether it goes on with what it has, or begins
// the job anew with them. The processes, and the workers, are threads.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/failure_timeout.h"
#include "proto/try_again.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/nodes.h"
#include "worker/clock.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};
constexpr int kSteps = 12;
constexpr absl::string_view kWaits = "for one to come again";

// A training process's model, and its session.
class Process {
 public:
  Process(const Nodes& nodes, uint32_t number, bool start_from_rank_0 = false)
      : options_(nodes.OptionsOf(number)), number_(number) {
    options_.start_from_rank_0 = start_from_rank_0;
  }

  // Its join ends, as on Ctrl-C, when that is notified.
  void InterruptOn(const absl::Notification& notification) {
    options_.worker.is_interrupted = [&] { return notification.HasBeenNotified(); };
  }
  absl::Status Join() {
    auto session = Session::Join(options_, {.freeze_step = 5}, replica_.Parameters());
    if (session.ok()) session_ = *std::move(session);
    return session.status();
  }
  void MustJoin() {
    const absl::Status joined = Join();
    ASSERT_TRUE(joined.ok()) << joined;
  }
  void StepTo(uint64_t steps) {
    while (session_->steps() < steps) {
      replica_.gradient = GradientOf(number_, session_->steps(), replica_.values.size());
      const auto report = session_->Step(replica_.Gradients(), {kRates});
      ASSERT_TRUE(report.ok()) << report.status();
    }
  }
  void EndSession() { session_.reset(); }  // without leaving

  Session& session() { return *session_; }
  const std::vector<float>& values() const { return replica_.values; }

 private:
  SessionOptions options_;
  const uint32_t number_;
  Replica replica_{{}, number_};
  std::unique_ptr<Session> session_;
};

// What all processes of a job come to that nothing happens to.
std::vector<float> TrainedAtOnce(const NodesOptions& options) {
  Nodes nodes(options);
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number);
    process.MustJoin();
    process.StepTo(kSteps);
    results[number] = process.values();
    EXPECT_TRUE(process.session().Leave().ok());
  });
  return results[0];
}

// Returns when an aggregator waits for that rank, and no other, to begin the job.
void AwaitJoinsWithout(Nodes& nodes, uint32_t rank) {
  StatusRequest about;
  about.set_job(JobOptionsForTest().worker.job);
  const auto channel = ConnectToAggregator(nodes.cluster().targets()[0], FailureTimeout());
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (absl::Now() < deadline) {
    const auto status = channel->Status(about, deadline);
    ASSERT_TRUE(status.ok()) << status.status();
    if (status->jobs_size() == 1 && status->jobs(0).joining_us() > 0 &&
        absl::c_equal(status->jobs(0).waiting_for_ranks(), std::vector<uint32_t>{rank})) {
      return;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  FAIL() << "the job does not wait for rank " << rank;
}

// Can be set forward.
class ClockForTest final : public Clock {
 public:
  absl::Time Now() override { return Clock::Now() + absl::Hours(hours_.load()); }
  void AddHour() { ++hours_; }

 private:
  std::atomic<int> hours_ = 0;
};

// As when a death in one node has ended the exchange that another was in.
TEST(NodeAnew, BeginsWithOneThatHasLeftTheJobWhicheverIsFirst) {
  NodesOptions options = {.nodes = 2, .processes = 1};
  const std::vector<float> wanted = TrainedAtOnce(options);
  for (const uint32_t first : {0, 1}) {
    SCOPED_TRACE(first);
    absl::Notification waits;
    options.on_event = [&](const std::string& line) {
      if (absl::StrContains(line, kWaits)) waits.Notify();
    };
    Nodes nodes(options);
    absl::Notification has_left;
    OnEachRank(2, [&](uint32_t number) {
      auto process = std::make_unique<Process>(nodes, number);
      process->MustJoin();
      process->StepTo(1);
      if (number == 0) {
        EXPECT_TRUE(process->session().Leave().ok());
        has_left.Notify();
      }
      process->EndSession();
      has_left.WaitForNotification();
      if (number == 0 && first == 1) {
        EXPECT_TRUE(waits.WaitForNotificationWithTimeout(absl::Seconds(30)));
      }
      if (number == 1 && first == 0) AwaitJoinsWithout(nodes, 1);
      process = std::make_unique<Process>(nodes, number);
      process->MustJoin();
      EXPECT_FALSE(process->session().returned());
      process->StepTo(kSteps);
      EXPECT_EQ(process->values(), wanted);
      EXPECT_TRUE(process->session().Leave().ok());
    });
    EXPECT_EQ(waits.HasBeenNotified(), first == 1);
  }
}

// Takes all steps. Node 0 then leaves; of node 1, for which it is true, the process dies after
// that.
bool OutlivesTheOther(Nodes& nodes, uint32_t number, absl::Notification& has_left) {
  Process process(nodes, number);
  process.MustJoin();
  process.StepTo(kSteps);
  if (number == 0) {
    EXPECT_TRUE(process.session().Leave().ok());
    has_left.Notify();
    return false;
  }
  has_left.WaitForNotification();
  return true;
}

// A process dies after the last step, in saving the model, say.
TEST(NodeAnew, OneGoesOnWithWhatAllHaveTrainedIfTheOthersAreDone) {
  ClockForTest clock;
  NodesOptions options = {.nodes = 2, .processes = 1};
  const std::vector<float> wanted = TrainedAtOnce(options);
  options.worker.clock = &clock;
  options.on_event = [&](const std::string& line) {
    if (absl::StrContains(line, kWaits)) clock.AddHour();
  };
  Nodes nodes(options);
  absl::Notification has_left;
  OnEachRank(2, [&](uint32_t number) {
    if (!OutlivesTheOther(nodes, number, has_left)) return;
    auto process = std::make_unique<Process>(nodes, number);
    process->MustJoin();
    EXPECT_TRUE(process->session().returned());
    EXPECT_EQ(process->session().steps(), kSteps);
    EXPECT_EQ(process->values(), wanted);
    EXPECT_TRUE(process->session().SaveState().ok());
    EXPECT_TRUE(process->session().Leave().ok());
  });
}

TEST(NodeAnew, WhatOneHasIsKeptWhenItsProcessDiesAgainWhileItWaitsForTheOthers) {
  ClockForTest clock;
  absl::Notification waits;
  NodesOptions options = {.nodes = 2, .processes = 1};
  options.worker.join_timeout = absl::Minutes(59);
  options.worker.clock = &clock;
  std::atomic<int> times = 0;
  options.on_event = [&](const std::string& line) {
    if (!absl::StrContains(line, kWaits)) return;
    if (++times == 1) return waits.Notify();
    clock.AddHour();
  };
  Nodes nodes(options);
  absl::Notification has_left;
  OnEachRank(2, [&](uint32_t number) {
    if (!OutlivesTheOther(nodes, number, has_left)) return;
    auto process = std::make_unique<Process>(nodes, number);
    process->InterruptOn(waits);
    EXPECT_TRUE(absl::IsCancelled(process->Join()));
    process = std::make_unique<Process>(nodes, number);
    process->MustJoin();
    EXPECT_TRUE(process->session().returned());
    EXPECT_EQ(process->session().steps(), kSteps);
  });
}

// What it would begin with hung on who lives on.
TEST(NodeAnew, ProcessesThatLiveOnAreToBeStartedAgain) {
  const NodesOptions options = {.nodes = 2, .processes = 2};
  const std::vector<float> wanted = TrainedAtOnce(options);
  for (const bool start_from_rank_0 : {false, true}) {
    for (const uint32_t living : {1, 2}) {  // of the first node
      Nodes nodes(options);
      auto* const have_left = new absl::Barrier(nodes.processes());
      OnEachRank(nodes.processes(), [&](uint32_t number) {
        auto process = std::make_unique<Process>(nodes, number, start_from_rank_0);
        process->MustJoin();
        process->StepTo(6);
        if (number >= 2) {
          EXPECT_TRUE(process->session().Leave().ok());
        }
        if (have_left->Block()) delete have_left;
        process->EndSession();
        if (number >= living) {
          process = std::make_unique<Process>(nodes, number, start_from_rank_0);
        }
        if (number < 2) {
          const absl::Status told = process->Join();
          EXPECT_TRUE(IsTryAgain(told)) << told;
          EXPECT_THAT(std::string(told.message()), HasSubstr("Start all processes"));
          process = std::make_unique<Process>(nodes, number, start_from_rank_0);
        }
        process->MustJoin();
        EXPECT_FALSE(process->session().returned());
        process->StepTo(kSteps);
        EXPECT_EQ(process->values(), wanted);
        EXPECT_TRUE(process->session().Leave().ok());
      });
    }
  }
}

}  // namespace
}  // namespace signpost::testing
