// What nodes come to whose processes train through their workers: what workers come to that train
// by themselves, on the means of these processes' gradients.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "gtest/gtest.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/node_process.h"
#include "tests/nodes.h"
#include "worker/worker.h"

namespace signpost::testing {
namespace {

class NodeTest : public ::testing::TestWithParam<uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Processes, NodeTest, ::testing::Values(1, 2, 4, 6));

TEST_P(NodeTest, TrainsAsOneWorkerWouldOnTheMeanOfItsProcessesGradients) {
  Nodes nodes({.nodes = 2, .processes = GetParam()});
  const std::vector<float> wanted = TrainedOnMeans(2, GetParam());
  for (const std::vector<float>& values : TrainAttached(nodes)) EXPECT_EQ(values, wanted);
}

struct OptimizerCase {
  const char* name;
  OptimizerOptions optimizer;
};

class NodeOptimizerTest : public ::testing::TestWithParam<OptimizerCase> {};

INSTANTIATE_TEST_SUITE_P(
    With, NodeOptimizerTest,
    ::testing::Values(
        OptimizerCase{"Adam", {}}, OptimizerCase{"Int8Momentum", {.freeze_step = 5, .codec = INT8}},
        OptimizerCase{"OneBitLamb", {.freeze_step = 5, .lamb = LambOptions()}},
        OptimizerCase{"OneBitLambAfterInt8",
                      {.freeze_step = 5, .warm_up_codec = INT8, .lamb = LambOptions()}},
        OptimizerCase{"OneBitLambInBf16",
                      {.freeze_step = 5, .codec = BFLOAT16, .lamb = LambOptions()}},
        OptimizerCase{"ACodecFromOutside", {.freeze_step = 5, .codec = CUSTOM}},
        OptimizerCase{"OneBitAdamAfterACodecFromOutside",
                      {.freeze_step = 5, .warm_up_codec = CUSTOM}},
        OptimizerCase{"OneBitAdamRefreshedInInt8",
                      {.freeze_step = 5, .variance_codec = INT8, .variance_refresh_interval = 3}},
        // Steps 5, 7, 9 and 11 end intervals: after seven it is within one.
        OptimizerCase{"ZeroOneAdam",
                      {.freeze_step = 4,
                       .zero_one = ZeroOneOptions{.var_update_scaler = 1,
                                                  .local_step_scaler = 2,
                                                  .local_step_clipper = 2}}}),
    [](const auto& info) { return info.param.name; });

TEST_P(NodeOptimizerTest, TrainsAsOneWorkerWouldOnTheMeanOfItsProcessesGradients) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const OptimizerOptions& optimizer = GetParam().optimizer;
  const std::vector<float> wanted = TrainedOnMeans(2, 2, optimizer);
  ASSERT_NE(wanted, TrainedOnMeans(2, 2)) << "the optimizer was not used";
  for (const std::vector<float>& values : TrainAttached(nodes, optimizer)) {
    EXPECT_EQ(values, wanted);
  }
}

TEST_P(NodeOptimizerTest, ResumesFromACheckpointAndFromSavedStates) {
  const OptimizerOptions& optimizer = GetParam().optimizer;
  const std::vector<float> wanted = TrainedOnMeans(2, 2, optimizer);
  const std::string directory =
      absl::StrCat(::testing::TempDir(), "/node-checkpoints-", GetParam().name, getpid());
  std::vector<std::string> states(4);
  {
    Nodes nodes({.nodes = 2, .processes = 2});
    const auto use_optimizer = [&](Process& process) { process.optimizer = optimizer; };
    OnEachProcess(nodes, use_optimizer, [&](Process& process) {
      process.StepTo(7);
      EXPECT_EQ(process.session->is_synchronised(), !optimizer.zero_one);
      EXPECT_EQ(process.session->Checkpoint(directory), absl::OkStatus());
      auto state = process.session->SaveState();
      ASSERT_TRUE(state.ok()) << state.status();
      states[process.number] = *std::move(state);
      process.StepTo(8);
      EXPECT_TRUE(process.session->Leave().ok());
    });
  }
  for (const bool from_states : {false, true}) {
    Nodes nodes({.nodes = 2, .processes = 2});
    const auto resume = [&](Process& process) {
      std::fill(process.replica.values.begin(), process.replica.values.end(), 0);
      process.optimizer = optimizer;
      if (from_states) {
        process.options.resume_state = states[process.number];
      } else {
        process.options.resume = directory;
      }
    };
    OnEachProcess(nodes, resume, [&](Process& process) {
      EXPECT_EQ(process.session->steps(), 7);
      EXPECT_EQ(process.session->resumed().checkpoint.empty(), from_states);
      process.StepTo(kSteps);
      EXPECT_EQ(process.replica.values, wanted);
      EXPECT_TRUE(process.session->Leave().ok());
    });
  }
}

TEST(Node, SendsTheBytesOfOneWorkerWhateverTheNumberOfItsProcesses) {
  const auto bytes_with = [](uint32_t processes) {
    Nodes nodes({.nodes = 1, .processes = processes});
    std::atomic<uint64_t> sent = 0;
    TrainAttached(nodes, kOptimizer, [&](Process& process) {
      auto report = process.Step();
      sent = process.session->wire_bytes().sent;
      return report;
    });
    return sent.load();
  };
  Nodes nodes({.nodes = 1, .processes = 1});
  Process worker(nodes, 0);
  worker.options = nodes.AggregatorsAs(0, 1);
  ASSERT_EQ(worker.Join(), absl::OkStatus());
  worker.StepTo(kSteps);
  const double alone = worker.session->wire_bytes().sent;
  // Pings come when they come.
  EXPECT_NEAR(bytes_with(1) / alone, 1, 0.05);
  EXPECT_NEAR(bytes_with(4) / alone, 1, 0.05);
}

