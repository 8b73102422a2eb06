#include "worker/onebit_lamb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace signpost {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Truly;

// One worker whose answers are its own contributions, as in onebit_adam_test.cc. Two tensors,
// blocks of 8; chunk 0 has half of the first, chunk 1 the rest and the second.
class OneBitLambTest : public testing::Test {
 protected:
  static constexpr size_t kWeights = 32, kBiases = 8;

  void Start(OptimizerOptions options, uint32_t group_of_biases = 0) {
    if (!options.lamb) options.lamb.emplace();
    Tensor weights, biases;
    weights.set_name("weights");
    weights.add_shape(kWeights);
    biases.set_name("biases");
    biases.add_shape(kBiases);
    JobOptions job;
    job.set_block_elements(8);
    job.set_chunk_elements(24);
    job.set_gamma(1.35f);
    job.set_state_numbers(StateNumbers(options));
    layout_ = std::make_unique<Layout>(*Layout::Create({weights, biases}, job));
    ASSERT_EQ(layout_->chunks().size(), 2);
    values_.assign(kWeights + kBiases, 1);
    gradient_.assign(kWeights + kBiases, 0);
    const absl::Span<float> values = absl::MakeSpan(values_);
    lamb_ = std::make_unique<OneBitLamb>(
        *layout_, options,
        std::vector<Parameter>{{"weights", {kWeights}, values.first(kWeights)},
                               {"biases", {kBiases}, values.subspan(kWeights), group_of_biases}});
  }

  // Compresses and answers all chunks; those that were not packed are skipped.
  void Step(uint64_t step, const GroupRates& rates = {.learning_rate = 0.1}) {
    lamb_->BeginStep(step, {rates});
    Exchange();
  }

  void Exchange() {
    const absl::Span<const float> gradient = gradient_;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      Answer answer;
      answer.payload = Payload(layout_->PayloadBytes(lamb_->codec(), chunk));
      const std::optional<uint32_t> packed =
          lamb_->Compress(chunk, {gradient.first(kWeights), gradient.subspan(kWeights)},
                          answer.payload.data(), nullptr);
      if (packed == layout_->chunks()[chunk].blocks) {
        lamb_->Apply(chunk, std::move(answer));
      } else {
        lamb_->TakeBack(chunk, answer.payload.data());
      }
    }
    lamb_->EndStep();
  }

  void FillGradient(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& g : gradient_) g = normal(random);
  }

  TensorScale Scale(uint32_t tensor) const { return lamb_->Scales()[tensor]; }
  std::vector<float> FreshVariance() const {
    const HostFloats fresh = lamb_->fresh_variance();
    return {fresh.begin(), fresh.end()};
  }

  std::vector<float> Momentum() const {
    std::vector<float> all;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      const auto momentum = lamb_->Momentum(chunk);
      all.insert(all.end(), momentum.begin(), momentum.end());
    }
    return all;
  }

  std::unique_ptr<Layout> layout_;
  std::vector<float> values_, gradient_;
  std::unique_ptr<OneBitLamb> lamb_;
};

TEST_F(OneBitLambTest, MovesEachTensorByItsTrustRatio) {
  Start({});
  std::fill_n(values_.begin() + kWeights, kBiases, 3);
  gradient_.assign(gradient_.size(), 0.25f);
  Step(0);
  // Adam's first update is 1 wherever there is a gradient: the ratios are those of the parameters.
  EXPECT_NEAR(Scale(0).ratio(), 1, 1e-6);
  EXPECT_NEAR(Scale(1).ratio(), 3, 1e-6);
  EXPECT_NEAR(values_[0], 1 - 0.1, 1e-6);
  EXPECT_NEAR(values_[kWeights], 3 - 0.1 * 3, 1e-6);
}

TEST_F(OneBitLambTest, ParametersStayUntilTheStepEnds) {
  Start({.freeze_step = 1});
  for (uint64_t step = 0; step < 3; ++step) {
    FillGradient(step);
    lamb_->BeginStep(step, {GroupRates()});
    const std::vector<float> before = values_;
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      Answer answer;
      answer.payload = Payload(layout_->PayloadBytes(lamb_->codec(), chunk));
      const absl::Span<const float> gradient = gradient_;
      lamb_->Compress(chunk, {gradient.first(kWeights), gradient.subspan(kWeights)},
                      answer.payload.data(), nullptr);
      EXPECT_FALSE(lamb_->AwaitsEndStep(chunk));
      lamb_->Apply(chunk, std::move(answer));
      EXPECT_TRUE(lamb_->AwaitsEndStep(chunk));
    }
    EXPECT_EQ(values_, before);
    lamb_->EndStep();
    EXPECT_NE(values_, before);
    EXPECT_FALSE(lamb_->AwaitsEndStep(0));
  }
}

