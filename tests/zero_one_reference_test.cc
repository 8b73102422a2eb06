// 0/1 Adam against an independent, double-precision Algorithm 1, step by step.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/job.h"
#include "tests/reference_comparison.h"
#include "tests/zero_one_adam_reference.h"

namespace signpost::testing {
namespace {

struct Case {
  uint32_t workers;
  std::vector<size_t> tensors;
  OptimizerOptions optimizer;
  std::vector<double> learning_rates = {0.01};  // of one step after the other, and again
  GroupRates rates = {.weight_decay = 0.1};
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.workers << " workers, " << c.tensors.size() << " tensors, "
       << DescribeOptions(c.optimizer);
}

// What the reference has after a step.
struct After {
  std::vector<Vector> parameters, momenta, sums, errors;  // by rank
  Vector anchor;
  bool is_synchronised;
  double sent_bits;
};

// Of what is compressed.
int BitsOfCode(Codec codec) {
  if (codec == FLOAT32) return 0;
  return codec == INT8 ? 8 : (codec == INT4 ? 4 : 1);
}

class ZeroOneReferenceTest : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroOneReferenceTest, AgreesStepByStepThroughUpdatesOneBitRoundsAndLocalSteps) {
  JobOptionsForTest job;
  job.workers = GetParam().workers;
  job.tensors = GetParam().tensors;
  job.optimizer = GetParam().optimizer;
  job.rates = GetParam().rates;
  job.steps = 40;
  const ZeroOneOptions& zero_one = *job.optimizer.zero_one;
  const size_t elements = std::accumulate(job.tensors.begin(), job.tensors.end(), size_t{0});
  const auto rates_of = [&](int step) {
    GroupRates rates = job.rates;
    rates.learning_rate = GetParam().learning_rates[step % GetParam().learning_rates.size()];
    return rates;
  };

  const auto freeze_step = static_cast<int>(job.optimizer.freeze_step);
  ZeroOneAdamReference reference(
      job.workers, job.tensors, job.worker.block_elements,
      {.beta1 = job.rates.beta1,
       .beta2 = job.rates.beta2,
       .epsilon = job.rates.epsilon,
       .gamma = job.worker.gamma,
       .variance_floor = job.optimizer.variance_floor,
       .bias_correction = job.optimizer.bias_correction,
       .var_freeze_step = freeze_step,
       .var_update_scaler = static_cast<int>(zero_one.var_update_scaler),
       .local_step_scaler = zero_one.local_step_scaler == 0
                                ? freeze_step
                                : static_cast<int>(zero_one.local_step_scaler),
       .local_step_clipper = static_cast<int>(zero_one.local_step_clipper),
       .codec = ReferenceCodecOf(job.optimizer.codec),
       .variance_codec = ReferenceCodecOf(job.optimizer.variance_codec)},
      ToDouble(InitialParameters(elements)));
  std::vector<After> wanted;  // by step
  for (int step = 0; step < job.steps; ++step) {
    std::vector<Vector> gradients;
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      gradients.push_back(ToDouble(GradientOf(rank, step, elements)));
    }
    reference.Step(gradients, rates_of(step).learning_rate, job.rates.weight_decay);
    After& after = wanted.emplace_back();
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      after.parameters.push_back(reference.parameters(rank));
      after.momenta.push_back(reference.momentum(rank));
      after.sums.push_back(reference.accumulated(rank));
      after.errors.push_back(reference.worker_error(rank));
    }
    after.anchor = reference.anchor();
    after.is_synchronised = reference.is_synchronised();
    after.sent_bits = reference.sent_bits();
  }
  ASSERT_GT(reference.closest_decision(), Tolerance(job.steps) / 8)
      << "fp32 may decide otherwise than the reference; choose other gradients";

  const int widest =
      std::max(BitsOfCode(job.optimizer.codec), BitsOfCode(job.optimizer.variance_codec));
  Cluster cluster({});
  absl::Mutex mutex;
  std::vector<std::vector<float>> of_step(job.steps);  // some rank's, where all have the same
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto joined = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(joined.ok()) << joined.status();
    Worker& worker = **joined;
    for (int step = 0; step < job.steps; ++step) {
      replica.gradient = GradientOf(rank, step, elements);
      const auto report = worker.Step(replica.Gradients(), {rates_of(step)});
      ASSERT_TRUE(report.ok()) << report.status();
      absl::MutexLock lock(&mutex);
      const After& after = wanted[step];
      const double tolerance = Tolerance(step);
      ASSERT_EQ(report->step, static_cast<uint64_t>(step));
      ASSERT_EQ(worker.steps(), static_cast<uint64_t>(step + 1));
      ASSERT_EQ(worker.is_synchronised(), after.is_synchronised) << "step " << step;
      ASSERT_EQ(report->codec == CODEC_UNSPECIFIED, !after.is_synchronised) << "step " << step;
      const OneBitAdam& optimizer = worker.optimizer();
      const HostFloats anchor = optimizer.anchor(), sum = optimizer.local_sum();
      ASSERT_EQ(anchor.size(), after.is_synchronised ? 0 : elements) << "step " << step;
      ASSERT_EQ(sum.size(), after.is_synchronised ? 0 : elements) << "step " << step;
      size_t j = 0;
      for (uint32_t chunk = 0; chunk < worker.layout().chunks().size(); ++chunk) {
        for (float m : optimizer.Momentum(chunk)) {
          ASSERT_NEAR(m, after.momenta[rank][j], tolerance)
              << "momentum " << j << ", step " << step;
          ++j;
        }
      }
      for (j = 0; j < elements; ++j) {
        ASSERT_NEAR(replica.values[j], after.parameters[rank][j], tolerance)
            << "rank " << rank << "'s parameter " << j << ", step " << step;
        ASSERT_NEAR(optimizer.error()[j], after.errors[rank][j], tolerance)
            << "rank " << rank << "'s error " << j << ", step " << step;
        if (after.is_synchronised) continue;
        ASSERT_NEAR(anchor[j], after.anchor[j], tolerance) << "anchor " << j << ", step " << step;
        ASSERT_NEAR(sum[j], after.sums[rank][j], tolerance) << "sum " << j << ", step " << step;
      }
      if (!after.is_synchronised) continue;
      if (of_step[step].empty()) of_step[step] = replica.values;
      ASSERT_EQ(replica.values, of_step[step]) << "step " << step;
      // A block has room for a multiple of eight elements.
      const double bits = after.sent_bits / (step + 1);
      ASSERT_GE(report->sent_bits, bits * (1 - 1e-9));
      ASSERT_LE(report->sent_bits, bits + 8.0 * widest * job.tensors.size() / elements);
    }
    EXPECT_TRUE(worker.Leave().ok());
  });
}

