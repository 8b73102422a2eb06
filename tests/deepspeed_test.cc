// Optimizers as DeepSpeed has them, as far as docs/algorithms.md says that they are followed: one
// scale for each tensor, neither bias correction nor floor, and a first step of which nothing is
// left.

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "proto/layout.h"
#include "tests/deepspeed_onebit_adam_reference.h"
#include "tests/deepspeed_onebit_lamb_reference.h"
#include "tests/deepspeed_zero_one_adam_reference.h"
#include "tests/job.h"
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

// What a reference has after a step.
struct After {
  std::vector<Vector> parameters;    // by rank
  Vector momentum;                   // of all ranks; empty: it is not compared
  std::vector<double> coefficients;  // LAMB's, by tensor
};

// What a tensor's learning rate was multiplied by.
double CoefficientOf(const TensorScale& scale, bool one_bit) {
  return one_bit ? scale.average() * scale.factor() : scale.ratio();
}

class DeepSpeedJob : public ::testing::Test {
 protected:
  explicit DeepSpeedJob(uint32_t workers) {
    job_.workers = workers;
    job_.tensors = kTensors;
    job_.worker.block_elements = job_.worker.chunk_elements = kWholeTensor;
    job_.worker.gamma = 1;
    job_.optimizer = {
        .bias_correction = false, .freeze_step = 7, .variance_floor = 0, .as_deepspeed = true};
    job_.rates = {.learning_rate = kLearningRate, .weight_decay = kWeightDecay};
    job_.steps = 32;
  }

  // `note` adds to what is known after each step.
  template <class Reference, class Note>
  std::vector<After> Expected(Reference reference, Note note) {
    std::vector<After> expected;
    for (int step = 0; step < job_.steps; ++step) {
      reference.Step(GradientsOf(job_.workers, step), job_.rates.learning_rate,
                     job_.rates.weight_decay);
      note(reference, expected.emplace_back());
    }
    EXPECT_GT(reference.closest_decision(), Tolerance(job_.steps) / 8)
        << "fp32 may decide otherwise than the reference; choose other gradients";
    return expected;
  }

  void ExpectOneBitAdam(DeepSpeedBuffers buffers) {
    const DeepSpeedOneBitAdamReference reference(
        job_.workers, kTensors,
        {.beta2 = job_.rates.beta2, .freeze_step = FreezeStep(), .buffers = buffers},
        ToDouble(InitialParameters(kElements)));
    Expect(Expected(reference, [this](const auto& reference, After& after) {
      after.parameters.assign(job_.workers, reference.parameters());
      after.momentum = reference.momentum();
    }));
  }

  void ExpectOneBitLamb(DeepSpeedBuffers buffers, const LambOptions& lamb) {
    job_.optimizer.lamb = lamb;
    const DeepSpeedOneBitLambReference reference(job_.workers, kTensors,
                                                 {.beta2 = job_.rates.beta2,
                                                  .freeze_step = FreezeStep(),
                                                  .max_coeff = lamb.max_coeff,
                                                  .min_coeff = lamb.min_coeff,
                                                  .coeff_beta = lamb.coeff_beta,
                                                  .factor_max = lamb.factor_max,
                                                  .factor_min = lamb.factor_min,
                                                  .factor_threshold = lamb.factor_threshold,
                                                  .buffers = buffers},
                                                 ToDouble(InitialParameters(kElements)));
    Expect(Expected(reference, [this](const auto& reference, After& after) {
      after.parameters.assign(job_.workers, reference.parameters());
      after.momentum = reference.momentum();
      for (size_t tensor = 0; tensor < kTensors.size(); ++tensor) {
        after.coefficients.push_back(reference.lamb_coeff(tensor));
      }
    }));
  }

