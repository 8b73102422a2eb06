#include "tests/node_process.h"

#include <algorithm>
#include <utility>

#include "gtest/gtest.h"
#include "tests/cluster.h"

namespace signpost::testing {

absl::Status Process::Join() {
  session.reset();
  auto joined = Session::Join(options, optimizer, replica.Parameters());
  if (joined.ok()) session = *std::move(joined);
  return joined.status();
}

absl::StatusOr<StepReport> Process::Step() {
  replica.gradient = GradientOf(number, session->steps(), replica.values.size());
  return session->Step(replica.Gradients(), {kRates});
}

void Process::StepTo(uint64_t steps) {
  while (session->steps() < steps) {
    const absl::StatusOr<StepReport> report = Step();
    ASSERT_TRUE(report.ok()) << report.status();
  }
}

void OnEachProcess(const Nodes& nodes, const std::function<void(Process& process)>& body) {
  OnEachProcess(
      nodes, [](Process&) {}, body);
}

void OnEachProcess(const Nodes& nodes, const std::function<void(Process& process)>& change,
                   const std::function<void(Process& process)>& body) {
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(nodes, number);
    change(process);
    ASSERT_EQ(process.Join(), absl::OkStatus());
    body(process);
  });
}

std::vector<std::vector<float>> TrainAttached(
    const Nodes& nodes, const OptimizerOptions& optimizer,
    const std::function<absl::StatusOr<StepReport>(Process& process)>& take_step) {
  std::vector<std::vector<float>> results(nodes.processes());
  const auto use_optimizer = [&](Process& process) { process.optimizer = optimizer; };
  OnEachProcess(nodes, use_optimizer, [&](Process& process) {
    EXPECT_FALSE(process.session->returned());
    while (process.session->steps() < kSteps) {
      const uint64_t step = process.session->steps();
      const absl::StatusOr<StepReport> report = take_step(process);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->step, step);
    }
    EXPECT_TRUE(process.session->Leave().ok());
    results[process.number] = process.replica.values;
  });
  return results;
}

std::vector<float> MeanGradient(uint32_t node, uint32_t processes, int step, size_t elements) {
  std::vector<float> total;
  for (uint32_t group = 0; group < processes; group += 4) {
    std::vector<float> sum;
    for (uint32_t i = group; i < std::min(group + 4, processes); ++i) {
      const std::vector<float> gradient = GradientOf(node * processes + i, step, elements);
      if (sum.empty()) {
        sum = gradient;
      } else {
        for (size_t j = 0; j < elements; ++j) sum[j] += gradient[j];
      }
    }
    if (total.empty()) {
      total = sum;
    } else {
      for (size_t j = 0; j < elements; ++j) total[j] += sum[j];
    }
  }
  for (float& value : total) value *= 1.0f / processes;
  return total;
}

std::vector<float> TrainedOnMeans(uint32_t nodes, uint32_t processes,
                                  const OptimizerOptions& optimizer) {
  Cluster cluster({.aggregators = 2});
  JobOptionsForTest options;
  options.workers = nodes;
  options.worker = WorkerOfNodes();
  options.optimizer = optimizer;
  options.steps = kSteps;
  return Train(cluster, options, /*after_step=*/nullptr,
               [&](uint32_t rank, int step, std::vector<float>& gradient) {
                 gradient = MeanGradient(rank, processes, step, gradient.size());
               })[0];
}

}  // namespace signpost::testing
