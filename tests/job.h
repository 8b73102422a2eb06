// A small training job for tests: workers with fixed gradients on a thread each, over a Cluster.

#ifndef SIGNPOST_TESTS_JOB_H_
#define SIGNPOST_TESTS_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"
#include "tests/cluster.h"
#include "worker/worker.h"

namespace signpost::testing {

// How a rank takes a step.
using TakeStep = std::function<absl::StatusOr<StepReport>(uint32_t rank, int step, Worker& worker,
                                                          absl::Span<const Gradient> gradients,
                                                          const GroupRates& rates)>;

struct JobOptionsForTest {
  uint32_t workers = 4;
  std::vector<size_t> tensors = {37, 8, 1, 300, 64};  // elements of each
  WorkerOptions worker = {.job = "test",
                          .block_elements = 16,
                          .chunk_elements = 64,
                          .join_timeout = absl::Seconds(30),
                          .exchange_timeout = absl::Seconds(30)};
  OptimizerOptions optimizer = {.freeze_step = 5};
  int steps = 12;
  GroupRates rates = {.learning_rate = 0.01, .weight_decay = 0.1};
  TakeStep take_step;  // null: Worker::Step
  // Which GPU has a rank's replica, null for the host. Null: the host has all.
  std::function<kernels::cuda::Gpu*(uint32_t rank)> gpu_of;
  GradientType gradient_type_on_gpu = GradientType::kFloat32;
};

// Has codecs that are CUSTOM be the one in client/examples, which the test needs among its data.
void UseExampleCodec(WorkerOptions& options);

// 1-bit Adam, 1-bit LAMB and 0/1 Adam, each with each codec once the variance is frozen
// ("OneBitLambInInt8") and for what brings it up to date ("OneBitLambWithVariancesFromInt8"), and
// the former two with each before the freeze ("OneBitLambAfterInt8").
struct NamedOptimizer {
  std::string name;
  OptimizerOptions options;
};
std::vector<NamedOptimizer> EachOptimizerWithEachCodec(uint64_t freeze_step,
                                                       const ZeroOneOptions& zero_one);

// What a rank's gradient is in a step: normally distributed around a drift that is the same for
// all.
std::vector<float> GradientOf(uint32_t rank, int step, size_t elements);

// Parameters before the first step, the same on all ranks.
std::vector<float> InitialParameters(size_t elements);

// A rank's replica, with spans into it as the worker wants them.
class Replica {
 public:
  Replica(const JobOptionsForTest& options, uint32_t rank);
  ~Replica();

  // What the rank joins with.
  WorkerOptions Options() const;
  std::vector<Parameter> Parameters();
  std::vector<Gradient> Gradients() const;

  // On a GPU `values` and `gradient` are copies. A step is between these: the first copies the
  // gradient there, and has the work of the worker, or the session, follow on the same stream, in
  // every step another one; neither waits for anything. GetValues waits, and copies values from
  // there.
  template <class Trained>
  void BeforeStep(Trained& trained) {
    if (on_gpu_ == nullptr) return;
    EXPECT_TRUE(trained.SetStream(NextStream()).ok());
    PutGradient();
  }
  void GetValues();
  kernels::cuda::Stream stream() const;  // the step's

  const std::vector<size_t> tensors;
  std::vector<float> values;
  std::vector<float> gradient;

 private:
  struct OnGpu;

  kernels::cuda::Stream NextStream();
  void PutGradient();

  WorkerOptions worker_;
  std::unique_ptr<OnGpu> on_gpu_;  // null: on the host
};

// Called on each rank's thread after each step.
using AfterStep =
    std::function<void(uint32_t rank, int step, const Replica& replica, Worker& worker)>;
// May change the gradient that a rank is about to use.
using BeforeStep = std::function<void(uint32_t rank, int step, std::vector<float>& gradient)>;

// A worker's channels to all shards.
using Connect = std::function<std::vector<std::unique_ptr<Channel>>()>;

// Trains, expecting every step to succeed. Returns the replicas' parameters by rank.
std::vector<std::vector<float>> Train(const Connect& connect, const JobOptionsForTest& options,
                                      const AfterStep& after_step = nullptr,
                                      const BeforeStep& before_step = nullptr);
std::vector<std::vector<float>> Train(Cluster& cluster, const JobOptionsForTest& options,
                                      const AfterStep& after_step = nullptr,
                                      const BeforeStep& before_step = nullptr);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_JOB_H_
