// Processes that train through the worker of their node, and what they come to. Here they are
// threads; node_run_test.cc has real ones.

#ifndef SIGNPOST_TESTS_NODE_PROCESS_H_
#define SIGNPOST_TESTS_NODE_PROCESS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session.h"
#include "tests/job.h"
#include "tests/nodes.h"

namespace signpost::testing {

inline constexpr int kSteps = 12;
inline constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};
inline constexpr OptimizerOptions kOptimizer = {.freeze_step = 5, .variance_refresh_interval = 4};

// A training process: its replica, and its session once it has joined.
struct Process {
  Process(const Nodes& nodes, uint32_t number, const JobOptionsForTest& job = {})
      : number(number), options(nodes.OptionsOf(number)), replica(job, number) {}

  // A session that it has ends before, as if it had died.
  absl::Status Join();
  // With its GradientOf the step.
  absl::StatusOr<StepReport> Step();
  void StepTo(uint64_t steps);

  const uint32_t number;  // among those of all nodes
  SessionOptions options;
  OptimizerOptions optimizer = kOptimizer;
  Replica replica;
  std::unique_ptr<Session> session;
};

// Calls body on a thread for each process of the nodes, once it has joined; with what `change` has
// made of it before.
void OnEachProcess(const Nodes& nodes, const std::function<void(Process& process)>& body);
void OnEachProcess(const Nodes& nodes, const std::function<void(Process& process)>& change,
                   const std::function<void(Process& process)>& body);

// Every process joins, trains to the end and leaves. Their parameters.
std::vector<std::vector<float>> TrainAttached(
    const Nodes& nodes, const OptimizerOptions& optimizer = kOptimizer,
    const std::function<absl::StatusOr<StepReport>(Process& process)>& take_step = &Process::Step);

// The mean of the gradients of a node's processes.
std::vector<float> MeanGradient(uint32_t node, uint32_t processes, int step, size_t elements);

// Parameters after kSteps of workers that have the means of the processes' gradients.
std::vector<float> TrainedOnMeans(uint32_t nodes, uint32_t processes,
                                  const OptimizerOptions& optimizer = kOptimizer);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_NODE_PROCESS_H_
