// The system against an independent, double-precision Algorithm 1, step by step.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/job.h"
#include "tests/onebit_adam_reference.h"
#include "tests/reference_comparison.h"

namespace signpost::testing {
namespace {

struct Case {
  uint32_t workers;
  std::vector<size_t> tensors;
  OptimizerOptions optimizer;
  double beta2 = 0.999;
  // The gradients are small at first, and the second tensor has none until step 20.
  bool changes = false;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.workers << " workers, " << c.tensors.size() << " tensors, "
       << DescribeOptions(c.optimizer);
}

class ReferenceTest : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceTest, AgreesStepByStepThroughWarmUpFreezeAndOneBitRounds) {
  JobOptionsForTest job;
  job.workers = GetParam().workers;
  job.tensors = GetParam().tensors;
  job.optimizer = GetParam().optimizer;
  job.rates.beta2 = GetParam().beta2;
  job.steps = GetParam().changes ? 100 : 24;
  const size_t elements = std::accumulate(job.tensors.begin(), job.tensors.end(), size_t{0});

  // What the reference says after each step.
  OneBitAdamReference reference(
      job.workers, job.tensors, job.worker.block_elements,
      {.beta1 = job.rates.beta1,
       .beta2 = job.rates.beta2,
       .epsilon = job.rates.epsilon,
       .gamma = job.worker.gamma,
       .variance_floor = job.optimizer.variance_floor,
       .bias_correction = job.optimizer.bias_correction,
       .freeze_step = static_cast<int>(std::min<uint64_t>(job.optimizer.freeze_step, job.steps)),
       .variance_refresh_interval = static_cast<int>(job.optimizer.variance_refresh_interval),
       .follows = job.optimizer.VarianceFollows(),
       .warm_up_codec = ReferenceCodecOf(job.optimizer.warm_up_codec),
       .codec = ReferenceCodecOf(job.optimizer.codec),
       .variance_codec = ReferenceCodecOf(job.optimizer.variance_codec)},
      ToDouble(InitialParameters(elements)));
  const auto change = [&](uint32_t, int step, std::vector<float>& gradient) {
    if (!GetParam().changes) return;
    for (size_t j = 0; j < elements; ++j) {
      const bool is_second = j >= job.tensors[0] && j < job.tensors[0] + job.tensors[1];
      if (step < 16) gradient[j] *= 0.0625f;
      if (step < 20 && is_second) gradient[j] = 0;
    }
  };
  std::vector<Vector> parameters, momenta;
  std::vector<std::vector<Vector>> errors;  // by step, by rank
  for (int step = 0; step < job.steps; ++step) {
    std::vector<Vector> gradients;
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      std::vector<float> gradient = GradientOf(rank, step, elements);
      change(rank, step, gradient);
      gradients.push_back(ToDouble(gradient));
    }
    reference.Step(gradients, job.rates.learning_rate, job.rates.weight_decay);
    parameters.push_back(reference.parameters());
    momenta.push_back(reference.momentum());
    errors.emplace_back();
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      errors.back().push_back(reference.worker_error(rank));
    }
  }
  ASSERT_GT(reference.closest_decision(), Tolerance(job.steps) / 8)
      << "fp32 may decide otherwise than the reference; choose other gradients";

  Cluster cluster({});
  absl::Mutex
      mutex;  // gtest's expectations are thread-safe; their output is easier to read one by one
  Train(
      cluster, job,
      [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        absl::MutexLock lock(&mutex);
        const double tolerance = Tolerance(step);
        const bool has_error = static_cast<uint64_t>(step) >= job.optimizer.freeze_step ||
                               job.optimizer.warm_up_codec != FLOAT32;
        size_t j = 0;
        for (uint32_t chunk = 0; chunk < worker.layout().chunks().size(); ++chunk) {
          for (float m : worker.optimizer().Momentum(chunk)) {
            ASSERT_NEAR(m, momenta[step][j], tolerance) << "momentum " << j << ", step " << step;
            if (has_error) {
              ASSERT_NEAR(worker.optimizer().error()[j], errors[step][rank][j], tolerance)
                  << "rank " << rank << "'s error " << j << ", step " << step;
            }
            ++j;
          }
        }
        for (j = 0; j < elements; ++j) {
          ASSERT_NEAR(replica.values[j], parameters[step][j], tolerance)
              << "parameter " << j << ", step " << step;
        }
      },
      change);
}

INSTANTIATE_TEST_SUITE_P(
    Workers, ReferenceTest,
    ::testing::Values(
        Case{1, {37, 8, 1, 100}, {.freeze_step = 6}}, Case{2, {37, 8, 1, 100}, {.freeze_step = 6}},
        Case{4, {37, 8, 1, 100}, {.freeze_step = 6}}, Case{5, {37, 8, 1, 100}, {.freeze_step = 6}},
        Case{2, {1}, {.freeze_step = 1}}, Case{4, {15, 16, 17}, {.freeze_step = 3}, /*beta2=*/0.9},
        Case{2, {37, 8, 1, 100}, {.freeze_step = 6, .variance_refresh_interval = 5}, /*beta2=*/0.9},
        Case{3, {50}, {.freeze_step = 3, .variance_refresh_interval = 2}},
        Case{2,
             {37, 8, 1, 100},
             {.freeze_step = 6, .variance_codec = ONE_BIT, .variance_refresh_interval = 5},
             /*beta2=*/0.9},
        Case{2, {8, 3}, {.freeze_step = 7, .warm_up_codec = INT4}},
        Case{3, {9, 2}, {.freeze_step = 5, .warm_up_codec = INT8}},
        Case{4, {9, 1}, {.freeze_step = 2, .codec = INT4}},
        Case{2,
             {7, 5},
             {.freeze_step = 6,
              .warm_up_codec = INT8,
              .variance_codec = INT8,
              .variance_refresh_interval = 5},
             /*beta2=*/0.9},
        Case{2, {50}, {.bias_correction = false, .freeze_step = 8}},
        Case{3, {50}, {.freeze_step = OptimizerOptions::kNever}},
        Case{2,
             {37, 8, 1, 40},
             {.freeze_step = 6, .variance_refresh_interval = OptimizerOptions::kAuto},
             /*beta2=*/0.97,
             /*changes=*/true},
        Case{3,
             {37, 8, 1},
             {.freeze_step = 3, .variance_refresh_interval = OptimizerOptions::kAuto}}));

}  // namespace
}  // namespace signpost::testing
