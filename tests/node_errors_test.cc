// What processes of a node are told that call out of order, differ from each other, or wait for one
// that does not come.

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/node.pb.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/node_process.h"
#include "tests/nodes.h"
#include "tests/raw_process.h"
#include "tests/status_is.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(Node, RefusesCallsOutOfOrderAsAWorkerDoes) {
  Nodes nodes({.nodes = 1, .processes = 1});
  Process process(nodes, 0);
  ASSERT_EQ(process.Join(), absl::OkStatus());
  Session& session = *process.session;
  const std::vector<Gradient> gradients = process.replica.Gradients();
  const auto refused = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(session.GradientReady(0, gradients[0]).code(), refused);
  EXPECT_EQ(session.FinishStep().status().code(), refused);
  EXPECT_EQ(session.BeginStep({GroupRates{.learning_rate = NAN}}).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(session.BeginStep({kRates}).ok());
  EXPECT_EQ(session.BeginStep({kRates}).code(), refused);
  EXPECT_EQ(session.Step(gradients, {kRates}).status().code(), refused);
  EXPECT_EQ(session.SaveState().status().code(), refused);
  ASSERT_TRUE(session.GradientReady(0, gradients[0]).ok());
  EXPECT_THAT(MessageOf(session.GradientReady(0, gradients[0])), HasSubstr("came twice"));
  EXPECT_EQ(session.GradientReady(1, gradients[0]).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(session.FinishStep().status()), HasSubstr("that of 'tensor1'"));
  for (size_t i = 1; i < gradients.size(); ++i) {
    ASSERT_TRUE(session.GradientReady(i, gradients[i]).ok());
  }
  EXPECT_TRUE(session.FinishStep().ok());
  EXPECT_TRUE(session.Leave().ok());
  for (const absl::Status& status :
       {session.Step(gradients, {kRates}).status(), session.BeginStep({kRates}),
        session.Checkpoint(::testing::TempDir()), session.SaveState().status()}) {
    EXPECT_EQ(status, absl::InvalidArgumentError("this process has left its job: join again"));
  }
}

// What the node's worker waits for, and for how long.

TEST(Node, NamesTheProcessThatDoesNotStep) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_given_up;
  const auto set_timeout = [](Process& process) {
    process.options.worker.exchange_timeout = absl::Milliseconds(200);
  };
  OnEachProcess(nodes, set_timeout, [&](Process& process) {
    if (process.number == 1) return has_given_up.WaitForNotification();
    const absl::Status late = process.Step().status();
    has_given_up.Notify();
    EXPECT_THAT(late, StatusIs(absl::StatusCode::kDeadlineExceeded,
                               ContainsRegex("waited .* for local rank 1 \\(process [0-9]+\\)")));
  });
}

TEST(Node, NamesTheProcessThatDoesNotAttach) {
  Nodes nodes({.nodes = 1, .processes = 3});
  std::thread([&] {
    Process process(nodes, 1);
    process.options.worker.join_timeout = absl::Milliseconds(300);
    EXPECT_THAT(process.Join(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                         AllOf(HasSubstr("local rank 0, which is not attached"),
                                               HasSubstr("local rank 2, which is not attached"))));
  }).join();
}

TEST(Node, RemembersWhyTheProcessWasRefusedThatIsWaitedFor) {
  Nodes nodes({.nodes = 1, .processes = 2});
  node::Request attach = RawAttach(0, 2);
  attach.mutable_attach()->mutable_definition()->mutable_options()->set_join_timeout_us(100'000);
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(attach).ok());
  attach.mutable_attach()->set_rank(1);
  attach.mutable_attach()->mutable_definition()->mutable_tensors(0)->set_shape(0, 9);
  EXPECT_EQ(RawProcess(nodes.SocketOf(0)).Call(attach).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      MessageOf(process.Call(RawBegin()).status()),
      HasSubstr("local rank 1, which is not attached (refused: tensor 0 is 'x' [9] here but "
                "'x' [8] in the job)"));
}

// What processes must have alike.

// What one of two processes is told when the second changes something; the other one waits for it.
absl::Status WhatDiffers(const std::function<void(Process& process)>& change,
                         const JobOptionsForTest& job = {}) {
  Nodes nodes({.nodes = 1, .processes = 2, .max_parameters = 1 << 22});
  std::vector<absl::Status> told(2);
  OnEachRank(2, [&](uint32_t number) {
    Process process(nodes, number, job);
    process.options.worker.join_timeout = absl::Milliseconds(500);
    if (number == 1) change(process);
    told[number] = process.Join();
    EXPECT_FALSE(told[number].ok());
  });
  return absl::IsDeadlineExceeded(told[1]) ? told[0] : told[1];
}

