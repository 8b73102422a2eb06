#include "worker/zero_one_adam.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace signpost {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

// What a chunk's block has to be not to be packed, though it is finite.
constexpr float kFarTooMuch = 0x1p56f;

// Round 3 is of step 3, round 4 of steps 4 and 5, round 5 of steps 6 to 8, round 6 of 9 to 11.
constexpr ZeroOneOptions kShort = {
    .var_update_scaler = 1, .local_step_scaler = 1, .local_step_clipper = 3};
constexpr uint64_t kFreezeStep = 3;

// One worker whose answers are its own contributions. Blocks of 8, chunks of 16, tensors of 24, 8
// and so on, each in a parameter group of its own.
class Alone {
 public:
  explicit Alone(std::vector<size_t> tensors, Codec codec = ONE_BIT, Codec variance_codec = FLOAT32)
      : sizes_(std::move(tensors)) {
    OptimizerOptions options = {.freeze_step = kFreezeStep,
                                .codec = codec,
                                .variance_codec = variance_codec,
                                .zero_one = kShort};
    JobOptions job;
    job.set_block_elements(8);
    job.set_chunk_elements(16);
    job.set_gamma(1.35f);
    std::vector<Tensor> tensors_of_layout;
    size_t elements = 0;
    for (const size_t size : sizes_) {
      Tensor& tensor = tensors_of_layout.emplace_back();
      tensor.set_name(std::to_string(elements));
      tensor.add_shape(size);
      elements += size;
    }
    layout_ = std::make_unique<Layout>(*Layout::Create(tensors_of_layout, job));
    values_.assign(elements, 1);
    gradient.assign(elements, 0);
    std::vector<Parameter> parameters;
    size_t first = 0;
    for (const size_t size : sizes_) {
      parameters.push_back({.name = std::to_string(first),
                            .shape = {size},
                            .values = absl::MakeSpan(values_).subspan(first, size),
                            .group = static_cast<uint32_t>(parameters.size())});
      first += size;
    }
    adam_ = std::make_unique<ZeroOneAdam>(*layout_, options, std::move(parameters));
  }

  // A round, or a local step. Chunks that were not packed are skipped.
  void Step(const std::vector<GroupRates>& rates) {
    adam_->BeginStep(round_, rates);
    TakeStep();
  }

  void TakeStep() {
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      if (adam_->IsLocal()) {
        adam_->StepLocally(chunk, Gradients());
        continue;
      }
      Answer answer;
      answer.payload = Payload(layout_->PayloadBytes(adam_->codec(), chunk));
      const auto packed = adam_->Compress(chunk, Gradients(), answer.payload.data(), nullptr);
      payloads_.push_back(
          std::vector<uint8_t>(answer.payload.span().begin(), answer.payload.span().end()));
      if (packed == layout_->chunks()[chunk].blocks) {
        adam_->Apply(chunk, std::move(answer));
      } else {
        adam_->TakeBack(chunk, answer.payload.data());
      }
    }
    if (!adam_->IsLocal()) ++round_;
  }

  // As another worker that has the states of before the round.
  void Follow(const StepRates& rates, const std::vector<std::vector<uint8_t>>& payloads,
              bool is_skipped) {
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      adam_->FollowStep(round_, rates);
      if (is_skipped && chunk == 0) {
        adam_->TakeBack(chunk, nullptr);
        continue;
      }
      Answer answer;
      answer.payload = Payload(payloads[chunk].size());
      std::copy(payloads[chunk].begin(), payloads[chunk].end(), answer.payload.data());
      adam_->Apply(chunk, std::move(answer));
    }
    ++round_;
  }

  std::vector<Gradient> Gradients() const {
    std::vector<Gradient> gradients;
    size_t first = 0;
    for (const size_t size : sizes_) {
      gradients.push_back(absl::MakeConstSpan(gradient).subspan(first, size));
      first += size;
    }
    return gradients;
  }

  void FillGradient(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& g : gradient) g = normal(random);
  }

  void CopyStateTo(Alone& other) const {
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      other.adam_->SetState(chunk, adam_->State(chunk).span());
    }
    other.adam_->SetSchedule(adam_->schedule());
    other.round_ = round_;
  }
  std::vector<std::vector<uint8_t>> States() const {
    std::vector<std::vector<uint8_t>> states;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      const Payload state = adam_->State(chunk);
      states.emplace_back(state.span().begin(), state.span().end());
    }
    return states;
  }

  std::vector<float> Error() const { return {adam_->error().begin(), adam_->error().end()}; }
  std::vector<float> Sum() const {
    const HostFloats sum = adam_->local_sum();
    return {sum.begin(), sum.end()};
  }
  std::vector<float> Momentum() const {
    std::vector<float> all;
    for (uint32_t chunk = 0; chunk < layout_->chunks().size(); ++chunk) {
      for (const float m : adam_->Momentum(chunk)) all.push_back(m);
    }
    return all;
  }

  ZeroOneAdam& adam() { return *adam_; }
  const std::vector<float>& values() const { return values_; }
  uint64_t round() const { return round_; }
  // Of all rounds, chunk by chunk; cleared by whoever wants some of them.
  std::vector<std::vector<uint8_t>>& payloads() { return payloads_; }

  std::vector<float> gradient;

 private:
  const std::vector<size_t> sizes_;
  std::unique_ptr<Layout> layout_;
  std::vector<float> values_;
  std::unique_ptr<ZeroOneAdam> adam_;
  uint64_t round_ = 0;
  std::vector<std::vector<uint8_t>> payloads_;
};

