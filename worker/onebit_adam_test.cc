#include "worker/onebit_adam.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace signpost {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One worker whose answers are its own contributions: what an aggregator of one worker without an
// error of its own would answer. Two tensors, blocks of 8, chunks of 16.
class OneBitAdamTest : public testing::Test {
 protected:
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
    adam_ = std::make_unique<OneBitAdam>(
        *layout_, options,
        std::vector<Parameter>{
            {"weights", {kWeights}, absl::MakeSpan(values_).first(kWeights)},
            {"biases", {kBiases}, absl::MakeSpan(values_).subspan(kWeights), /*group=*/1}});
  }

  uint32_t Compress(uint32_t chunk, Payload& payload) {
    payload = Payload(layout_->PayloadBytes(adam_->codec(), chunk));
    return adam_->Compress(
        chunk,
        {absl::MakeSpan(gradient_).first(kWeights), absl::MakeSpan(gradient_).subspan(kWeights)},
        payload.data());
  }

  // A step in which every chunk is answered with what it sent.
  void Step(uint64_t step, absl::Span<const GroupRates> rates) {
    adam_->BeginStep(step, rates);
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Answer answer;
      ASSERT_EQ(Compress(chunk, answer.payload), layout_->chunks()[chunk].blocks);
      adam_->Apply(chunk, std::move(answer));
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

  std::unique_ptr<Layout> layout_;
  std::vector<float> values_, gradient_;
  std::unique_ptr<OneBitAdam> adam_;
};

TEST_F(OneBitAdamTest, FirstStepMovesEachParameterByTheLearningRate) {
  Start({});
  gradient_.assign(gradient_.size(), 0.25f);
  gradient_[3] = -0.5f;
  Step(0, {{.learning_rate = 0.1}, {.learning_rate = 0.01}});
  // Bias-corrected Adam's first step is lr * g / (|g| + epsilon), whatever the gradient's size.
  EXPECT_NEAR(values_[0], 0.9, 1e-6);
  EXPECT_NEAR(values_[3], 1.1, 1e-6);
  EXPECT_NEAR(values_[kWeights], 0.99, 1e-6) << "the second group has its own learning rate";
}

TEST_F(OneBitAdamTest, WithoutBiasCorrectionTheFirstStepIsAsInDeepSpeed) {
  Start({.beta1 = 0.9, .beta2 = 0.99, .bias_correction = false});
  gradient_.assign(gradient_.size(), 0.25f);
  Step(0, {{.learning_rate = 0.1}, {}});
  // m / sqrt(v) = (0.1 g) / sqrt(0.01 g^2) = 1.
  EXPECT_NEAR(values_[0], 0.9, 1e-6);
}

TEST_F(OneBitAdamTest, WeightDecayIsDecoupledAndPerGroup) {
  Start({});
  Step(0, {{.learning_rate = 0.1, .weight_decay = 0.5}, {.learning_rate = 0.1}});
  EXPECT_FLOAT_EQ(values_[0], 0.95f) << "the gradient is zero, so decay alone acts";
  EXPECT_FLOAT_EQ(values_[kWeights], 1);
}

TEST_F(OneBitAdamTest, SwitchesToOneBitAtTheFreezeStep) {
  Start({.freeze_step = 2});
  for (uint64_t step = 0; step < 4; ++step) {
    FillGradient(step);
    Step(step, {{}, {}});
    EXPECT_EQ(adam_->codec(), step < 2 ? FLOAT32 : ONE_BIT) << "step " << step;
  }
}

TEST_F(OneBitAdamTest, AnElementWithoutVarianceGetsNoUpdateAfterTheFreeze) {
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

TEST_F(OneBitAdamTest, MomentumAndErrorHoldAllThatWasPutIn) {
  Start({.beta1 = 0.5, .bias_correction = false, .freeze_step = 1});
  FillGradient(1);
  Step(0, {{}, {}});
  for (uint64_t step = 1; step < 5; ++step) {
    const std::vector<float> momentum = Momentum();
    const std::vector<float> error(adam_->error().begin(), adam_->error().end());
    FillGradient(10 + step);
    Step(step, {{}, {}});
    const std::vector<float> after = Momentum();
    for (size_t i = 0; i < after.size(); ++i) {
      const double put_in = 0.5 * momentum[i] + 0.5 * gradient_[i] + error[i];
      // u takes three roundings and its error one more, each of half an ulp of a value below 16.
      EXPECT_NEAR(after[i] + adam_->error()[i], put_in, 4 * 0x1p-21) << "step " << step;
    }
  }
}

TEST_F(OneBitAdamTest, ANonFiniteGradientStopsThePackingAtItsBlock) {
  Start({.freeze_step = 1});
  FillGradient(1);
  Step(0, {{}, {}});
  adam_->BeginStep(1, {{}, {}});
  FillGradient(2);
  gradient_[9] = kNan;  // chunk 0, block 1
  const std::vector<float> error(adam_->error().begin(), adam_->error().end());
  Payload payload;
  EXPECT_EQ(Compress(0, payload), 1);
  for (size_t i = 8; i < 16; ++i) EXPECT_EQ(adam_->error()[i], error[i]);
}

TEST_F(OneBitAdamTest, TakeBackLeavesTheGradientInTheErrorAndMomentumAndParametersAlone) {
  for (uint64_t skipped_step : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
    SCOPED_TRACE(testing::Message() << "skipped step " << skipped_step);
    Start({.beta1 = 0.5, .bias_correction = false, .freeze_step = 1});
    for (uint64_t step = 0; step < skipped_step; ++step) {
      FillGradient(step);
      Step(step, {{}, {}});
    }
    adam_->BeginStep(skipped_step, {{}, {}});
    const std::vector<float> values = values_, momentum = Momentum();
    const std::vector<float> error(adam_->error().begin(), adam_->error().end());
    FillGradient(99);
    const double kept = skipped_step == 0 ? 1 : 0.5;  // of the gradient: its unit until the freeze
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Payload payload;
      const uint32_t packed = Compress(chunk, payload);
      adam_->TakeBack(chunk, payload.data(), packed);
    }
    EXPECT_EQ(values_, values);
    EXPECT_EQ(Momentum(), momentum);
    for (size_t i = 0; i < error.size(); ++i) {
      // Packing rounds four times and taking back twice, each by half an ulp of a value below 16.
      EXPECT_NEAR(adam_->error()[i], error[i] + kept * gradient_[i], 6 * 0x1p-21) << i;
    }
  }
}