TEST(Node, RefusesProcessesThatDifferAndSaysInWhat) {
  EXPECT_THAT(WhatDiffers([](Process& process) { process.optimizer.freeze_step = 7; }),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ContainsRegex("freeze_step: (5 -> 7|7 -> 5)")));
  EXPECT_THAT(WhatDiffers([](Process& process) { process.replica.values[40] += 1; }),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("'tensor1' [8] has other values on local rank 1")));
  EXPECT_THAT(WhatDiffers([](Process& process) { process.options.worker.rank = 2; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 2 of 2 does not belong to this node, 0 of 1, which "
                                 "has the ranks 0 to 1 of 2")));
}

// Values and gradients are looked at a mebi of elements at a time.
TEST(Node, LooksAtLargeTensorsToTheirEnds) {
  JobOptionsForTest job;
  job.tensors = {(1 << 20) + 1, 8, (2 << 20) + 5};
  for (const size_t different : {size_t{1 << 20}, size_t{(3 << 20) + 13}}) {
    const absl::Status told =
        WhatDiffers([different](Process& process) { process.replica.values[different] += 1; }, job);
    EXPECT_THAT(MessageOf(told), HasSubstr(different == 1 << 20 ? "'tensor0' [1048577] has other"
                                                                : "'tensor2' [2097157] has other"));
  }
  Nodes nodes({.nodes = 1, .processes = 2, .max_parameters = 1 << 22});
  OnEachRank(2, [&](uint32_t number) {
    Process process(nodes, number, job);
    ASSERT_EQ(process.Join(), absl::OkStatus());
    Replica& replica = process.replica;
    replica.gradient.assign(replica.values.size(), 0.5f);
    if (number == 1) replica.gradient.back() = std::numeric_limits<float>::infinity();
    const auto report = process.session->Step(replica.Gradients(), {kRates});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->skipped.size(), 1u);
    EXPECT_THAT(report->skipped[0].block, HasSubstr(", of local rank 1"));
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

TEST(Node, NamesTheProcessWhoseGradientIsNotFinite) {
  Nodes nodes({.nodes = 2, .processes = 2});
  OnEachProcess(nodes, [&](Process& process) {
    const bool is_with_it = process.number >= 2;
    Replica& replica = process.replica;
    replica.gradient = GradientOf(process.number, 0, replica.values.size());
    if (process.number == 3) replica.gradient[50] = std::numeric_limits<float>::infinity();
    const auto report = process.session->Step(replica.Gradients(), {kRates});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->skipped.size(), 1u);
    EXPECT_THAT(report->skipped[0].block, HasSubstr("tensor 'tensor3' [300]"));
    // The other node knows only which node it was, and names its first process.
    EXPECT_EQ(report->skipped[0].rank, is_with_it ? 3u : 2u);
    EXPECT_EQ(report->skipped[0].block.find(", of local rank 1") != std::string::npos, is_with_it);
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

TEST(Node, SaysWhichProcessesMakeDifferentCalls) {
  Nodes nodes({.nodes = 1, .processes = 2});
  OnEachProcess(nodes, [&](Process& process) {
    EXPECT_THAT(process.number == 0 ? process.Step().status()
                                    : process.session->Checkpoint(::testing::TempDir() + "/never"),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         ContainsRegex("local rank 0 .* calls for a step, local rank 1 .* "
                                       "calls for a checkpoint")));
  });
}

TEST(Node, RefusesAStepAtDifferentRatesAndTakesItWhenTheyAgree) {
  Nodes nodes({.nodes = 1, .processes = 2});
  const auto processes = RawProcessesOf(nodes);
  processes[0]->Send(RawStep(0.01));
  processes[1]->Send(RawStep(0.02));
  for (const auto& process : processes) {
    EXPECT_THAT(process->Receive().status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("local rank 1 (process 1001)"), HasSubstr("0.02"),
                               HasSubstr("not {learning_rate: 0.01"))));
  }
  for (const auto& process : processes) process->Send(RawStep(0.01));
  for (const auto& process : processes) EXPECT_TRUE(process->Receive().ok());
}

TEST(Node, TakesCheckpointsIntoOneDirectoryOnly) {
  Nodes nodes({.nodes = 1, .processes = 2});
  OnEachProcess(nodes, [&](Process& process) {
    EXPECT_THAT(process.session->Checkpoint(absl::StrCat("/tmp/", process.number)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("'/tmp/1'"), HasSubstr("'/tmp/0'"))));
    EXPECT_TRUE(process.Step().ok());
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

}  // namespace
}  // namespace signpost::testing
