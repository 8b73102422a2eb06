// Processes that die or leave, a worker of a node that does, and nodes that others do without: who
// is told, and what goes on.

#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "node/process_watch.h"
#include "node/server.h"
#include "proto/failure_timeout.h"
#include "proto/node.pb.h"
#include "proto/try_again.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/node_process.h"
#include "tests/nodes.h"
#include "tests/raw_process.h"
#include "tests/server_process.h"
#include "tests/status_is.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Returns when the first of two nodes has sent all of its part of that step, of fp32 gradients as
// those before, and waits for the second's.
void AwaitFirstNodesPart(Nodes& nodes, const std::string& job, size_t elements, uint64_t step) {
  StatusRequest about;
  about.set_job(job);
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (absl::Now() < deadline) {
    uint64_t bytes = 0;
    for (const std::string& target : nodes.cluster().targets()) {
      const auto status = ConnectToAggregator(target, FailureTimeout())->Status(about, deadline);
      ASSERT_TRUE(status.ok()) << status.status();
      if (status->jobs_size() == 1) bytes += status->jobs(0).payload_bytes_received();
    }
    if (bytes == (2 * step + 1) * elements * sizeof(float)) return;
  }
  FAIL() << "the first node has not sent its part of step " << step;
}

// The worker of the first node, with two processes, in the place of the one that `nodes` has.
std::unique_ptr<ServerProcess> StartWorkerProcess(Nodes& nodes, uint32_t world_size) {
  nodes.End(0);
  auto worker = std::make_unique<ServerProcess>(
      absl::StrCat("worker --listen ", nodes.SocketOf(0), " --processes 2 --rank 0 --world-size ",
                   world_size, " --aggregators ", absl::StrJoin(nodes.cluster().targets(), ",")));
  EXPECT_EQ(worker->target(), nodes.SocketOf(0));
  return worker;
}

// Processes.

TEST(Node, GoesOnWithTheSameBitsAfterAProcessHasDiedWhileOthersWaited) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  OnEachProcess(nodes, [&](Process& process) {
    process.StepTo(7);
    if (process.number == 0) {
      EXPECT_THAT(process.Step().status(),
                  StatusIs(absl::StatusCode::kAborted,
                           AllOf(ContainsRegex("local rank 1 \\(process [0-9]+\\)"),
                                 HasSubstr("after 7 steps"))));
      EXPECT_EQ(process.Step().status().code(), absl::StatusCode::kFailedPrecondition);
    }
    if (process.number <= 1) {  // the other node's go on
      // It comes back with values that are none.
      std::fill(process.replica.values.begin(), process.replica.values.end(), -1);
      ASSERT_EQ(process.Join(), absl::OkStatus());
      EXPECT_EQ(process.session->steps(), 7);
      ASSERT_TRUE(process.session->returned());
      EXPECT_EQ(process.session->returned()->lost_error_norm, 0);
    }
    process.StepTo(kSteps);
    EXPECT_TRUE(process.session->Leave().ok());
    EXPECT_EQ(process.replica.values, wanted);
  });
}

TEST(Node, TellsAProcessThatOthersDiedInTheStepThatItHasYetToCallFor) {
  Nodes nodes({.nodes = 1, .processes = 2});
  auto processes = RawProcessesOf(nodes);
  processes[0]->Send(RawStep());
  processes[0]->Die();
  processes[0] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[0]->Call(RawAttach(0, 2)).ok());  // once the other's end has been noticed
  EXPECT_THAT(processes[1]->Call(RawStep()).status(),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr("local rank 0 (process 1000) of job 'raw' is gone without "
                                 "having left, after 0 steps")));
}

