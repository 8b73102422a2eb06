#include "worker/onebit_adam.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "kernels/simulated_gpu.h"
#include "proto/codec.h"

namespace signpost {
namespace {

constexpr GroupRates kHalf = {.beta1 = 0.5};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One worker whose answers are its own contributions: what an aggregator of one worker without an
// error of its own would answer. Two tensors, blocks of 8, chunks of 16. On the host, and on a
// simulated GPU, where `values_` and `gradient_` are copies.
class OneBitAdamTest : public testing::TestWithParam<bool> {
 protected:
  static bool IsOnGpu() { return GetParam(); }

  static constexpr size_t kWeights = 27, kBiases = 5;

  void Start(const OptimizerOptions& options) {
    Tensor weights, biases;
    weights.set_name("weights");
    weights.add_shape(kWeights);
    biases.set_name("biases");
    biases.add_shape(kBiases);
    JobOptions job;
    job.set_block_elements(8);
    job.set_chunk_elements(16);
    job.set_gamma(1.35f);
    layout_ = std::make_unique<Layout>(*Layout::Create({weights, biases}, job));
    values_.assign(kWeights + kBiases, 1);
    gradient_.assign(kWeights + kBiases, 0);
    absl::Span<float> values = absl::MakeSpan(values_);
    if (IsOnGpu()) {
      values = {Allocate(values_on_gpu_), values_.size()};
      Allocate(gradient_on_gpu_);
    }
    adam_ = std::make_unique<OneBitAdam>(
        *layout_, options,
        std::vector<Parameter>{{"weights", {kWeights}, values.first(kWeights)},
                               {"biases", {kBiases}, values.subspan(kWeights), /*group=*/1}},
        /*threads=*/1, gpu_.get());
  }

  float* Allocate(kernels::cuda::Owned<uint8_t>& memory) {
    memory = *gpu_->Allocate(values_.size() * sizeof(float));
    return reinterpret_cast<float*>(memory.get());
  }

  // Where the optimizer reads it.
  const float* Gradient() {
    if (!IsOnGpu()) return gradient_.data();
    EXPECT_TRUE(
        gpu_->Write(gradient_on_gpu_.get(), gradient_.data(), gradient_.size() * sizeof(float), {})
            .ok());
    return reinterpret_cast<const float*>(gradient_on_gpu_.get());
  }

  uint32_t Compress(uint32_t chunk, Payload& payload) {
    payload = Payload(layout_->PayloadBytes(adam_->codec(), chunk));
    const absl::Span<const float> gradient = {Gradient(), gradient_.size()};
    absl::Notification is_packed;
    absl::StatusOr<uint32_t> later;
    const std::optional<uint32_t> at_once =
        adam_->Compress(chunk, {gradient.first(kWeights), gradient.subspan(kWeights)},
                        payload.data(), [&](absl::StatusOr<uint32_t> first) {
                          later = std::move(first);
                          is_packed.Notify();
                        });
    EXPECT_EQ(at_once.has_value(), !IsOnGpu());
    if (at_once) return *at_once;
    is_packed.WaitForNotification();
    return later.value();
  }

  // A step in which every chunk is answered with what it sent.
  void Step(uint64_t step, absl::Span<const GroupRates> rates) {
    const size_t bytes = values_.size() * sizeof(float);
    if (IsOnGpu()) {
      ASSERT_TRUE(gpu_->Write(values_on_gpu_.get(), values_.data(), bytes, {}).ok());
    }
    adam_->BeginStep(step, rates);
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Answer answer;
      ASSERT_EQ(Compress(chunk, answer.payload), layout_->chunks()[chunk].blocks);
      adam_->Apply(chunk, std::move(answer));
    }
    ASSERT_TRUE(adam_->Check().ok()) << adam_->Check();
    if (IsOnGpu()) {
      ASSERT_TRUE(gpu_->Read(values_.data(), values_on_gpu_.get(), bytes, {}).ok());
    }
  }

  void FillGradient(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& g : gradient_) g = normal(random);
  }