constexpr GroupRates kRates = {.learning_rate = 0.1, .weight_decay = 0.5};

// Up to the beginning of round 5.
void TrainToTheInterval(Alone& alone, const std::vector<GroupRates>& rates) {
  for (uint32_t step = 0; step < 6; ++step) {
    alone.FillGradient(step);
    alone.Step(rates);
  }
  ASSERT_EQ(alone.round(), 5);
}

TEST(ZeroOneAdam, GroupsTrainAsIfEachWereAlone) {
  const auto rates_of = [](uint32_t step) {
    std::vector<GroupRates> rates = {{.learning_rate = 0.1 / (1 + step), .weight_decay = 0.2},
                                     {.learning_rate = 0.3, .weight_decay = 0.1, .beta2 = 0.9}};
    if (step >= 9 && step <= 11) rates[1].learning_rate = 0;  // an interval
    if (step == 13) rates[1].weight_decay = 0.7;
    return rates;
  };
  Alone both({24, 8}), first({24}), second({8});
  for (uint32_t step = 0; step < 24; ++step) {
    both.FillGradient(step);
    first.gradient.assign(both.gradient.begin(), both.gradient.begin() + 24);
    second.gradient.assign(both.gradient.begin() + 24, both.gradient.end());
    const std::vector<GroupRates> rates = rates_of(step);
    both.Step(rates);
    first.Step({rates[0]});
    second.Step({rates[1]});
    std::vector<float> expected = first.values();
    expected.insert(expected.end(), second.values().begin(), second.values().end());
    ASSERT_EQ(both.values(), expected) << step;
  }
}

TEST(ZeroOneAdam, WhatACodecTakesForZeroInEachUpdateTrainsAllTheSame) {
  // Steps 0 and 1 update the variance. In int4, 1 is nothing beside 100.
  const std::vector<GroupRates> rates(1);
  for (const Codec codec : {FLOAT32, BFLOAT16, INT4}) {
    Alone alone({8}, ONE_BIT, codec);
    alone.gradient = {100, 1, 1, 1, 1, 1, 1, 0};
    std::vector<float> before;
    for (uint64_t step = 0; step <= kFreezeStep; ++step) {
      before = alone.values();
      alone.Step(rates);
      if (codec == INT4 && step < 2) {
        EXPECT_EQ(alone.values()[1], 1);
      }
    }
    EXPECT_LT(before[1], 1) << "the one-bit gradient of step 2";
    EXPECT_LT(alone.values()[1], before[1]) << "the momentum of step 3";
    // What never had a gradient is not known in integers.
    EXPECT_EQ(alone.values()[7] == 1, codec != INT4);
  }
}

TEST(ZeroOneAdam, ARoundThatIsSkippedPutsMeansIntoErrorsAndLeavesADecayedAnchor) {
  Alone alone({24, 8});
  const std::vector<GroupRates> rates = {kRates, kRates};
  TrainToTheInterval(alone, rates);
  const std::vector<float> anchor = alone.values(), error = alone.Error();
  for (uint32_t step = 6; step < 8; ++step) {
    alone.FillGradient(step);
    alone.Step(rates);
  }
  const std::vector<float> sum = alone.Sum(), momentum = alone.Momentum();
  alone.FillGradient(8);
  alone.gradient[3] = kFarTooMuch;  // in chunk 0, which has 16 elements
  alone.Step(rates);
  ASSERT_EQ(alone.round(), 6);
  EXPECT_TRUE(alone.adam().TakeBlocksLeftAlone().empty());
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(alone.Momentum()[i], 0) << i;
    EXPECT_FLOAT_EQ(alone.values()[i], anchor[i] * (1 - 3 * 0.1f * 0.5f)) << i;
    const float m = 0.9f * momentum[i] + 0.1f * alone.gradient[i];
    const float mean = (sum[i] + 0.1f * m) / 0.3f;
    EXPECT_NEAR(alone.Error()[i], i < 8 ? error[i] : error[i] + mean, 1e-5) << i;
  }
  // The other chunk has its round.
  for (size_t i = 16; i < 32; ++i) EXPECT_NE(alone.Momentum()[i], 0) << i;
  EXPECT_FALSE(alone.adam().HasLocalSteps(0));
}