// As they do when its children have them too.
TEST(Node, NoticesThatAProcessIsDeadWhoseConnectionsOutliveIt) {
  Nodes nodes({.nodes = 1, .processes = 2});
  char name[] = "sleep", seconds[] = "1000";
  char* const arguments[] = {name, seconds, nullptr};
  pid_t pid = 0;
  ASSERT_EQ(posix_spawnp(&pid, name, nullptr, nullptr, arguments, environ), 0);
  node::Request attach = RawAttach(1, 2);
  attach.mutable_attach()->set_pid(pid);
  attach.mutable_attach()->set_pid_namespace(node::PidNamespace());
  RawProcess waits(nodes.SocketOf(0)), dies(nodes.SocketOf(0));
  ASSERT_TRUE(waits.Call(RawAttach(0, 2)).ok());
  ASSERT_TRUE(dies.Call(attach).ok());
  waits.Send(RawBegin());
  ASSERT_TRUE(dies.Call(RawBegin()).ok());
  ASSERT_TRUE(waits.Receive().ok());
  waits.Send(RawStep());
  kill(pid, SIGKILL);
  const absl::Status told = waits.Receive().status();
  waitpid(pid, nullptr, 0);
  EXPECT_THAT(told, StatusIs(absl::StatusCode::kAborted,
                             HasSubstr(absl::StrCat("local rank 1 (process ", pid, ")"))));
  EXPECT_EQ(dies.Call(RawStep()).status().code(), absl::StatusCode::kCancelled);
}

TEST(Node, FinishesTheStepThatIsUnderWayWhenAProcessDies) {
  Nodes nodes({.nodes = 2, .processes = 2});
  auto processes = RawProcessesOf(nodes);
  processes[0]->Send(RawStep());
  processes[1]->Send(RawStep());
  AwaitFirstNodesPart(nodes, "raw", /*elements=*/8, /*step=*/0);
  processes[1]->Die();
  processes[1] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[1]->Call(RawAttach(1, 4)).ok());  // once the other's end has been noticed
  processes[2]->Send(RawStep());
  processes[3]->Send(RawStep());
  for (const int i : {0, 2, 3}) {
    const auto reply = processes[i]->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->stepped().steps(), 1);
  }
  // What it learns then.
  EXPECT_EQ(processes[0]->Call(RawStep()).status().code(), absl::StatusCode::kAborted);
  processes[0] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[0]->Call(RawAttach(0, 4)).ok());
  processes[0]->Send(RawBegin());
  const auto begun = processes[1]->Call(RawBegin());
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(begun->begun().steps(), 1);
  EXPECT_TRUE(begun->begun().returned());
}

TEST(Node, LetsAnotherProcessTakeThePlaceOfOneThatDiedBeforeTheBeginning) {
  Nodes nodes({.nodes = 1, .processes = 2});
  RawProcess first(nodes.SocketOf(0));
  ASSERT_TRUE(first.Call(RawAttach(0, 2)).ok());
  first.Send(RawBegin());
  {
    RawProcess dies(nodes.SocketOf(0));
    ASSERT_TRUE(dies.Call(RawAttach(1, 2)).ok());
  }
  RawProcess second(nodes.SocketOf(0));
  ASSERT_TRUE(second.Call(RawAttach(1, 2)).ok());
  EXPECT_TRUE(second.Call(RawBegin()).ok());
  EXPECT_TRUE(first.Receive().ok());
}

TEST(Node, ForgetsAJobThatNobodyHasBegun) {
  Nodes nodes({.nodes = 1, .processes = 2});
  {
    RawProcess dies(nodes.SocketOf(0));
    ASSERT_TRUE(dies.Call(RawAttach(0, 2)).ok());
  }
  node::Request other = RawAttach(0, 2);
  other.mutable_attach()->mutable_definition()->mutable_tensors(0)->set_shape(0, 9);
  RawProcess process(nodes.SocketOf(0));
  const auto reply = process.Call(other);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->attached().gradients().bytes(), 36u);
}

TEST(Node, LeavesTheJobWhenAllItsProcessesHave) {
  Nodes nodes({.nodes = 1, .processes = 2});
  TrainAttached(nodes);
  // Otherwise its rank would still be taken.
  Process worker(nodes, 0);
  worker.options = nodes.AggregatorsAs(0, 1);
  ASSERT_EQ(worker.Join(), absl::OkStatus());
  EXPECT_EQ(worker.session->steps(), 0);
  EXPECT_TRUE(worker.session->Leave().ok());
  // And it has no values any more that the next processes would get.
  TrainAttached(nodes);
}

