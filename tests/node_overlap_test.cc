// Processes of a node that hand in gradients during the backward pass: what all of them have is
// sent then, and a step of which a part was sent is finished, whoever dies.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/layout.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/nodes.h"

namespace signpost::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kSteps = 12;
constexpr uint32_t kProcesses = 2;  // of a node
constexpr size_t kLate = 0;         // the tensor whose gradient comes last
constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};

// Of more chunks than are under way at a time.
NodesOptions Options(uint32_t nodes) {
  NodesOptions options = {.nodes = nodes, .processes = kProcesses};
  options.worker.chunk_elements = 16;
  return options;
}

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// A training process: its model, and the session that it has.
class Process {
 public:
  Process(const Nodes& nodes, uint32_t number, const OptimizerOptions& optimizer = Optimizer())
      : nodes_(nodes), number_(number), optimizer_(optimizer), replica({}, number) {}

  static OptimizerOptions Optimizer() { return {.freeze_step = 5, .variance_refresh_interval = 4}; }

  void Join() {
    auto joined = Session::Join(nodes_.OptionsOf(number_), optimizer_, replica.Parameters());
    ASSERT_TRUE(joined.ok()) << joined.status();
    session_ = *std::move(joined);
  }
  // As if it had died.
  void Vanish() { session_.reset(); }

  Session& session() { return *session_; }
  const std::vector<float>& values() const { return replica.values; }

  // Begins a step, and hands in all gradients but kLate's.
  void BeginStep(const GroupRates& rates = kRates) {
    replica.gradient = GradientOf(number_, session_->steps(), replica.values.size());
    ASSERT_TRUE(session_->BeginStep({rates}).ok());
    for (size_t tensor = replica.tensors.size(); tensor-- > 0;) {
      if (tensor != kLate) HandIn(tensor);
    }
  }
  absl::StatusOr<StepReport> FinishStep() {
    HandIn(kLate);
    return session_->FinishStep();
  }
  absl::StatusOr<StepReport> Step(const GroupRates& rates = kRates,
                                  const std::function<void(std::vector<float>&)>& change = {}) {
    replica.gradient = GradientOf(number_, session_->steps(), replica.values.size());
    if (change) change(replica.gradient);
    return session_->Step(replica.Gradients(), {rates});
  }
  void StepTo(uint64_t steps) {
    while (session_->steps() < steps) {
      const absl::StatusOr<StepReport> report = Step();
      ASSERT_TRUE(report.ok()) << report.status();
    }
  }

 private:
  void HandIn(size_t tensor) {
    const absl::Status status = session_->GradientReady(tensor, replica.Gradients()[tensor]);
    ASSERT_TRUE(status.ok()) << status;
  }

  const Nodes& nodes_;
  const uint32_t number_;
  const OptimizerOptions optimizer_;
  Replica replica;
  std::unique_ptr<Session> session_;
};

// What processes end with that take all steps at once.
std::vector<float> TrainedAtOnce(uint32_t nodes_count,
                                 const OptimizerOptions& optimizer = Process::Optimizer()) {
  Nodes nodes(Options(nodes_count));
  std::vector<float> values;
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number, optimizer);
    process.Join();
    process.StepTo(kSteps);
    EXPECT_TRUE(process.session().Leave().ok());
    if (number == 0) values = process.values();
  });
  return values;
}

Layout LayoutOfTest() {
  const JobOptionsForTest job;
  std::vector<Tensor> tensors;
  for (const size_t elements : job.tensors) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(std::string(1, static_cast<char>('a' + tensors.size())));
    tensor.add_shape(elements);
  }
  JobOptions options;
  options.set_block_elements(job.worker.block_elements);
  options.set_chunk_elements(Options(1).worker.chunk_elements);
  options.set_gamma(1.35f);
  return *Layout::Create(tensors, options);
}

// Chunks that do not need kLate's gradient.
uint64_t EarlyChunks() {
  const Layout layout = LayoutOfTest();
  return layout.chunks().size() - layout.ChunksOf(kLate).end;
}

TEST(NodeOverlap, WhatAllProcessesOfANodeHaveIsSentBeforeTheStepIsFinished) {
  Nodes nodes(Options(2));
  const std::vector<float> wanted = TrainedAtOnce(2);
  const uint64_t chunks = LayoutOfTest().chunks().size();
  ASSERT_GT(EarlyChunks(), 2 * 8);  // twice the window: it is the answers that send the others
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number);
    process.Join();
    for (int step = 0; step < kSteps; ++step) {
      process.BeginStep();
      nodes.AwaitRoundsClosed(step * chunks + EarlyChunks());
      const absl::StatusOr<StepReport> report = process.FinishStep();
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->step, static_cast<uint64_t>(step));
    }
    EXPECT_EQ(process.values(), wanted);
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