TEST(ZeroOneAdam, WhoFollowsARoundHasWhatTheOthersHave) {
  for (const bool is_skipped : {false, true}) {
    Alone alone({24, 8}), follower({24, 8});
    const std::vector<GroupRates> rates = {kRates, {.learning_rate = 0.2}};
    TrainToTheInterval(alone, rates);
    alone.CopyStateTo(follower);
    alone.payloads().clear();
    for (uint32_t step = 6; step < 9; ++step) {
      alone.FillGradient(step);
      if (is_skipped) alone.gradient[3] = kFarTooMuch;
      alone.Step(rates);
    }
    follower.Follow(MessageOf(rates, alone.adam().schedule()), alone.payloads(), is_skipped);
    EXPECT_EQ(follower.States(), alone.States());
    // And has the same local steps.
    follower.adam().SetSchedule(alone.adam().schedule());
    for (uint32_t step = 9; step < 11; ++step) {
      for (Alone* one : {&alone, &follower}) {
        one->FillGradient(step);
        one->Step(rates);
      }
    }
    EXPECT_EQ(follower.values(), alone.values());
  }
}

TEST(ZeroOneAdam, AMissedIntervalSendsWhatGradientsOfZeroWould) {
  for (const double learning_rate : {0.1, 0.0}) {
    const GroupRates changing = {.learning_rate = learning_rate, .weight_decay = 0.5};
    Alone zeros({24, 8}, FLOAT32), missed({24, 8}, FLOAT32);
    for (Alone* one : {&zeros, &missed}) {
      TrainToTheInterval(*one, {kRates, kRates});
      one->payloads().clear();
      one->gradient.assign(32, 0);
    }
    for (int step = 5; step < 8; ++step) {
      zeros.Step({changing, {.learning_rate = 0.01 * step, .beta1 = 0.8}});
    }
    missed.adam().BeginMissedStep(
        5, MessageOf({changing, {.learning_rate = 0.07, .beta1 = 0.8}}, zeros.adam().schedule()));
    missed.TakeStep();
    ASSERT_EQ(missed.payloads().size(), zeros.payloads().size());
    for (size_t chunk = 0; chunk < zeros.payloads().size(); ++chunk) {
      const auto* wanted = reinterpret_cast<const float*>(zeros.payloads()[chunk].data());
      const auto* got = reinterpret_cast<const float*>(missed.payloads()[chunk].data());
      for (size_t i = 0; i < 16; ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6) << chunk << " " << i;
    }
    EXPECT_EQ(missed.adam().schedule().begun_steps(), 6);
  }
}

TEST(ZeroOneAdam, ABlockThatIsNotFiniteIsLeftAloneByThatStepOnly) {
  Alone alone({24, 8});
  const std::vector<GroupRates> rates = {kRates, kRates};
  TrainToTheInterval(alone, rates);
  const std::vector<float> before = alone.values();
  alone.FillGradient(6);
  alone.gradient[12] = std::numeric_limits<float>::quiet_NaN();
  alone.Step(rates);
  const std::vector<BlockLeftAlone> left_alone = alone.adam().TakeBlocksLeftAlone();
  ASSERT_EQ(left_alone.size(), 1);
  EXPECT_EQ(left_alone[0].chunk, 0);
  EXPECT_EQ(left_alone[0].block, 1);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(alone.values()[i] == before[i], i >= 8 && i < 16) << i;
  }
  alone.FillGradient(7);
  alone.Step(rates);
  EXPECT_TRUE(alone.adam().TakeBlocksLeftAlone().empty());
  EXPECT_NE(alone.values()[12], before[12]);
}

// As from a rank that is in the middle of an interval, or has other groups.
TEST(ZeroOneAdam, AScheduleFromOutsideHasNeitherLocalStepsNorGroupsForThisWorker) {
  Alone alone({24, 8});
  const std::vector<GroupRates> rates = {kRates, kRates};
  TrainToTheInterval(alone, rates);
  Schedule schedule = alone.adam().schedule();
  schedule.set_local_steps(2);
  for (int g = 0; g < 100; ++g) schedule.add_local_sums()->set_learning_rate(1);
  alone.adam().SetSchedule(schedule);
  alone.adam().BeginStep(5, rates);
  EXPECT_TRUE(alone.adam().IsLocal());
  EXPECT_EQ(alone.adam().schedule().local_steps(), 1);
  EXPECT_EQ(alone.adam().schedule().local_sums_size(), 2);
}

}  // namespace
}  // namespace signpost