  void Expect(const std::vector<After>& expected) {
    Cluster cluster({});
    absl::Mutex mutex;
    Train(cluster, job_, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
      absl::MutexLock lock(&mutex);
      const After& after = expected[step];
      for (size_t j = 0; j < kElements; ++j) {
        ASSERT_NEAR(replica.values[j], after.parameters[rank][j], Tolerance(step))
            << "rank " << rank << "'s parameter " << j << ", step " << step;
      }
      if (!after.momentum.empty()) ExpectMomentum(after.momentum, step, worker);
      if (!after.coefficients.empty()) ExpectCoefficients(after.coefficients, step, worker);
    });
  }

  static void ExpectMomentum(const Vector& momentum, int step, const Worker& worker) {
    size_t j = 0;
    for (uint32_t chunk = 0; chunk < worker.layout().chunks().size(); ++chunk) {
      for (const float m : worker.optimizer().Momentum(chunk)) {
        ASSERT_NEAR(m, momentum[j], Tolerance(step)) << "momentum " << j << ", step " << step;
        ++j;
      }
    }
  }

  void ExpectCoefficients(const std::vector<double>& coefficients, int step,
                          const Worker& worker) const {
    for (const TensorScale& scale : worker.optimizer().Scales()) {
      const double coefficient = coefficients[scale.tensor()];
      ASSERT_NEAR(CoefficientOf(scale, step >= FreezeStep()), coefficient,
                  FactorTolerance(step) * coefficient)
          << "coefficient of tensor " << scale.tensor() << ", step " << step;
    }
  }

  int FreezeStep() const { return static_cast<int>(job_.optimizer.freeze_step); }

  JobOptionsForTest job_;
};

class DeepSpeedTest : public DeepSpeedJob, public ::testing::WithParamInterface<uint32_t> {
 protected:
  DeepSpeedTest() : DeepSpeedJob(/*workers=*/GetParam()) {}
};

constexpr LambOptions kDefaults;
// Clip where the defaults do not, and the other way round.
constexpr LambOptions kOthers = {.max_coeff = 0.5,
                                 .min_coeff = 0.2,
                                 .coeff_beta = 0.5,
                                 .factor_max = 1.05,
                                 .factor_min = 0.9,
                                 .factor_threshold = 0.5};

TEST_P(DeepSpeedTest, OneBitAdam) { ExpectOneBitAdam(DeepSpeedBuffers::kAsFollowed); }

TEST_P(DeepSpeedTest, OneBitLamb) { ExpectOneBitLamb(DeepSpeedBuffers::kAsFollowed, kDefaults); }

TEST_P(DeepSpeedTest, OneBitLambWhoseFactorsRiseSlowly) {
  job_.rates.beta2 = 0.9;
  ExpectOneBitLamb(DeepSpeedBuffers::kAsFollowed, {.factor_threshold = 0.02});
}

TEST_P(DeepSpeedTest, OneBitLambThatClips) {
  job_.rates.beta2 = 0.9;
  ExpectOneBitLamb(DeepSpeedBuffers::kAsFollowed, kOthers);
}

TEST_P(DeepSpeedTest, OneBitLambWithoutWeightDecay) {
  job_.rates.weight_decay = 0;
  ExpectOneBitLamb(DeepSpeedBuffers::kAsFollowed, kDefaults);
}

TEST_P(DeepSpeedTest, ZeroOneAdam) {
  constexpr int kVarFreezeStep = 11;
  job_.optimizer.freeze_step = kVarFreezeStep + 1;
  job_.optimizer.zero_one = {
      .var_update_scaler = 3, .local_step_scaler = 5, .local_step_clipper = 3};
  const DeepSpeedZeroOneAdamReference reference(job_.workers, kTensors,
                                                {.var_freeze_step = kVarFreezeStep,
                                                 .var_update_scaler = 3,
                                                 .local_step_scaler = 5,
                                                 .local_step_clipper = 3},
                                                ToDouble(InitialParameters(kElements)));
  Expect(Expected(reference, [this](const auto& reference, After& after) {
    for (uint32_t rank = 0; rank < job_.workers; ++rank) {
      after.parameters.push_back(reference.parameters(rank));
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Workers, DeepSpeedTest, ::testing::Values(1, 2, 4));

// DeepSpeed's worker does not compress, and with fp32 neither does ours.
class DeepSpeedAloneTest : public DeepSpeedJob {
 protected:
  DeepSpeedAloneTest() : DeepSpeedJob(/*workers=*/1) { job_.optimizer.codec = FLOAT32; }
};

TEST_F(DeepSpeedAloneTest, OneBitAdamInFp32) { ExpectOneBitAdam(DeepSpeedBuffers::kAsThere); }

TEST_F(DeepSpeedAloneTest, OneBitLambInFp32) {
  ExpectOneBitLamb(DeepSpeedBuffers::kAsThere, kDefaults);
}

TEST_F(DeepSpeedAloneTest, OneBitLambInFp32ThatClips) {
  job_.rates.beta2 = 0.9;
  ExpectOneBitLamb(DeepSpeedBuffers::kAsThere, kOthers);
}

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