  std::vector<float> Momentum() const {
    std::vector<float> all;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      for (float m : adam_->Momentum(chunk)) all.push_back(m);
    }
    return all;
  }

  std::vector<float> Error() const {
    const HostFloats error = adam_->error();
    return {error.begin(), error.end()};
  }

  std::unique_ptr<Layout> layout_;
  std::vector<float> values_, gradient_;
  std::unique_ptr<kernels::cuda::Gpu> gpu_ =
      IsOnGpu() ? std::make_unique<kernels::cuda::SimulatedGpu>(/*seed=*/1) : nullptr;
  kernels::cuda::Owned<uint8_t> values_on_gpu_, gradient_on_gpu_;
  std::unique_ptr<OneBitAdam> adam_;
};

INSTANTIATE_TEST_SUITE_P(, OneBitAdamTest, testing::Bool(),
                         [](const auto& test) { return test.param ? "OnAGpu" : "OnTheHost"; });

TEST_P(OneBitAdamTest, FirstStepMovesEachParameterByTheLearningRate) {
  Start({});
  gradient_.assign(gradient_.size(), 0.25f);
  gradient_[3] = -0.5f;
  Step(0, {{.learning_rate = 0.1}, {.learning_rate = 0.01}});
  // Bias-corrected Adam's first step is lr * g / (|g| + epsilon), whatever the gradient's size.
  EXPECT_NEAR(values_[0], 0.9, 1e-6);
  EXPECT_NEAR(values_[3], 1.1, 1e-6);
  EXPECT_NEAR(values_[kWeights], 0.99, 1e-6) << "the second group has its own learning rate";
}

TEST_P(OneBitAdamTest, WithoutBiasCorrectionTheFirstStepIsAsInDeepSpeed) {
  Start({.bias_correction = false});
  gradient_.assign(gradient_.size(), 0.25f);
  Step(0, {{.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.99}, {}});
  // m / sqrt(v) = (0.1 g) / sqrt(0.01 g^2) = 1.
  EXPECT_NEAR(values_[0], 0.9, 1e-6);
}

TEST_P(OneBitAdamTest, WeightDecayIsDecoupledAndPerGroup) {
  Start({});
  Step(0, {{.learning_rate = 0.1, .weight_decay = 0.5}, {.learning_rate = 0.1}});
  EXPECT_FLOAT_EQ(values_[0], 0.95f) << "the gradient is zero, so decay alone acts";
  EXPECT_FLOAT_EQ(values_[kWeights], 1);
}

TEST_P(OneBitAdamTest, SwitchesToOneBitAtTheFreezeStep) {
  Start({.freeze_step = 2});
  for (uint64_t step = 0; step < 4; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
    EXPECT_EQ(adam_->codec(), step < 2 ? FLOAT32 : ONE_BIT) << "step " << step;
  }
}

TEST_P(OneBitAdamTest, GroupsHaveTheirOwnBetasAndEpsilonsAndMayChangeThem) {
  Start({});
  const GroupRates rates[2][2] = {
      {{.learning_rate = 0.1}, {.learning_rate = 0.1, .beta1 = 0.5, .beta2 = 0.9, .epsilon = 0.1}},
      {{.learning_rate = 0.1}, {.learning_rate = 0.1, .beta1 = 0.8, .beta2 = 0.7, .epsilon = 0.2}}};
  gradient_.assign(gradient_.size(), 0.25f);
  Step(0, rates[0]);
  gradient_.assign(gradient_.size(), 1);
  Step(1, rates[1]);
  const auto after_two_steps = [](const GroupRates& first, const GroupRates& second) {
    double m = (1 - first.beta1) * 0.25, v = (1 - first.beta2) * 0.0625;
    double x = 1 - 0.1 * 0.25 / (0.25 + first.epsilon);
    m = second.beta1 * m + (1 - second.beta1);
    v = second.beta2 * v + (1 - second.beta2);
    m /= 1 - second.beta1 * second.beta1;  // as PyTorch has it
    v /= 1 - second.beta2 * second.beta2;
    return x - 0.1 * m / (std::sqrt(v) + second.epsilon);
  };
  EXPECT_NEAR(values_[0], after_two_steps({}, {}), 1e-6);
  EXPECT_NEAR(values_[kWeights], after_two_steps(rates[0][1], rates[1][1]), 1e-6);
}