constexpr ZeroOneOptions kShort = {
    .var_update_scaler = 2, .local_step_scaler = 4, .local_step_clipper = 5};
const std::vector<double> kFalling = {0.02, 0.01, 0.005};

INSTANTIATE_TEST_SUITE_P(
    Workers, ZeroOneReferenceTest,
    ::testing::Values(
        Case{1, {37, 8, 1, 100}, {.freeze_step = 12, .zero_one = kShort}},
        Case{2, {37, 8, 1, 100}, {.freeze_step = 12, .zero_one = kShort}},
        Case{4, {37, 8, 2, 101}, {.freeze_step = 12, .zero_one = kShort}},
        Case{2, {50}, {.freeze_step = 12, .zero_one = kShort}, kFalling},
        Case{3, {50}, {.freeze_step = 12, .zero_one = kShort}, {0.01, 0, 0, 0, 0, 0, 0, 0, 0}},
        Case{2, {15, 16, 17}, {.freeze_step = 12, .variance_codec = ONE_BIT, .zero_one = kShort}},
        Case{3, {50}, {.freeze_step = 9, .variance_codec = ONE_BIT, .zero_one = kShort}},
        // In these two there are elements that were taken for zero in all updates of the variance.
        Case{2, {32}, {.freeze_step = 1, .variance_codec = INT4, .zero_one = kShort}},
        Case{3, {26}, {.freeze_step = 4, .variance_codec = INT4, .zero_one = kShort}},
        Case{2, {8, 3}, {.freeze_step = 12, .variance_codec = INT8, .zero_one = kShort}},
        Case{2, {7, 2}, {.freeze_step = 12, .codec = INT4, .zero_one = kShort}},
        Case{2, {1}, {.freeze_step = 1, .zero_one = kShort}},
        Case{2, {15, 16, 17}, {.bias_correction = false, .freeze_step = 8, .zero_one = kShort}},
        Case{4, {15, 16, 17}, {.freeze_step = 20, .zero_one = ZeroOneOptions{}}, kFalling},
        Case{2,
             {15, 16, 17},
             {.freeze_step = 10, .variance_floor = 0, .zero_one = kShort},
             kFalling,
             {.weight_decay = 0, .beta1 = 0.8, .beta2 = 0.9}}));

// What is said of it: with blocks as jobs have them, and a freeze at a fifth of all steps.
TEST(ZeroOneAdam, SendsAtMostSixTenthsOfABitFromTheFreezeOnUnlessToldOtherwise) {
  constexpr int kFreezeStep = 200, kSteps = 1000;
  JobOptionsForTest job;
  job.workers = 1;
  job.tensors = {8192};
  job.worker.block_elements = WorkerOptions().block_elements;
  job.worker.chunk_elements = WorkerOptions().block_elements;
  job.optimizer = {.freeze_step = kFreezeStep, .zero_one = ZeroOneOptions()};
  Cluster cluster({});
  Replica replica(job, /*rank=*/0);
  WorkerOptions options = job.worker;
  options.world_size = job.workers;
  const auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
  ASSERT_TRUE(worker.ok()) << worker.status();
  double bits_before = 0, bits = 0;  // by parameter, of all steps so far
  for (int step = 0; step < kSteps || !(*worker)->is_synchronised(); ++step) {
    replica.gradient = GradientOf(/*rank=*/0, step, job.tensors[0]);
    const auto report = (*worker)->Step(replica.Gradients(), {job.rates});
    ASSERT_TRUE(report.ok()) << report.status();
    bits = report->sent_bits * (step + 1);
    if (step + 1 == kFreezeStep) bits_before = bits;
  }
  const double of_step = (bits - bits_before) / ((*worker)->steps() - kFreezeStep);
  EXPECT_GT(of_step, 0.4);
  EXPECT_LE(of_step, 0.6);
}

}  // namespace
}  // namespace signpost::testing
