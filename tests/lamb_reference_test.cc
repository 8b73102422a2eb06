// 1-bit LAMB against an independent, double-precision Algorithm 2, step by step.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <ostream>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/job.h"
#include "tests/onebit_lamb_reference.h"
#include "tests/reference_comparison.h"

namespace signpost::testing {
namespace {

struct Case {
  uint32_t workers;
  std::vector<size_t> tensors;
  OptimizerOptions optimizer;
  GroupRates rates = {.learning_rate = 0.01, .weight_decay = 0.1};
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.workers << " workers, " << c.tensors.size() << " tensors, "
       << DescribeOptions(c.optimizer);
}

// What the reference has after a step.
struct After {
  Vector parameters, momentum, fresh_variance;
  std::vector<Vector> errors;                 // by rank
  std::vector<double> coefficients, factors;  // by tensor
};

// What a tensor's learning rate was multiplied by.
double CoefficientOf(const TensorScale& scale, const OptimizerOptions& optimizer, bool one_bit) {
  if (!one_bit) return scale.ratio();
  if (scale.weight() == 0) return scale.factor();
  return scale.average() / (optimizer.bias_correction ? scale.weight() : 1) * scale.factor();
}

class LambReferenceTest : public ::testing::TestWithParam<Case> {};

TEST_P(LambReferenceTest, AgreesStepByStepThroughWarmUpFreezeAndOneBitRounds) {
  JobOptionsForTest job;
  job.workers = GetParam().workers;
  job.tensors = GetParam().tensors;
  job.optimizer = GetParam().optimizer;
  job.rates = GetParam().rates;
  job.steps = 24;
  const LambOptions& lamb = *job.optimizer.lamb;
  const size_t elements = std::accumulate(job.tensors.begin(), job.tensors.end(), size_t{0});

  OneBitLambReference reference(
      job.workers, job.tensors, job.worker.block_elements,
      {.beta1 = job.rates.beta1,
       .beta2 = job.rates.beta2,
       .epsilon = job.rates.epsilon,
       .gamma = job.worker.gamma,
       .variance_floor = job.optimizer.variance_floor,
       .bias_correction = job.optimizer.bias_correction,
       .freeze_step = static_cast<int>(std::min<uint64_t>(job.optimizer.freeze_step, job.steps)),
       .variance_refresh_interval = static_cast<int>(job.optimizer.variance_refresh_interval),
       .warm_up_codec = ReferenceCodecOf(job.optimizer.warm_up_codec),
       .codec = ReferenceCodecOf(job.optimizer.codec),
       .variance_codec = ReferenceCodecOf(job.optimizer.variance_codec),
       .max_coeff = lamb.max_coeff,
       .min_coeff = lamb.min_coeff,
       .coeff_beta = lamb.coeff_beta,
       .factor_max = lamb.factor_max,
       .factor_min = lamb.factor_min,
       .factor_threshold = lamb.factor_threshold},
      ToDouble(InitialParameters(elements)));
  std::vector<After> wanted;  // by step
  for (int step = 0; step < job.steps; ++step) {
    std::vector<Vector> gradients;
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      gradients.push_back(ToDouble(GradientOf(rank, step, elements)));
    }
    reference.Step(gradients, job.rates.learning_rate, job.rates.weight_decay);
    After& after = wanted.emplace_back(
        After{reference.parameters(), reference.momentum(), reference.fresh_variance()});
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      after.errors.push_back(reference.worker_error(rank));
    }
    for (size_t tensor = 0; tensor < job.tensors.size(); ++tensor) {
      after.coefficients.push_back(reference.coefficient(tensor));
      after.factors.push_back(reference.factor(tensor));
    }
  }
  ASSERT_GT(reference.closest_decision(), Tolerance(job.steps) / 8)
      << "fp32 may decide otherwise than the reference; choose other gradients";