TEST_P(OneBitAdamTest, EveryRefreshIsApartAndInFp32ByDefault) {
  Start({.freeze_step = 2, .variance_refresh_interval = 3});
  for (uint64_t step = 0; step < 12; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
    const bool refreshes = step == 5 || step == 8 || step == 11;
    EXPECT_EQ(adam_->codec(), refreshes || step < 2 ? FLOAT32 : ONE_BIT) << step;
    EXPECT_EQ(adam_->loss_unit(), refreshes ? static_cast<float>(1 - 0.9) : 0) << step;
  }
}

TEST_P(OneBitAdamTest, ARefreshLeavesTheErrorAlone) {
  Start({.freeze_step = 1, .variance_refresh_interval = 2});
  for (uint64_t step = 0; step < 3; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
  }
  const std::vector<float> error = Error();
  FillGradient(3);
  Step(3, {{}, {}});
  EXPECT_EQ(error, Error());
}

TEST_P(OneBitAdamTest, ARefreshKeepsWhatItsCodecLosesOfTheMomentum) {
  for (const Codec codec : {BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT}) {
    SCOPED_TRACE(CodecName(codec));
    Start({.bias_correction = false,
           .freeze_step = 1,
           .variance_codec = codec,
           .variance_refresh_interval = 2});
    for (uint64_t step = 0; step < 6; ++step) {
      const std::vector<float> momentum = Momentum(), error = Error();
      FillGradient(step);
      Step(step, {kHalf, kHalf});
      if (step < 3 || step % 2 == 0) continue;
      EXPECT_EQ(adam_->codec(), codec);
      const std::vector<float> after = Momentum();
      double lost = 0;
      for (size_t i = 0; i < after.size(); ++i) {
        const double put_in = 0.5 * momentum[i] + 0.5 * gradient_[i] + error[i];
        // Momentum, loss and error are rounded four times, each by half an ulp of a value below 16.
        EXPECT_NEAR(after[i] + Error()[i], put_in, 4 * 0x1p-21) << "step " << step;
        lost = std::max<double>(lost, std::abs(Error()[i] - error[i]));
      }
      EXPECT_GT(lost, 1e-4);
    }
  }
}

TEST_P(OneBitAdamTest, ARefreshGivesAVarianceToWhatHadNone) {
  Start({.freeze_step = 1, .variance_refresh_interval = 2});
  for (uint64_t step = 0; step < 5; ++step) {
    FillGradient(step);
    if (step == 0) gradient_[5] = 0;
    const float before = values_[5];
    Step(step, {{}, {}});
    EXPECT_EQ(values_[5] != before, step == 4) << step;
  }
}

TEST_P(OneBitAdamTest, ARefreshUndoesAFreezeWithTheEpsilonThatItHad) {
  std::vector<float> variances[2];
  for (const bool changes : {false, true}) {
    Start({.freeze_step = 1, .variance_refresh_interval = 2});
    for (uint64_t step = 0; step < 4; ++step) {
      FillGradient(step);
      const GroupRates rates = {.epsilon = changes && step > 1 ? 0.5 : 1e-8};
      Step(step, {rates, rates});
    }
    const HostFloats variance = adam_->variance();
    variances[changes].assign(variance.begin(), variance.end());
  }
  EXPECT_EQ(variances[0], variances[1]);
}

TEST_P(OneBitAdamTest, AutoFreezesOnceTheVarianceFitsTheGradients) {
  Start({.freeze_step = OptimizerOptions::kAuto});
  const GroupRates rates = {.beta2 = 0.75};  // looks at it every 4 steps
  for (uint64_t step = 0; step < 13; ++step) {
    // Of the first gradients' squares, 64 times the later ones', 0.75^4 are left at step 8.
    gradient_.assign(gradient_.size(), step < 4 ? 8 : 1);
    Step(step, {rates, rates});
    EXPECT_EQ(adam_->codec(), step < 12 ? FLOAT32 : ONE_BIT) << step;
  }
  EXPECT_EQ(adam_->schedule().freeze_step(), 12);
}

TEST_P(OneBitAdamTest, AutoDoesNotFreezeWhileALearningRateRises) {
  Start({.freeze_step = OptimizerOptions::kAuto});
  gradient_.assign(gradient_.size(), 1);
  for (uint64_t step = 0; step < 24; ++step) {
    const GroupRates steady = {.beta2 = 0.75};
    // It rises for the last time in step 9.
    const GroupRates rising = {.learning_rate = 1e-3 * std::min<int>(step, 9), .beta2 = 0.75};
    Step(step, {steady, rising});
  }
  EXPECT_EQ(adam_->schedule().freeze_step(), 20) << "the first look that is 10 steps after it";
}