TEST_F(OneBitLambTest, WithoutANormTheRatioIsOneAndNoPartOfTheAverage) {
  Start({});
  std::fill_n(values_.begin() + kWeights, kBiases, 0);
  gradient_.assign(gradient_.size(), 1);
  Step(0);
  EXPECT_EQ(Scale(1).ratio(), 1);
  EXPECT_EQ(Scale(1).weight(), 0);
  EXPECT_NEAR(values_[kWeights], -0.1, 1e-6);
  Step(1);
  EXPECT_NEAR(Scale(1).ratio(), 0.1, 1e-6) << "||x|| / ||update||, as of now";
  EXPECT_GT(Scale(1).weight(), 0);
}

TEST_F(OneBitLambTest, GroupsTrainAsIfEachWereAlone) {
  const GroupRates weights = {.learning_rate = 0.1, .weight_decay = 0.2};
  const GroupRates biases = {.learning_rate = 0.03, .weight_decay = 0, .beta1 = 0.8, .beta2 = 0.9};
  const auto train = [&](const std::vector<GroupRates>& rates) {
    Start({.freeze_step = 4, .variance_refresh_interval = 3}, rates.size() - 1);
    for (uint64_t step = 0; step < 14; ++step) {
      FillGradient(step);
      lamb_->BeginStep(step, rates);
      Exchange();
    }
    return values_;
  };
  const std::vector<float> both = train({weights, biases});
  std::vector<float> expected = train({weights});
  const std::vector<float> second = train({biases});
  std::copy(second.begin() + kWeights, second.end(), expected.begin() + kWeights);
  EXPECT_EQ(both, expected);
  EXPECT_NE(train({weights}), expected);
}

// DeepSpeed divides by the norm of the momentum there.
TEST_F(OneBitLambTest, ATensorWhoseMomentumIsZeroAtTheFreezeDividesByNothing) {
  for (const double decay : {0.0, 0.1}) {
    for (const Codec codec : {FLOAT32, BFLOAT16}) {
      Start({.freeze_step = 2, .warm_up_codec = codec});
      for (uint64_t step = 0; step < 6; ++step) {
        FillGradient(step);
        if (step < 4) std::fill_n(gradient_.begin() + kWeights, kBiases, 0);
        Step(step, {.learning_rate = 0.1, .weight_decay = decay});
        EXPECT_THAT(values_, Each(Truly([](float x) { return std::isfinite(x); }))) << step;
        EXPECT_EQ(Scale(1).factor(), 1);
      }
      // It decays, with the ratio 1 / decay that the clip makes 10, and does nothing else.
      EXPECT_NEAR(values_[kWeights], std::pow(1 - 0.1 * 10 * decay, 6), 1e-6);
    }
  }
}

TEST_F(OneBitLambTest, APartOfATensorThatIsSkippedIsInNoNorm) {
  Start({});
  std::fill_n(values_.begin(), 8, 100);  // in chunk 0
  FillGradient(1);
  gradient_[0] = std::numeric_limits<float>::quiet_NaN();
  Step(0);
  EXPECT_NEAR(Scale(0).ratio(), 1, 1e-3) << "that of the ones in chunk 1";
  EXPECT_EQ(values_[0], 100);
  EXPECT_NE(values_[kWeights - 1], 1);
  FillGradient(2);
  Step(1);
  EXPECT_EQ(Scale(0).ratio(), 10);
  EXPECT_NE(values_[0], 100);
}

TEST_F(OneBitLambTest, ATensorThatIsSkippedKeepsItsScale) {
  Start({.freeze_step = 2});
  for (uint64_t step = 0; step < 4; ++step) {
    FillGradient(step);
    if (step % 2 == 1) gradient_[kWeights] = std::numeric_limits<float>::quiet_NaN();
    const TensorScale before = Scale(1);
    const std::vector<float> values = values_;
    Step(step);
    EXPECT_EQ(Scale(1).SerializeAsString() == before.SerializeAsString(), step % 2 == 1) << step;
    EXPECT_EQ(values_[kWeights] == values[kWeights], step % 2 == 1) << step;
  }
}