TEST(NodeOverlap, NothingIsSentThatAProcessLacks) {
  Nodes nodes(Options(1));
  absl::Notification is_looked_at;
  OnEachRank(kProcesses, [&](uint32_t number) {
    Process process(nodes, number);
    process.Join();
    if (number == 0) {
      process.BeginStep();
      // Long enough for what is sent by mistake.
      absl::SleepFor(absl::Milliseconds(200));
      EXPECT_EQ(nodes.RoundsClosed(), 0);
      is_looked_at.Notify();
    } else {
      is_looked_at.WaitForNotification();
      process.BeginStep();
      nodes.AwaitRoundsClosed(EarlyChunks());
    }
    EXPECT_TRUE(process.FinishStep().ok());
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

// All but one tensor's gradients have been averaged and sent when a process dies.
struct Death {
  const char* name;
  bool is_other_waiting;  // has called for the step, or computes
};

class NodeOverlapDeathTest : public ::testing::TestWithParam<Death> {};

INSTANTIATE_TEST_SUITE_P(WhileTheOther, NodeOverlapDeathTest,
                         ::testing::Values(Death{"Computes", false}, Death{"Waits", true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(NodeOverlapDeathTest, AStepOfWhichAPartWasSentIsFinishedByTheNextCohort) {
  for (const int death : {3, 8}) {  // in the warm-up and behind the freeze
    SCOPED_TRACE(death);
    Nodes nodes(Options(2));
    const std::vector<float> wanted = TrainedAtOnce(2);
    const uint64_t sent = death * LayoutOfTest().chunks().size() + EarlyChunks();
    const size_t last_tensor = JobOptionsForTest().tensors.back();
    absl::Notification is_dead, calls;
    std::vector<std::vector<float>> values(nodes.processes());
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(nodes, number);
      process.Join();
      process.StepTo(death);
      if (number >= kProcesses) {  // of the other node, which waits
        process.StepTo(kSteps);
      } else {
        const std::vector<float> before = process.values();
        process.BeginStep();
        if (number == 0) {
          if (!GetParam().is_other_waiting) is_dead.WaitForNotification();
          calls.Notify();
          const absl::Status told = process.FinishStep().status();
          EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
          EXPECT_THAT(MessageOf(told),
                      ContainsRegex("local rank 1 .* is gone without having left"));
        } else {
          nodes.AwaitRoundsClosed(sent);
          if (GetParam().is_other_waiting) {
            calls.WaitForNotification();
            absl::SleepFor(absl::Milliseconds(50));  // for the call to get there
          }
          process.Vanish();
          is_dead.Notify();
        }
        process.Join();
        EXPECT_TRUE(process.session().returned());
        EXPECT_EQ(process.session().steps(), static_cast<uint64_t>(death));
        EXPECT_EQ(process.values(), before);
        // What was sent of the step counts, whatever its gradients are now.
        const auto report = process.Step(kRates, [&](std::vector<float>& gradient) {
          std::fill(gradient.end() - last_tensor, gradient.end(), 1e3f);
        });
        ASSERT_TRUE(report.ok()) << report.status();
        EXPECT_EQ(report->step, static_cast<uint64_t>(death));
        process.StepTo(kSteps);
      }
      EXPECT_TRUE(process.session().Leave().ok());
      values[number] = process.values();
    });
    for (const std::vector<float>& of_process : values) EXPECT_EQ(of_process, wanted);
  }
}

TEST(NodeOverlap, AnOpenStepIsFinishedAtTheRatesThatItHasBegunWith) {
  Nodes nodes(Options(1));
  const std::vector<float> wanted = TrainedAtOnce(1);
  OnEachRank(kProcesses, [&](uint32_t number) {
    Process process(nodes, number);
    process.Join();
    process.BeginStep();
    nodes.AwaitRoundsClosed(EarlyChunks());
    for (int death = 0; death < 2; ++death) {
      process.Vanish();
      process.Join();
    }
    const absl::Status not_saved = process.session().SaveState().status();
    EXPECT_EQ(not_saved.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(not_saved),
                HasSubstr("step 0 was begun by processes of which one did not finish it, and"));
    // At once, and in parts.
    const GroupRates others = {.learning_rate = 0.02, .weight_decay = 0.1};
    const absl::Status at_once = process.Step(others).status();
    process.BeginStep(others);
    for (const absl::Status& refused : {at_once, process.FinishStep().status()}) {
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(MessageOf(refused), ContainsRegex("step 0 was begun.*0.01.*finished at.*0.02"));
    }
    process.StepTo(kSteps);
    EXPECT_EQ(process.values(), wanted);
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

TEST(NodeOverlap, ProcessesWhoseRatesDifferSendNothing) {
  Nodes nodes(Options(1));
  const std::vector<float> wanted = TrainedAtOnce(1);
  OnEachRank(kProcesses, [&](uint32_t number) {
    Process process(nodes, number);
    process.Join();
    process.BeginStep({.learning_rate = 0.01 * (1 + number)});
    const absl::Status refused = process.FinishStep().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(refused), HasSubstr("has other rates than local rank 0"));
    // Nothing has come of it.
    process.BeginStep();
    EXPECT_TRUE(process.FinishStep().ok());
    process.StepTo(kSteps);
    EXPECT_EQ(process.values(), wanted);
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

TEST(NodeOverlap, AnOpenStepIsForgottenWithTheJobThatAnotherNodeHasLeft) {
  Nodes nodes(Options(2));
  const std::vector<float> wanted = TrainedAtOnce(2);
  auto* const all_have_begun = new absl::Barrier(nodes.processes());
  absl::Notification have_left[kProcesses];
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    auto process = std::make_unique<Process>(nodes, number);
    process->Join();
    process->BeginStep();
    nodes.AwaitRoundsClosed(EarlyChunks());
    if (all_have_begun->Block()) delete all_have_begun;
    if (number < kProcesses) {
      EXPECT_TRUE(process->session().Leave().ok());
      have_left[number].Notify();
    }
    for (const absl::Notification& has_left : have_left) has_left.WaitForNotification();
    process = std::make_unique<Process>(nodes, number);
    process->Join();
    EXPECT_FALSE(process->session().returned());
    process->StepTo(kSteps);
    EXPECT_EQ(process->values(), wanted);
    EXPECT_TRUE(process->session().Leave().ok());
  });
}

TEST(NodeOverlap, AJobCanBeLeftInTheMiddleOfAStep) {
  Nodes nodes(Options(1));
  for (int run = 0; run < 3; ++run) {
    auto* const all_are_there = new absl::Barrier(kProcesses);
    OnEachRank(kProcesses, [&](uint32_t number) {
      Process process(nodes, number);
      process.Join();
      EXPECT_FALSE(process.session().returned()) << "the job before was not left";
      EXPECT_EQ(process.session().steps(), 0);
      process.BeginStep();
      nodes.AwaitRoundsClosed(EarlyChunks());
      if (all_are_there->Block()) delete all_are_there;
      EXPECT_TRUE(process.session().Leave().ok());
    });
  }
}

// As when all nodes' processes are started again, which may take longer than an exchange may.
TEST(NodeOverlap, AnOpenStepOutlastsTheExchangeTimeoutWhileNobodyWaits) {
  NodesOptions options = Options(2);
  options.worker.exchange_timeout = absl::Seconds(2);
  Nodes nodes(options);
  const std::vector<float> wanted = TrainedAtOnce(2);
  std::atomic<uint32_t> missing = kProcesses;
  absl::Notification are_back;
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number);
    process.Join();
    if (number < kProcesses) {
      process.BeginStep();
      absl::SleepFor(2 * options.worker.exchange_timeout);
      process.Vanish();
      process.Join();
      if (--missing == 0) are_back.Notify();
    } else {
      are_back.WaitForNotification();
    }
    process.StepTo(kSteps);
    EXPECT_EQ(process.values(), wanted);
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

// Of 0/1 Adam's intervals too: a local step sends nothing.
TEST(NodeOverlap, LocalStepsAreTakenAsAtOnce) {
  OptimizerOptions optimizer = {.freeze_step = 4};
  optimizer.zero_one = {.var_update_scaler = 1, .local_step_scaler = 2, .local_step_clipper = 2};
  const std::vector<float> wanted = TrainedAtOnce(2, optimizer);
  Nodes nodes(Options(2));
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number, optimizer);
    process.Join();
    while (process.session().steps() < kSteps) {
      process.BeginStep();
      const absl::StatusOr<StepReport> report = process.FinishStep();
      ASSERT_TRUE(report.ok()) << report.status();
    }
    EXPECT_EQ(process.values(), wanted);
    EXPECT_TRUE(process.session().Leave().ok());
  });
}

}  // namespace
}  // namespace signpost::testing