constexpr OptimizerOptions kFollowing = {.freeze_step = 4,
                                         .variance_refresh_interval = OptimizerOptions::kAuto};

TEST_P(OneBitAdamTest, AFollowingVarianceIsNotFrozenBeforeThereAreGradients) {
  Start(kFollowing);
  const GroupRates rates = {.beta2 = 0.75};
  for (uint64_t step = 0; step < 21; ++step) {
    gradient_.assign(gradient_.size(), step < 14 ? 0 : 1);
    Step(step, {rates, rates});
    EXPECT_EQ(adam_->codec(), step < 16 ? FLOAT32 : ONE_BIT) << step;
  }
}

TEST_P(OneBitAdamTest, AFollowingVarianceTakesInATensorsFirstGradient) {
  Start(kFollowing);
  constexpr uint64_t kFirst = 86;  // no refresh is planned before step 96
  float largest = 0;
  for (uint64_t step = 0; step < kFirst + 76; ++step) {
    FillGradient(step);
    if (step < kFirst) std::fill(gradient_.begin() + kWeights, gradient_.end(), 0);
    const std::vector<float> before = values_;
    Step(step, {{}, {}});
    for (size_t i = kWeights; i < values_.size(); ++i) {
      const float update = std::abs(values_[i] - before[i]) / 1e-3f;
      // The answer that tells of the gradient is that of step 86, and has no variance; nor have the
      // next steps one of enough gradients.
      if (step <= kFirst + 1 + VariancePlan::kStillSteps) {
        EXPECT_EQ(update, 0) << "step " << step << ", element " << i;
      }
      largest = std::max(largest, update);
    }
    // The next step settles the momentum.
    const bool is_dense = step > kFirst && step <= kFirst + 1 + VariancePlan::kFirstSteps;
    if (step >= kFirst) {
      EXPECT_EQ(adam_->codec(), is_dense ? FLOAT32 : ONE_BIT) << step;
    }
  }
  EXPECT_GT(largest, 0.1f);
  EXPECT_LT(largest, 3.3f) << "the first update of an element of Adam's is at most that large";
}

// Returns the optimizer's state, but for the momentum, with biases that join in `step`.
OptimizerState WithLateBiases(const OneBitAdam& adam, size_t weights, uint64_t step) {
  OptimizerState state = {.schedule = adam.schedule()};
  const HostFloats error = adam.error(), variance = adam.variance();
  state.error.assign(error.begin(), error.end());
  state.variance.assign(variance.begin(), variance.end());
  std::fill(state.error.begin() + weights, state.error.end(), 0);
  std::fill(state.variance.begin() + weights, state.variance.end(), 0);
  for (uint32_t tensor = 0; tensor < 2; ++tensor) {
    TensorScale& scale = *state.scales.Add();
    scale.set_tensor(tensor);
    scale.set_first_step(tensor == 0 ? 0 : step);
  }
  return state;
}