TEST(Node, TakesGradientsOneByOneInAnyOrder) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  const auto in_parts = [](Process& process) -> absl::StatusOr<StepReport> {
    if (process.number == 0) return process.Step();
    Session& session = *process.session;
    process.replica.gradient =
        GradientOf(process.number, session.steps(), process.replica.values.size());
    const std::vector<Gradient> gradients = process.replica.Gradients();
    EXPECT_TRUE(session.BeginStep({kRates}).ok());
    for (size_t i = 0; i < gradients.size(); ++i) {
      const size_t tensor = (i + process.number) % gradients.size();
      EXPECT_TRUE(session.GradientReady(tensor, gradients[tensor]).ok());
    }
    return session.FinishStep();
  };
  for (const std::vector<float>& values : TrainAttached(nodes, kOptimizer, in_parts)) {
    EXPECT_EQ(values, wanted);
  }
}

// In one of 0/1 Adam's local intervals a node has parameters of its own, and so has each process
// that attaches.
TEST(Node, TakesLocalStepsAsItsWorkerWouldOnTheMeanOfItsProcessesGradients) {
  constexpr uint32_t kNodes = 2, kProcesses = 2;
  const OptimizerOptions optimizer = {
      .freeze_step = 3,
      .zero_one =
          ZeroOneOptions{.var_update_scaler = 1, .local_step_scaler = 2, .local_step_clipper = 4}};
  // What is there after so many steps. Steps 5 and 6 end with a synchronisation, and 7 to 10.
  struct After {
    std::vector<float> values;
    bool is_synchronised = true;
    double sent_bits = 0;
  };
  std::vector<std::vector<After>> wanted(kNodes, std::vector<After>(kSteps + 1));
  {
    Cluster cluster({.aggregators = 2});
    JobOptionsForTest options;
    options.workers = kNodes;
    options.optimizer = optimizer;
    options.steps = kSteps;
    options.take_step = [&](uint32_t rank, int step, Worker& worker,
                            absl::Span<const Gradient> gradients, const GroupRates& rates) {
      auto report = worker.Step(gradients, {rates});
      if (report.ok()) wanted[rank][step + 1].sent_bits = report->sent_bits;
      return report;
    };
    Train(
        cluster, options,
        [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
          wanted[rank][step + 1].values = replica.values;
          wanted[rank][step + 1].is_synchronised = worker.is_synchronised();
        },
        [&](uint32_t rank, int step, std::vector<float>& gradient) {
          gradient = MeanGradient(rank, kProcesses, step, gradient.size());
        });
  }
  ASSERT_NE(wanted[0][9].values, wanted[1][9].values);

  Nodes nodes({.nodes = kNodes, .processes = kProcesses});
  const auto use_optimizer = [&](Process& process) { process.optimizer = optimizer; };
  OnEachProcess(nodes, use_optimizer, [&](Process& process) {
    const std::vector<After>& wanted_here = wanted[process.number / kProcesses];
    bool has_died = process.number != 1;  // the others of its node attach again
    while (process.session->steps() < kSteps) {
      const auto report = process.Step();
      if (process.number == 0 && absl::IsAborted(report.status())) {
        ASSERT_EQ(process.Join(), absl::OkStatus());
        continue;
      }
      ASSERT_TRUE(report.ok()) << report.status();
      const uint64_t steps = process.session->steps();
      EXPECT_EQ(process.replica.values, wanted_here[steps].values) << "after " << steps;
      EXPECT_EQ(process.session->is_synchronised(), wanted_here[steps].is_synchronised)
          << "after " << steps;
      EXPECT_EQ(process.session->is_synchronised(), steps < 6 || steps == 7 || steps == 11);
      EXPECT_EQ(report->codec == CODEC_UNSPECIFIED, !wanted_here[steps].is_synchronised);
      EXPECT_EQ(report->sent_bits, wanted_here[steps].sent_bits);
      if (has_died || steps != 9) continue;
      has_died = true;
      std::fill(process.replica.values.begin(), process.replica.values.end(), -1);
      ASSERT_EQ(process.Join(), absl::OkStatus());
      EXPECT_EQ(process.session->steps(), 9);
      EXPECT_FALSE(process.session->is_synchronised());
      EXPECT_EQ(process.replica.values, wanted_here[9].values);
    }
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

TEST(Node, TrainsSeveralJobsAtATime) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  OnEachRank(8, [&](uint32_t i) {
    Process process(nodes, i % 4);
    process.options.worker.job = absl::StrCat("job ", i / 4);
    ASSERT_EQ(process.Join(), absl::OkStatus());
    process.StepTo(kSteps);
    EXPECT_TRUE(process.session->Leave().ok());
    EXPECT_EQ(process.replica.values, wanted);
  });
}

TEST(Node, BeginsWithTheValuesOfRank0IfAsked) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = Process(nodes, 0).replica.values;
  const auto differ = [](Process& process) {
    for (float& value : process.replica.values) value += process.number;
    process.options.start_from_rank_0 = true;
  };
  OnEachProcess(nodes, differ, [&](Process& process) {
    EXPECT_EQ(process.replica.values, wanted);
    EXPECT_TRUE(process.session->Leave().ok());
  });
}

}  // namespace
}  // namespace signpost::testing