TEST(Node, TellsTheOthersWhenAProcessHasLeft) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_left;
  OnEachProcess(nodes, [&](Process& process) {
    if (process.number == 1) {
      EXPECT_TRUE(process.session->Leave().ok());
      return has_left.Notify();
    }
    has_left.WaitForNotification();
    EXPECT_TRUE(process.session->SaveState().ok());  // which needs nobody else
    const absl::Status told = process.Step().status();
    EXPECT_THAT(told, StatusIs(absl::StatusCode::kFailedPrecondition,
                               ContainsRegex("local rank 1 \\(process [0-9]+\\) has left")));
    EXPECT_TRUE(IsTryAgain(told));  // nothing is wrong with this one
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

TEST(Node, AProcessThatIsInterruptedWaitsNoLongerAndTheOthersAreTold) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_left;
  OnEachRank(2, [&](uint32_t number) {
    bool is_interrupted = false;
    Process process(nodes, number);
    process.options.worker.is_interrupted = [&] { return is_interrupted; };
    ASSERT_EQ(process.Join(), absl::OkStatus());
    if (number == 1) {
      has_left.WaitForNotification();
      // The worker has the other's gradient, and may hear of this one before it hears of the end.
      absl::Status told = process.Step().status();
      if (told.ok()) told = process.Step().status();
      EXPECT_THAT(MessageOf(told), ContainsRegex("local rank 0 .* is gone without having left"));
      return;
    }
    is_interrupted = true;
    EXPECT_EQ(process.Step().status(), absl::CancelledError("interrupted"));
    EXPECT_TRUE(process.session->Leave().ok());
    has_left.Notify();
  });
}

TEST(Node, CountsOnlyTheLastCohortsProcessesAsThoseWhoHaveLeft) {
  Nodes nodes({.nodes = 1, .processes = 2});
  const auto attached = [&](uint32_t rank) {
    auto process = std::make_unique<RawProcess>(nodes.SocketOf(0));
    EXPECT_TRUE(process->Call(RawAttach(rank, 2)).ok());
    process->Send(RawBegin());
    return process;
  };
  node::Request leave;
  leave.mutable_leave();
  auto lives_on = attached(0), dies = attached(1);
  ASSERT_TRUE(lives_on->Receive().ok());
  ASSERT_TRUE(dies->Receive().ok());
  dies.reset();
  auto second = attached(1), first = attached(0);
  ASSERT_TRUE(first->Receive().ok());
  ASSERT_TRUE(second->Receive().ok());
  EXPECT_TRUE(lives_on->Call(leave).ok());
  first->Send(RawStep());
  EXPECT_TRUE(second->Call(RawStep()).ok());
  EXPECT_TRUE(first->Receive().ok());
  EXPECT_TRUE(first->Call(leave).ok());
  EXPECT_TRUE(second->Call(leave).ok());
  // Now nobody has it any more.
  first = attached(0), second = attached(1);
  const auto begun = first->Receive();
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_FALSE(begun->begun().returned());
}

// The worker of a node.

TEST(Node, LeavesTheJobWhenItEnds) {
  Nodes nodes({.nodes = 1, .processes = 1});
  Process process(nodes, 0);
  ASSERT_EQ(process.Join(), absl::OkStatus());
  ASSERT_TRUE(process.Step().ok());
  nodes.End(0);
  EXPECT_THAT(process.Step().status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("the worker of this node")));
  Process worker(nodes, 0);
  worker.options = nodes.AggregatorsAs(0, 1);
  EXPECT_EQ(worker.Join(), absl::OkStatus());
}