TEST_P(OneBitAdamTest, ATensorThatJoinsLateHasAdamsFirstSteps) {
  Start({.freeze_step = OptimizerOptions::kNever});
  for (uint64_t step = 0; step < 9; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
  }
  OptimizerState state = WithLateBiases(*adam_, kWeights, 9);
  state.momentum = Momentum();
  std::fill(state.momentum.begin() + kWeights, state.momentum.end(), 0);
  const std::vector<float> values = values_;
  Start({.freeze_step = OptimizerOptions::kNever});
  values_ = values;
  adam_->Restore(std::move(state));
  // Adam of the biases alone, from its first step on, in double precision.
  std::vector<double> x(values.begin() + kWeights, values.end()), m(kBiases), v(kBiases);
  for (uint64_t step = 9; step < 20; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
    const double t = static_cast<double>(step - 9 + 1);
    for (size_t i = 0; i < kBiases; ++i) {
      const double g = gradient_[kWeights + i];
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      x[i] -= 1e-3 * (m[i] / (1 - std::pow(0.9, t))) /
              (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
      EXPECT_NEAR(values_[kWeights + i], x[i], 1e-6) << "step " << step << ", bias " << i;
    }
  }
  ASSERT_EQ(adam_->Scales().size(), 2) << "a checkpoint has to know of it";
  EXPECT_EQ(adam_->Scales()[1].first_step(), 9);
}

TEST_P(OneBitAdamTest, AFrozenStateWithoutEpsilonsHasTheDefaultBeforeItsFirstStep) {
  Start({.freeze_step = 4});
  for (uint64_t step = 0; step < 6; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
  }
  OptimizerState state = WithLateBiases(*adam_, kWeights, 0);
  state.momentum = Momentum();
  state.schedule.clear_epsilons();
  Start({.freeze_step = 4});
  adam_->Restore(std::move(state));
  EXPECT_EQ(adam_->FrozenEpsilons(), std::vector<float>(2, 1e-8f));
}

TEST_P(OneBitAdamTest, AFreezeWaitsForATensorThatHasJoinedLate) {
  OptimizerOptions options = kFollowing;
  options.freeze_step = 150;  // looks at the variance are in steps 150, 182, 214 and so on
  for (const uint64_t joined : {0, 134}) {
    Start(options);
    for (uint64_t step = 0; step < 134; ++step) {
      FillGradient(step);
      Step(step, {{}, {}});
    }
    OptimizerState state = WithLateBiases(*adam_, kWeights, joined);
    state.momentum = Momentum();
    Start(options);
    adam_->Restore(std::move(state));
    const uint64_t freeze_step = joined == 0 ? 150 : 310;  // 134 + 150 is no look
    for (uint64_t step = 134; step <= freeze_step; ++step) {
      FillGradient(step);
      // Most of the sum of variances is theirs. Joined late they are no growth of the gradients.
      const float scale = joined == 0 ? 1 : 30;
      for (size_t i = kWeights; i < gradient_.size(); ++i) gradient_[i] *= scale;
      Step(step, {{}, {}});
    }
    EXPECT_EQ(adam_->schedule().freeze_step(), freeze_step);
    EXPECT_EQ(adam_->schedule().refresh_step(), freeze_step + (freeze_step - joined) / 4);
  }
}

TEST_P(OneBitAdamTest, AFollowingVarianceGrowsWithTheGradientsAndUpdatesAreBounded) {
  Start(kFollowing);
  float mean = 0;
  for (uint64_t step = 0; step < 60; ++step) {
    FillGradient(step);
    if (step >= 20) {
      for (float& g : gradient_) g *= 1000;
    }
    const std::vector<float> before = values_;
    Step(step, {{}, {}});
    mean = 0;
    for (size_t i = 0; i < values_.size(); ++i) {
      const float update = std::abs(values_[i] - before[i]) / 1e-3f;
      EXPECT_LE(update, 10.01f) << "step " << step << ", element " << i;
      mean += update / values_.size();
    }
  }
  EXPECT_LT(mean, 3);
}

TEST_P(OneBitAdamTest, SaysThatTrainingHasDivergedWhereUpdatesStayAtTheirBound) {
  Start({.freeze_step = 4});  // and does not follow
  absl::Status status;
  uint64_t step = 0;
  for (; step < 400 && status.ok(); ++step) {
    gradient_.assign(gradient_.size(), step < 20 ? 1 : 1e5f);
    adam_->BeginStep(step, std::vector<GroupRates>(2));
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Answer answer;
      Compress(chunk, answer.payload);
      adam_->Apply(chunk, std::move(answer));
    }
    status = adam_->Check();
  }
  EXPECT_EQ(step, 121) << "the 100th large answer is that of step 119";
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(testing::HasSubstr("diverged at step 120"), testing::HasSubstr("'weights'"),
                     testing::HasSubstr("lower learning rate")));
}

TEST_P(OneBitAdamTest, SaysThatATensorCannotMoveWhereItsFirstGradientComesBehindTheFreeze) {
  Start({.freeze_step = 4});
  absl::Status status;
  uint64_t step = 0;
  for (; step < 400 && status.ok(); ++step) {
    FillGradient(step);
    if (step < 20) std::fill(gradient_.begin() + kWeights, gradient_.end(), 0);
    adam_->BeginStep(step, std::vector<GroupRates>(2));
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Answer answer;
      Compress(chunk, answer.payload);
      adam_->Apply(chunk, std::move(answer));
    }
    status = adam_->Check();
  }
  EXPECT_EQ(step, 121);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("tensor 'biases'"),
                             testing::HasSubstr("no gradient before its variance was frozen at "
                                                "step 4")));
}