TEST_F(OneBitAdamTest, ErrorsChangeToTheMomentumsUnitAtTheFreeze) {
  Start({.beta1 = 0.75, .freeze_step = 1, .warm_up_codec = BFLOAT16});
  FillGradient(1);
  Step(0, {{}, {}});
  const std::vector<float> error(adam_->error().begin(), adam_->error().end());
  EXPECT_EQ(adam_->error_scale(), 1);
  adam_->BeginStep(1, {{}, {}});
  EXPECT_EQ(adam_->error_scale(), 0.25f);
  for (size_t i = 0; i < error.size(); ++i) EXPECT_EQ(adam_->error()[i], 0.25f * error[i]);
  adam_->BeginStep(2, {{}, {}});
  EXPECT_EQ(adam_->error_scale(), 1) << "once only";
}

// What comes of going on from the optimizer's state as it is now.
OptimizerState StateOf(const OneBitAdam& adam, uint64_t step, std::vector<float> momentum) {
  return {.step = step,
          .beta1_power = adam.beta1_power(),
          .beta2_power = adam.beta2_power(),
          .error = {adam.error().begin(), adam.error().end()},
          .momentum = std::move(momentum),
          .variance = {adam.variance().begin(), adam.variance().end()}};
}

TEST_F(OneBitAdamTest, GoesOnFromASavedStateAsIfNothingHadHappened) {
  const OptimizerOptions options = {.freeze_step = 3, .warm_up_codec = BFLOAT16};
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
    const OptimizerState state = StateOf(*adam_, saved_at, Momentum());
    const std::vector<float> values = values_;
    for (uint64_t step = saved_at; step < kSteps; ++step) step_with_gradient(step);
    const std::string expected = bits(values_), expected_momentum = bits(Momentum());
    const std::string expected_error = bits(adam_->error());

    Start(options);
    values_ = values;
    adam_->Restore(state);
    EXPECT_EQ(bits(Momentum()), bits(state.momentum));
    for (uint64_t step = saved_at; step < kSteps; ++step) step_with_gradient(step);
    EXPECT_EQ(bits(values_), expected);
    EXPECT_EQ(bits(Momentum()), expected_momentum);
    EXPECT_EQ(bits(adam_->error()), expected_error);
  }
}

TEST_F(OneBitAdamTest, MomentumKeepsTheSignsOfItsZeros) {
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
      {{.beta1 = 1}, "beta1"},
      {{.beta1 = 1 - 1e-9}, "beta1"},   // 1 in fp32
      {{.epsilon = 1e-46}, "epsilon"},  // 0 in fp32
      {{.beta2 = -0.1}, "beta2"},
      {{.epsilon = 0}, "epsilon"},
      {{.freeze_step = 0}, "freeze_step"},
      {{.warm_up_codec = ONE_BIT}, "warm_up_codec"},
      {{.variance_floor = kNan}, "variance_floor"},
  };
  for (const auto& [options, name] : cases) {
    const absl::Status status = CheckOptions(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(name), absl::string_view::npos) << status;
  }
}

TEST(DescribeOptions, DiffersWhereAnyOptionDoes) {
  const OptimizerOptions variants[] = {
      {},
      {.beta1 = 0.8},
      {.beta2 = 0.99},
      {.epsilon = 1e-6},
      {.bias_correction = false},
      {.freeze_step = 10},
      {.warm_up_codec = BFLOAT16},
      {.variance_floor = 0},
  };
  for (const OptimizerOptions& a : variants) {
    for (const OptimizerOptions& b : variants) {
      EXPECT_EQ(DescribeOptions(a) == DescribeOptions(b), &a == &b);
    }
  }
}

}  // namespace
}  // namespace signpost