// Its end is noticed whatever the failure timeout, since the kernel says so; that it hangs, when
// that timeout is over.
TEST(NodesWorker, ThatIsKilledOrHangsEndsTheJobForItsProcessesAndIsMissedByTheOtherNode) {
  struct Fault {
    int signal;
    FailureTimeout failure_timeout;
  };
  // With the default of 10 s a worker that hangs would not be noticed by then.
  constexpr absl::Duration kNoticed = absl::Seconds(5);
  constexpr uint64_t kFaultAt = 3;  // steps
  for (const Fault& fault :
       {Fault{SIGKILL, FailureTimeout()}, Fault{SIGSTOP, *FailureTimeout::Of(absl::Seconds(1))}}) {
    SCOPED_TRACE(strsignal(fault.signal));
    Nodes nodes({.nodes = 2, .processes = 2});
    const auto worker = StartWorkerProcess(nodes, /*world_size=*/2);
    absl::Notification is_signalled;
    absl::Time signalled;
    std::thread signaller([&] {
      const JobOptionsForTest job;
      AwaitFirstNodesPart(nodes, job.worker.job, absl::c_accumulate(job.tensors, size_t{0}),
                          kFaultAt);
      signalled = absl::Now();
      is_signalled.Notify();
      worker->Signal(fault.signal);
    });
    absl::Notification told[2];
    const auto set_timeouts = [&](Process& process) {
      process.options.failure_timeout = fault.failure_timeout;
      if (process.number >= 2) process.options.worker.exchange_timeout = absl::Seconds(8);
    };
    OnEachProcess(nodes, set_timeouts, [&](Process& process) {
      process.StepTo(kFaultAt);
      if (process.number >= 2) {
        for (const absl::Notification& other : told) other.WaitForNotification();
        // What it had sent counts.
        EXPECT_EQ(process.Step().status(), absl::OkStatus());
        EXPECT_THAT(process.Step().status(),
                    StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("waiting for rank 0")));
        return;
      }
      const absl::Status gone = process.Step().status();
      is_signalled.WaitForNotification();
      EXPECT_LT(absl::Now() - signalled, kNoticed);
      told[process.number].Notify();
      EXPECT_THAT(
          gone,
          StatusIs(absl::StatusCode::kUnavailable,
                   AllOf(HasSubstr(absl::StrCat("the worker of this node, at ", nodes.SocketOf(0),
                                                ", is gone, and what it had of the job with it")),
                         HasSubstr("Start it again, and resume from the newest checkpoint"))));
      EXPECT_EQ(process.Step().status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ(process.session->Leave().code(), absl::StatusCode::kUnavailable);
    });
    signaller.join();
  }
}

// Other nodes.