TEST_P(OneBitAdamTest, AnElementWithoutVarianceGetsNoUpdateAfterTheFreeze) {
  Start({.freeze_step = 1});
  FillGradient(1);
  gradient_[5] = 0;
  Step(0, {{}, {}});
  const float before = values_[5];
  FillGradient(2);
  Step(1, {{}, {}});
  EXPECT_EQ(values_[5], before);
  EXPECT_NE(values_[4], before);
}

TEST_P(OneBitAdamTest, MomentumAndErrorHoldAllThatWasPutIn) {
  Start({.bias_correction = false, .freeze_step = 1});
  FillGradient(1);
  Step(0, {kHalf, kHalf});
  for (uint64_t step = 1; step < 5; ++step) {
    const std::vector<float> momentum = Momentum();
    const std::vector<float> error = Error();
    FillGradient(10 + step);
    Step(step, {kHalf, kHalf});
    const std::vector<float> after = Momentum();
    for (size_t i = 0; i < after.size(); ++i) {
      const double put_in = 0.5 * momentum[i] + 0.5 * gradient_[i] + error[i];
      // u takes three roundings and its error one more, each of half an ulp of a value below 16.
      EXPECT_NEAR(after[i] + Error()[i], put_in, 4 * 0x1p-21) << "step " << step;
    }
  }
}

TEST_P(OneBitAdamTest, ANonFiniteGradientKeepsItsBlockFromBeingPacked) {
  Start({.freeze_step = 1});
  FillGradient(1);
  Step(0, {{}, {}});
  adam_->BeginStep(1, {{}, {}});
  FillGradient(2);
  gradient_[3] = kNan;  // chunk 0, block 0
  const std::vector<float> error = Error();
  Payload payload;
  EXPECT_EQ(Compress(0, payload), 0);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(Error()[i], error[i]);
  const Chunk& chunk = layout_->chunks()[0];
  EXPECT_FALSE(NumberCodecOf(ONE_BIT, *layout_)
                   .IsPacked(chunk, chunk.segments[0].Part(0, 8, 8), payload.data()));
  EXPECT_TRUE(NumberCodecOf(ONE_BIT, *layout_)
                  .IsPacked(chunk, chunk.segments[0].Part(8, 16, 8), payload.data()));
}

// Whoever is late does not get its momentum's share into the round, and the answer replaces it.
TEST_P(OneBitAdamTest, KeepInputKeepsAllButTheGradientOfABlockThatIsNotFinite) {
  Start({.bias_correction = false, .freeze_step = 1});
  for (uint64_t step = 0; step < 3; ++step) {
    FillGradient(step);
    Step(step, {kHalf, kHalf});
  }
  adam_->BeginStep(3, {kHalf, kHalf});
  const std::vector<float> momentum = Momentum();
  const std::vector<float> error = Error();
  FillGradient(99);
  gradient_[3] = kNan;  // chunk 0, block 0
  for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
    Payload payload;
    Compress(chunk, payload);
    adam_->KeepInput(chunk, payload.data());
  }
  for (size_t i = 0; i < error.size(); ++i) {
    const double gradient = i < 8 ? 0 : gradient_[i];
    EXPECT_NEAR(Error()[i], error[i] + 0.5 * momentum[i] + 0.5 * gradient, 6 * 0x1p-21) << i;
  }
}

