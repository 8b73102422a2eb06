// Optimizers as DeepSpeed has them, as far as docs/algorithms.md says that they are followed: one
// scale for each tensor, neither bias correction nor floor, and a first step of which nothing is
// left.

#include <gtest/gtest.h>

#include <numeric>

#include "absl/synchronization/mutex.h"
#include "client/session.h"
#include "proto/layout.h"
#include "tests/deepspeed_zero_one_adam_reference.h"
#include "tests/job.h"
#include "tests/onebit_adam_reference.h"
#include "tests/onebit_lamb_reference.h"
#include "tests/reference_comparison.h"

namespace signpost::testing {
namespace {

const std::vector<size_t> kTensors = {37, 8, 2, 100};
constexpr size_t kElements = 147;
constexpr uint32_t kWholeTensor = 104;  // elements of a block
constexpr double kLearningRate = 0.01, kWeightDecay = 0.1;

std::vector<Vector> GradientsOf(uint32_t workers, int step) {
  std::vector<Vector> gradients;
  for (uint32_t rank = 0; rank < workers; ++rank) {
    gradients.push_back(ToDouble(GradientOf(rank, step, kElements)));
  }
  return gradients;
}

// By step and rank.
using Trajectory = std::vector<std::vector<Vector>>;

class DeepSpeedTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  DeepSpeedTest() {
    job_.workers = GetParam();
    job_.tensors = kTensors;
    job_.worker.block_elements = job_.worker.chunk_elements = kWholeTensor;
    job_.worker.gamma = 1;
    job_.optimizer = {
        .bias_correction = false, .freeze_step = 7, .variance_floor = 0, .as_deepspeed = true};
    job_.rates = {.learning_rate = kLearningRate, .weight_decay = kWeightDecay};
    job_.steps = 32;
  }

  // Of a reference that knows of no step that is lost.
  template <class Reference>
  Trajectory Expected(Reference reference) {
    Trajectory expected = {
        std::vector<Vector>(job_.workers, ToDouble(InitialParameters(kElements)))};
    for (int step = 1; step < job_.steps; ++step) {
      reference.Step(GradientsOf(job_.workers, step), kLearningRate, kWeightDecay);
      expected.emplace_back(job_.workers, reference.parameters());
    }
    EXPECT_GT(reference.closest_decision(), Tolerance(job_.steps) / 8);
    return expected;
  }

  void ExpectTrajectory(const Trajectory& expected) {
    Cluster cluster({});
    absl::Mutex mutex;
    Train(cluster, job_, [&](uint32_t rank, int step, const Replica& replica, Worker&) {
      absl::MutexLock lock(&mutex);
      for (size_t j = 0; j < kElements; ++j) {
        ASSERT_NEAR(replica.values[j], expected[step][rank][j], Tolerance(step))
            << "rank " << rank << "'s parameter " << j << ", step " << step;
      }
    });
  }

  // Of a reference that begins with the step after the first.
  int FreezeStepWithoutTheFirst() const { return static_cast<int>(job_.optimizer.freeze_step) - 1; }

  JobOptionsForTest job_;
};

TEST_P(DeepSpeedTest, OneBitAdam) {
  ExpectTrajectory(Expected(OneBitAdamReference(job_.workers, kTensors, kWholeTensor,
                                                {.gamma = 1,
                                                 .variance_floor = 0,
                                                 .bias_correction = false,
                                                 .freeze_step = FreezeStepWithoutTheFirst()},
                                                ToDouble(InitialParameters(kElements)))));
}

TEST_P(DeepSpeedTest, OneBitLamb) {
  job_.optimizer.lamb.emplace();
  ExpectTrajectory(Expected(OneBitLambReference(job_.workers, kTensors, kWholeTensor,
                                                {.gamma = 1,
                                                 .variance_floor = 0,
                                                 .bias_correction = false,
                                                 .freeze_step = FreezeStepWithoutTheFirst()},
                                                ToDouble(InitialParameters(kElements)))));
}

TEST_P(DeepSpeedTest, ZeroOneAdam) {
  constexpr int kVarFreezeStep = 11;
  job_.optimizer.freeze_step = kVarFreezeStep + 1;
  job_.optimizer.zero_one = {
      .var_update_scaler = 3, .local_step_scaler = 5, .local_step_clipper = 3};
  DeepSpeedZeroOneAdamReference reference(job_.workers, kTensors,
                                          {.var_freeze_step = kVarFreezeStep,
                                           .var_update_scaler = 3,
                                           .local_step_scaler = 5,
                                           .local_step_clipper = 3},
                                          ToDouble(InitialParameters(kElements)));
  Trajectory expected;
  for (int step = 0; step < job_.steps; ++step) {
    reference.Step(GradientsOf(job_.workers, step), kLearningRate, kWeightDecay);
    std::vector<Vector>& after = expected.emplace_back();
    for (uint32_t rank = 0; rank < job_.workers; ++rank)
      after.push_back(reference.parameters(rank));
  }
  ASSERT_GT(reference.closest_decision(), Tolerance(job_.steps) / 8);
  ExpectTrajectory(expected);
}

INSTANTIATE_TEST_SUITE_P(Workers, DeepSpeedTest, ::testing::Values(1, 2, 4));

// As the options are that a session joins with to have each tensor's scale.
WorkerOptions WorkerOptionsFor(const std::vector<size_t>& tensors, uint32_t chunk_elements = 0) {
  std::vector<Parameter> parameters;
  for (const size_t elements : tensors) {
    parameters.push_back({.values = absl::Span<float>(nullptr, elements)});
  }
  SessionOptions session;
  session.worker.chunk_elements = chunk_elements;
  OptimizerOptions optimizer;
  SetAsDeepSpeed(parameters, session, optimizer);
  EXPECT_TRUE(optimizer.as_deepspeed);
  EXPECT_TRUE(CheckOptions(optimizer).ok());
  EXPECT_EQ(session.worker.gamma, 1);
  return session.worker;
}

TEST(DeepSpeed, ABlockIsTheLargestTensorUpToALimit) {
  EXPECT_EQ(WorkerOptionsFor(kTensors).block_elements, kWholeTensor);
  EXPECT_EQ(WorkerOptionsFor({1}).block_elements, 8);
  EXPECT_EQ(WorkerOptionsFor({5000, 5008}).block_elements, 5008);
  EXPECT_EQ(WorkerOptionsFor({kMaxBlockElements - 1}).block_elements, kMaxBlockElements);
  EXPECT_EQ(WorkerOptionsFor({size_t{1} << 40}).block_elements, kMaxBlockElements);
}

TEST(DeepSpeed, ChunksAreOfWholeBlocks) {
  EXPECT_EQ(WorkerOptionsFor(kTensors, 0).chunk_elements, 0) << "as suits the model";
  EXPECT_EQ(WorkerOptionsFor(kTensors, 8).chunk_elements, kWholeTensor);
  EXPECT_EQ(WorkerOptionsFor(kTensors, 105).chunk_elements, 2 * kWholeTensor);
  EXPECT_EQ(WorkerOptionsFor({6'000'000}, kMaxChunkElements).chunk_elements, 12'000'000);
}

TEST(DeepSpeed, WithBiasCorrectionOrAFloorIsRefused) {
  OptimizerOptions options = {.bias_correction = false, .variance_floor = 0, .as_deepspeed = true};
  EXPECT_TRUE(CheckOptions(options).ok());
  options.bias_correction = true;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions(options)));
  options.bias_correction = false;
  options.variance_floor = 0.01;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions(options)));
  options.variance_floor = 0;
  options.freeze_step = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions(options)));
}

}  // namespace
}  // namespace signpost::testing