  Cluster cluster({});
  absl::Mutex mutex;
  std::map<int, uint32_t> crcs;  // of parameters, by step
  Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
    absl::MutexLock lock(&mutex);
    const After& after = wanted[step];
    const double tolerance = Tolerance(step);
    const bool one_bit = static_cast<uint64_t>(step) >= job.optimizer.freeze_step;
    const HostFloats fresh = worker.optimizer().fresh_variance();
    ASSERT_EQ(fresh.size(), one_bit ? elements : 0);
    size_t j = 0;
    for (uint32_t chunk = 0; chunk < worker.layout().chunks().size(); ++chunk) {
      for (float m : worker.optimizer().Momentum(chunk)) {
        ASSERT_NEAR(m, after.momentum[j], tolerance) << "momentum " << j << ", step " << step;
        if (one_bit) {
          ASSERT_NEAR(worker.optimizer().error()[j], after.errors[rank][j], tolerance)
              << "rank " << rank << "'s error " << j << ", step " << step;
          ASSERT_NEAR(fresh[j], after.fresh_variance[j],
                      2 * FactorTolerance(step) * after.fresh_variance[j])
              << "fresh variance " << j << ", step " << step;
        }
        ++j;
      }
    }
    for (const TensorScale& scale : worker.optimizer().Scales()) {
      const double coefficient = after.coefficients[scale.tensor()];
      const double factor = after.factors[scale.tensor()];
      ASSERT_NEAR(scale.factor(), factor, FactorTolerance(step) * factor)
          << "factor of tensor " << scale.tensor() << ", step " << step;
      ASSERT_NEAR(CoefficientOf(scale, job.optimizer, one_bit), coefficient,
                  FactorTolerance(step) * coefficient)
          << "coefficient of tensor " << scale.tensor() << ", step " << step;
    }
    for (j = 0; j < elements; ++j) {
      ASSERT_NEAR(replica.values[j], after.parameters[j], tolerance)
          << "parameter " << j << ", step " << step;
    }
    const uint32_t crc = worker.ParametersCrc32c();
    ASSERT_EQ(crc, crcs.try_emplace(step, crc).first->second)
        << "rank " << rank << " and another have other parameters after step " << step;
  });
}

constexpr LambOptions kDefaults;
// Loose where the defaults clip, and the other way round.
constexpr LambOptions kOthers = {.max_coeff = 0.5,
                                 .min_coeff = 0.2,
                                 .coeff_beta = 0.5,
                                 .factor_max = 1.2,
                                 .factor_min = 0.9,
                                 .factor_threshold = 0.5};

INSTANTIATE_TEST_SUITE_P(
    Workers, LambReferenceTest,
    ::testing::Values(
        Case{1, {37, 8, 1, 100}, {.freeze_step = 6, .lamb = kDefaults}},
        Case{2, {37, 8, 1, 100}, {.freeze_step = 6, .lamb = kDefaults}},
        Case{4, {37, 8, 1, 100}, {.freeze_step = 6, .lamb = kDefaults}},
        Case{2, {37, 8, 1, 100}, {.freeze_step = 6, .lamb = kOthers}},
        Case{2, {1}, {.freeze_step = 1, .lamb = kDefaults}},
        Case{4, {15, 16, 17}, {.freeze_step = 3, .lamb = kDefaults}, {0.01, 0.1, 0.9, 0.9}},
        Case{4, {15, 16, 17}, {.freeze_step = 3, .lamb = kOthers}, {0.01, 0, 0.9, 0.9}},
        Case{2, {50}, {.bias_correction = false, .freeze_step = 8, .lamb = kDefaults}},
        Case{3, {37, 8, 1, 100}, {.freeze_step = 6, .codec = FLOAT32, .lamb = kDefaults}},
        Case{2,
             {15, 16, 17},
             {.freeze_step = 3, .codec = FLOAT32, .lamb = kOthers},
             {0.01, 0.1, 0.9, 0.9}},
        Case{2,
             {37, 8, 1, 100},
             {.freeze_step = 6, .variance_refresh_interval = 5, .lamb = kDefaults},
             {0.01, 0.1, 0.9, 0.9}},
        Case{3, {9, 2}, {.freeze_step = 5, .warm_up_codec = INT8, .lamb = kDefaults}},
        Case{2,
             {8, 3},
             {.freeze_step = 4,
              .warm_up_codec = INT4,
              .variance_codec = INT4,
              .variance_refresh_interval = 6,
              .lamb = kDefaults},
             {0.01, 0.1, 0.9, 0.9}},
        Case{3, {50}, {.freeze_step = OptimizerOptions::kNever, .lamb = kDefaults}}));

}  // namespace
}  // namespace signpost::testing