TEST_P(OneBitAdamTest, TakeBackLeavesTheGradientInTheErrorAndMomentumAndParametersAlone) {
  for (uint64_t skipped_step : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{4}}) {
    SCOPED_TRACE(testing::Message() << "skipped step " << skipped_step);
    Start({.bias_correction = false, .freeze_step = 1, .variance_refresh_interval = 2});
    for (uint64_t step = 0; step < skipped_step; ++step) {
      FillGradient(step);
      Step(step, {kHalf, kHalf});
    }
    adam_->BeginStep(skipped_step, {kHalf, kHalf});
    const std::vector<float> values = values_, momentum = Momentum();
    const std::vector<float> error = Error();
    FillGradient(99);
    const double kept = skipped_step == 0 ? 1 : 0.5;  // of the gradient: its unit until the freeze
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Payload payload;
      Compress(chunk, payload);
      adam_->TakeBack(chunk, payload.data());
    }
    EXPECT_EQ(values_, values);
    EXPECT_EQ(Momentum(), momentum);
    for (size_t i = 0; i < error.size(); ++i) {
      // Packing rounds four times and taking back twice, each by half an ulp of a value below 16.
      EXPECT_NEAR(Error()[i], error[i] + kept * gradient_[i], 6 * 0x1p-21) << i;
    }
  }
}

TEST_P(OneBitAdamTest, ErrorsChangeToTheMomentumsUnitAtTheFreeze) {
  Start({.freeze_step = 1, .warm_up_codec = BFLOAT16});
  const GroupRates quarter = {.beta1 = 0.75};
  FillGradient(1);
  Step(0, {quarter, quarter});
  const std::vector<float> error = Error();
  EXPECT_EQ(adam_->error_scale(), 1);
  adam_->BeginStep(1, {quarter, quarter});
  EXPECT_EQ(adam_->error_scale(), 0.25f);
  for (size_t i = 0; i < error.size(); ++i) EXPECT_EQ(Error()[i], 0.25f * error[i]);
  adam_->BeginStep(2, {quarter, quarter});
  EXPECT_EQ(adam_->error_scale(), 1) << "once only";
}

// What comes of going on from the optimizer's state as it is now.
OptimizerState StateOf(const OneBitAdam& adam, std::vector<float> momentum) {
  const HostFloats error = adam.error(), variance = adam.variance();
  return {.schedule = adam.schedule(),
          .error = {error.begin(), error.end()},
          .momentum = std::move(momentum),
          .variance = {variance.begin(), variance.end()}};
}

TEST_P(OneBitAdamTest, GoesOnFromASavedStateAsIfNothingHadHappened) {
  const OptimizerOptions options = {.freeze_step = 3,
                                    .warm_up_codec = BFLOAT16,
                                    .variance_codec = INT8,
                                    .variance_refresh_interval = 2};
  constexpr uint64_t kSteps = 8;
  auto step_with_gradient = [this](uint64_t step) {
    FillGradient(step);
    // Blocks of zeros: their momentum is zeros of either sign.
    for (size_t i = 8; i < 16; ++i) gradient_[i] = step % 2 == 0 ? -0.0f : 0.0f;
    Step(step, {{.weight_decay = 0.1}, {}});
  };
  const auto bits = [](absl::Span<const float> values) {
    return std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size());
  };
  for (uint64_t saved_at = 0; saved_at < kSteps; ++saved_at) {
    SCOPED_TRACE(testing::Message() << "saved after " << saved_at << " steps");
    Start(options);
    for (uint64_t step = 0; step < saved_at; ++step) step_with_gradient(step);
    const OptimizerState state = StateOf(*adam_, Momentum());
    const std::vector<float> values = values_;
    for (uint64_t step = saved_at; step < kSteps; ++step) step_with_gradient(step);
    const std::string expected = bits(values_), expected_momentum = bits(Momentum());
    const std::string expected_error = bits(Error());

    Start(options);
    values_ = values;
    adam_->Restore(state);
    EXPECT_EQ(bits(Momentum()), bits(state.momentum));
    for (uint64_t step = saved_at; step < kSteps; ++step) step_with_gradient(step);
    EXPECT_EQ(bits(values_), expected);
    EXPECT_EQ(bits(Momentum()), expected_momentum);
    EXPECT_EQ(bits(Error()), expected_error);
  }
}

TEST_P(OneBitAdamTest, TakesAStateWhateverFormItsMomentumHas) {
  Start({.freeze_step = 2});
  const auto step = [this](uint64_t number) {
    FillGradient(number);
    Step(number, {{}, {}});
  };
  const auto states = [this] {
    std::vector<std::string> states;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      const Payload state = adam_->State(chunk);
      states.emplace_back(state.span().begin(), state.span().end());
    }
    return states;
  };
  step(0);
  const std::vector<std::string> dense = states();
  step(1);
  step(2);
  const std::vector<std::string> packed = states();
  step(3);
  for (const std::vector<std::string>* wanted : {&dense, &packed, &dense}) {
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      const std::string& state = (*wanted)[chunk];
      adam_->SetState(chunk, {reinterpret_cast<const uint8_t*>(state.data()), state.size()});
    }
    EXPECT_EQ(states(), *wanted);
    ASSERT_TRUE(adam_->Check().ok()) << adam_->Check();
  }
}