TEST_F(OneBitLambTest, AFreezeBeginsFreshVarianceAndFactorAnew) {
  Start({.freeze_step = 2, .variance_refresh_interval = 3});
  const GroupRates rates = {.learning_rate = 0.1, .beta2 = 0.9};
  for (uint64_t step = 0; step < 5; ++step) {
    EXPECT_EQ(FreshVariance().empty(), step <= 2);
    FillGradient(step);
    Step(step, rates);
  }
  EXPECT_NE(Scale(0).factor(), 1);
  const double coefficient = Scale(0).average();
  std::vector<float> before = values_;
  const double scale = Scale(0).average() / Scale(0).weight() * Scale(0).factor();
  std::vector<float> denominators(lamb_->variance().begin(), lamb_->variance().end());
  FillGradient(5);
  Step(5, rates);  // refreshes
  EXPECT_FLOAT_EQ(values_[0], before[0] - static_cast<float>(0.1 * scale) *
                                              (lamb_->Momentum(0)[0] * denominators[0]));
  lamb_->BeginStep(6, {rates});
  EXPECT_EQ(Scale(0).factor(), 1);
  EXPECT_EQ(Scale(0).average(), coefficient);
  const HostFloats inverse = lamb_->variance();
  const std::vector<float> fresh = FreshVariance();
  for (size_t i = 0; i < fresh.size(); ++i) {
    EXPECT_FLOAT_EQ(1 / (std::sqrt(fresh[i]) + 1e-8f), inverse[i]) << i;
  }
}

// In every codec, and where nothing is lost the gradients are those that there were.
TEST_F(OneBitLambTest, TheFreshVarianceIsOfGradientsReconstructedFromTheAnswers) {
  const GroupRates rates = {.learning_rate = 0.1, .beta1 = 0.75, .beta2 = 0.5};
  for (const Codec codec : {ONE_BIT, INT4, INT8, FLOAT16, BFLOAT16, FLOAT32}) {
    SCOPED_TRACE(Codec_Name(codec));
    Start({.freeze_step = 2, .codec = codec, .variance_refresh_interval = 4});
    for (uint64_t step = 0; step < 10; ++step) {
      const bool is_one_bit = step >= 2 && step != 6;
      FillGradient(step);
      lamb_->BeginStep(step, {rates});
      const std::vector<float> momentum = Momentum(), fresh = FreshVariance(), values = values_;
      Exchange();
      if (!is_one_bit) continue;
      const std::vector<float> momentum_after = Momentum(), fresh_after = FreshVariance();
      for (size_t i = 0; i < values.size(); ++i) {
        const double g = (momentum_after[i] - 0.75 * momentum[i]) / 0.25;
        EXPECT_NEAR(fresh_after[i], 0.5 * fresh[i] + 0.5 * g * g, 1e-5 * (1 + g * g));
        if (codec == FLOAT32) {
          EXPECT_NEAR(g, gradient_[i], 1e-5);
        }
        const TensorScale scale = Scale(i < kWeights ? 0 : 1);
        const double rate = 0.1 * scale.average() / scale.weight() * scale.factor();
        const double wanted = values[i] - rate * momentum_after[i] * lamb_->variance()[i];
        EXPECT_NEAR(values_[i], wanted, 1e-5 * (1 + std::abs(wanted)));
      }
    }
  }
}

TEST_F(OneBitLambTest, WrongOptionsAreNamed) {
  const auto message = [](const LambOptions& lamb) {
    return std::string(CheckOptions(OptimizerOptions{.lamb = lamb}).message());
  };
  EXPECT_EQ(message({}), "");
  EXPECT_THAT(message({.max_coeff = 0.001}), HasSubstr("max_coeff is 0.001"));
  EXPECT_THAT(message({.min_coeff = 0}), HasSubstr("min_coeff is 0"));
  EXPECT_THAT(message({.coeff_beta = 1}), HasSubstr("coeff_beta is 1"));
  EXPECT_THAT(message({.factor_max = 0.9}), HasSubstr("factor_max is 0.9"));
  EXPECT_THAT(message({.factor_min = 1.1}), HasSubstr("factor_min is 1.1"));
  EXPECT_THAT(message({.factor_threshold = -0.1}), HasSubstr("factor_threshold is -0.1"));
  EXPECT_NE(DescribeOptions({.lamb = LambOptions()}), DescribeOptions({}));
  EXPECT_NE(DescribeOptions({.lamb = LambOptions()}),
            DescribeOptions({.lamb = LambOptions{.factor_max = 3}}));
}

}  // namespace
}  // namespace signpost