TEST(Node, EndsTheJobForItsProcessesWhenAnExchangeFails) {
  Nodes nodes({.nodes = 2, .processes = 1});
  const auto set_timeout = [](Process& process) {
    process.options.worker.exchange_timeout = absl::Milliseconds(500);
  };
  OnEachProcess(nodes, set_timeout, [&](Process& process) {
    if (process.number == 1) return;  // without leaving
    EXPECT_THAT(process.Step().status(),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("waiting for rank 1")));
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

constexpr uint32_t kElasticNodes = 3;

// Of three nodes, of which one may be missing, in a job with a round deadline.
void MakeElastic(Process& process) {
  process.options.worker.round_deadline = absl::Seconds(2);  // of which busy machines need some
  process.options.worker.min_workers = kElasticNodes - 1;
}

TEST(Node, ThatIsLateCatchesUpWithSeveralStepsAtOnceAndAllOfItsProcessesDo) {
  constexpr uint64_t kLateAt = 4, kMissed = 3;  // steps
  Nodes nodes({.nodes = kElasticNodes, .processes = 2});
  absl::Notification others_are_ahead, has_caught_up;
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachProcess(nodes, MakeElastic, [&](Process& process) {
    const bool is_late = process.number < 2;
    bool has_been_late = !is_late;
    while (process.session->steps() < kSteps) {
      const uint64_t step = process.session->steps();
      const bool catches_up = !has_been_late && step >= kLateAt;
      if (catches_up) others_are_ahead.WaitForNotification();
      // Not so far that their answers are no longer kept.
      if (!is_late && step >= kLateAt + kMissed) {
        if (process.number == 2 && !others_are_ahead.HasBeenNotified()) others_are_ahead.Notify();
        has_caught_up.WaitForNotification();
      }
      const auto report = process.Step();
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(process.session->steps(), step + 1 + report->steps_caught_up);
      EXPECT_EQ(report->step + 1, process.session->steps());
      if (!is_late && step == kLateAt) {
        EXPECT_THAT(report->late_ranks, Contains(0));
      }
      if (!catches_up) continue;
      has_been_late = true;
      EXPECT_GT(report->late_rounds, 0);
      // One of those that it has missed it has called for.
      EXPECT_EQ(process.session->steps(), kLateAt + kMissed);
      EXPECT_EQ(report->steps_caught_up, kMissed - 1);
      if (process.number == 0) has_caught_up.Notify();
    }
    EXPECT_TRUE(process.session->Leave().ok());
    results[process.number] = process.replica.values;
  });
  for (const std::vector<float>& values : results) EXPECT_EQ(values, results[0]);
  EXPECT_NE(results[0], TrainedOnMeans(kElasticNodes, 2));
}

TEST(Node, ThatIsGoneIsDoneWithoutUntilAnotherTakesItsPlace) {
  constexpr uint64_t kGoneAfter = 20, kTogether = 25;  // steps
  Nodes nodes({.nodes = kElasticNodes, .processes = 2});
  const auto worker = StartWorkerProcess(nodes, kElasticNodes);
  std::unique_ptr<node::Server> other;  // in its place
  absl::Notification can_go, is_replaced;
  // However long it takes to come back, the others train until then, and for some steps more.
  absl::Mutex mutex;
  uint64_t newest_step = 0, end = std::numeric_limits<uint64_t>::max();
  const auto is_at_the_end = [&](uint64_t steps) {
    absl::MutexLock lock(&mutex);
    newest_step = std::max(newest_step, steps);
    return steps >= end || ::testing::Test::HasFailure();
  };
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    auto process = std::make_unique<Process>(nodes, number);
    MakeElastic(*process);
    ASSERT_EQ(process->Join(), absl::OkStatus());
    const auto take_steps = [&](const std::function<bool(uint64_t steps)>& is_enough) {
      while (!is_enough(process->session->steps())) {
        // The others' steps take some time, or they would be far ahead when another has joined.
        if (number >= 2) absl::SleepFor(absl::Milliseconds(10));
        const auto report = process->Step();
        ASSERT_TRUE(report.ok()) << report.status();
      }
    };
    take_steps([&](uint64_t steps) { return steps == kGoneAfter; });
    if (number == 1) can_go.Notify();
    if (number == 0) {
      can_go.WaitForNotification();
      worker->Signal(SIGKILL);
      other = nodes.Start(0);
      is_replaced.Notify();
    }
    if (number < 2) {
      is_replaced.WaitForNotification();
      EXPECT_EQ(process->Step().status().code(), absl::StatusCode::kUnavailable);
    }
    for (bool is_back = number >= 2; !is_back;) {
      process = std::make_unique<Process>(nodes, number);
      MakeElastic(*process);
      ASSERT_EQ(process->Join(), absl::OkStatus());
      ASSERT_TRUE(process->session->returned());
      EXPECT_EQ(process->session->returned()->step, process->session->steps());
      EXPECT_GE(process->session->steps(), kGoneAfter);
      const absl::Status first = process->Step().status();
      // On a busy machine the others may be far ahead already.
      is_back = !absl::StrContains(first.message(), "no longer kept");
      EXPECT_TRUE(first.ok() || !is_back) << first;
    }
    if (number == 0) {
      const uint64_t together_until = process->session->steps() + kTogether;
      take_steps([&](uint64_t steps) { return steps == together_until; });
      absl::MutexLock lock(&mutex);
      end = std::max(newest_step, together_until) + 5;
    }
    take_steps(is_at_the_end);
    EXPECT_TRUE(process->session->Leave().ok());
    results[number] = process->replica.values;
  });
  for (const std::vector<float>& values : results) EXPECT_EQ(values, results[0]);
}

TEST(Node, GoesOnWithoutOneThatHasLeftIfTheOthersSuffice) {
  Nodes nodes({.nodes = kElasticNodes, .processes = 1});
  absl::Notification has_left;
  OnEachProcess(nodes, MakeElastic, [&](Process& process) {
    EXPECT_TRUE(process.Step().ok());
    if (process.number == 0) {
      EXPECT_TRUE(process.session->Leave().ok());
      return has_left.Notify();
    }
    has_left.WaitForNotification();
    if (process.number == 1) {
      ASSERT_EQ(process.Join(), absl::OkStatus());
      EXPECT_TRUE(process.session->returned());
      EXPECT_EQ(process.session->steps(), 1);
    }
    EXPECT_TRUE(process.Step().ok());
  });
}

}  // namespace
}  // namespace signpost::testing