TEST_P(OneBitAdamTest, MomentumKeepsTheSignsOfItsZeros) {
  Start({.freeze_step = 1});
  Step(0, {{}, {}});
  adam_->BeginStep(1, {{}, {}});
  Answer answer;
  answer.payload = Payload(layout_->PayloadBytes(ONE_BIT, 0));
  std::memset(answer.payload.data(), 0, answer.payload.size());
  answer.payload.data()[2 * sizeof(float)] = 0b10;  // two scales of 0, then the signs
  adam_->Apply(0, std::move(answer));
  EXPECT_FALSE(std::signbit(adam_->Momentum(0)[0]));
  EXPECT_TRUE(std::signbit(adam_->Momentum(0)[1]));
}

TEST(CheckOptions, NamesTheOptionAtFault) {
  EXPECT_TRUE(CheckOptions({}).ok());
  const std::pair<OptimizerOptions, const char*> cases[] = {
      {{.freeze_step = 0}, "freeze_step"},
      {{.warm_up_codec = RESTORE}, "warm_up_codec"},
      {{.variance_codec = SKIP}, "variance_codec"},
      {{.variance_codec = INT8}, "variance_codec"},
      {{.codec = SKIP}, "option codec"},
      {{.variance_floor = kNan}, "variance_floor"},
      {{.variance_refresh_interval = 1}, "variance_refresh_interval"},
  };
  for (const auto& [options, name] : cases) {
    const absl::Status status = CheckOptions(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(name), absl::string_view::npos) << status;
  }
}

TEST(CheckRates, NamesTheGroupAndTheRateAtFault) {
  EXPECT_TRUE(CheckRates({}, {{}, {}}).ok());
  const std::pair<GroupRates, const char*> cases[] = {
      {{.learning_rate = kNan}, "learning_rate"},
      {{.learning_rate = -1e-3}, "learning_rate"},
      {{.weight_decay = kNan}, "weight_decay"},
      {{.weight_decay = -0.1}, "weight_decay"},
      {{.beta1 = 1}, "beta1"},
      {{.beta1 = 1 - 1e-9}, "beta1"},  // 1 in fp32
      {{.beta2 = -0.1}, "beta2"},
      {{.epsilon = 0}, "epsilon"},
      {{.epsilon = 1e-46}, "epsilon"},  // 0 in fp32
  };
  for (const auto& [rates, name] : cases) {
    const absl::Status status = CheckRates({}, {{}, rates});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(absl::StrCat(name, " of parameter group 1 is")),
              absl::string_view::npos)
        << status;
  }
}

TEST(CheckRates, GradientsThatLoseSomethingWantOneBeta1) {
  const GroupRates groups[] = {{.beta1 = 0.9}, {.beta1 = 0.8}};
  EXPECT_TRUE(CheckRates({}, groups).ok());
  EXPECT_FALSE(CheckRates({.warm_up_codec = BFLOAT16}, groups).ok());
  EXPECT_FALSE(CheckRates({.variance_codec = INT8}, groups).ok());
}

TEST(DescribeOptions, DiffersWhereAnyOptionDoes) {
  const OptimizerOptions variants[] = {
      {},
      {.bias_correction = false},
      {.freeze_step = 10},
      {.freeze_step = OptimizerOptions::kAuto},
      {.warm_up_codec = BFLOAT16},
      {.variance_codec = INT8},
      {.variance_floor = 0},
      {.variance_refresh_interval = 10},
      {.variance_refresh_interval = OptimizerOptions::kAuto},
  };
  for (const OptimizerOptions& a : variants) {
    for (const OptimizerOptions& b : variants) {
      EXPECT_EQ(DescribeOptions(a) == DescribeOptions(b), &a == &b);
    }
  }
}

}  // namespace
}  // namespace signpost
