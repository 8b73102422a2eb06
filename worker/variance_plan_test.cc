#include "worker/variance_plan.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "proto/aggregator.pb.h"
#include "worker/power.h"

namespace signpost {
namespace {

using Kind = VariancePlan::Kind;

// The sum of an Adam variance after the squared gradients, as LookAtVariance sees it.
double SumAfter(const std::vector<double>& squares, double beta2) {
  double v = 0;
  for (double square : squares) v = beta2 * v + (1 - beta2) * square;
  return v;
}

TEST(VarianceFits, TellsWhetherTheLastGradientsAreThoseOfTheVariance) {
  constexpr double kBeta2 = 0.99;
  const auto fits = [](double recent) {
    std::vector<double> squares(96, 1.0);
    const double before = SumAfter(squares, kBeta2);
    squares.insert(squares.end(), 32, recent);
    const double sum = SumAfter(squares, kBeta2);
    return VarianceFits(sum, before, sum / (1 - Power(kBeta2, squares.size())), kBeta2, 32);
  };
  EXPECT_TRUE(fits(1));
  EXPECT_TRUE(fits(0.1));
  EXPECT_TRUE(fits(1.5));
  EXPECT_FALSE(fits(1e-3)) << "gradients have vanished since";
  EXPECT_FALSE(fits(0));
  EXPECT_FALSE(fits(1000)) << "they explode";
  EXPECT_FALSE(VarianceFits(/*sum=*/0, 0, 0, kBeta2, 32)) << "no gradient has counted";
  EXPECT_FALSE(VarianceFits(INFINITY, 1, INFINITY, kBeta2, 32));
  EXPECT_FALSE(VarianceFits(NAN, 1, NAN, kBeta2, 32));
  EXPECT_TRUE(VarianceFits(1e-3, 0, 1e-3 / (1 - Power(kBeta2, 7)), kBeta2, 7))
      << "there was no look before";
}

TEST(VarianceFits, LooksAsOftenAsTheVarianceForgets) {
  EXPECT_EQ(LookInterval(0.9), 10);
  EXPECT_EQ(LookInterval(0.999), 32);
  EXPECT_EQ(LookInterval(0), 1);
}

TEST(WeightsOfRefresh, MakeTheVarianceTheCorrectedMeanOfAllGradients) {
  // v after 10 steps, each gradient one step; then gradients that stand for 3 steps each.
  constexpr double kBeta2 = 0.95;
  double raw = 0, corrected = 0;
  uint64_t steps = 0;
  for (const uint64_t standing_for : {1, 1, 1, 1, 3, 3, 1, 50}) {
    const double square = 2 + static_cast<double>(steps % 7);
    for (uint64_t s = 0; s < standing_for; ++s) raw = kBeta2 * raw + (1 - kBeta2) * square;
    const RefreshWeights weights = WeightsOfRefresh(kBeta2, steps, standing_for);
    EXPECT_NEAR(weights.kept + weights.added, 1, 1e-12);
    corrected = weights.kept * corrected + weights.added * square;
    steps += standing_for;
    EXPECT_NEAR(corrected, raw / (1 - std::pow(kBeta2, steps)), 1e-12) << "after " << steps;
  }
  EXPECT_EQ(WeightsOfRefresh(kBeta2, 0, 4).kept, 0) << "there is nothing to keep";
}

std::vector<uint64_t> RefreshesOf(Schedule& schedule, uint64_t freeze, uint64_t end,
                                  uint64_t unfit_at = 0) {
  VariancePlan plan(schedule);
  plan.Freeze(freeze);
  std::vector<uint64_t> refreshes;
  for (uint64_t step = freeze; step < end; ++step) {
    if (step > freeze) plan.BeginStep(step, /*fits=*/step != unfit_at, /*youngest=*/0);
    if (VariancePlan::KindOf(schedule, step) == Kind::kRefresh) refreshes.push_back(step);
  }
  return refreshes;
}

TEST(VariancePlan, RefreshesAfterEveryQuarterOfTheStepsSoFar) {
  Schedule schedule;
  EXPECT_EQ(RefreshesOf(schedule, 64, 141),
            (std::vector<uint64_t>{81, 82, 83, 84, 107, 108, 109, 110, 139, 140}));
  Schedule early;
  EXPECT_EQ(RefreshesOf(early, 1, 24), (std::vector<uint64_t>{10, 11, 12, 13, 23}));
}

TEST(VariancePlan, RefreshesAtOnceWhereTheVarianceDoesNotFit) {
  Schedule schedule;
  EXPECT_EQ(RefreshesOf(schedule, 400, 440, /*unfit_at=*/420),
            (std::vector<uint64_t>{421, 422, 423, 424, 425, 426, 427, 428}));
  EXPECT_EQ(VariancePlan::KindOf(schedule, 420), Kind::kSettle);
  EXPECT_EQ(schedule.refresh_step(), 429 + 107);
  Schedule resting;
  EXPECT_TRUE(RefreshesOf(resting, 400, 440, /*unfit_at=*/407).empty()) << "too soon";
}

TEST(VariancePlan, StepsBetweenRefreshesAreSharedAmongTheFirstOfThem) {
  Schedule schedule;
  VariancePlan plan(schedule);
  plan.Freeze(100);  // step 125 settles the momentum, and [126, 130) refresh
  plan.Extend(128);  // as they do for a tensor whose first gradient is in step 128
  EXPECT_EQ(schedule.refresh_end(), 128 + VariancePlan::kFirstSteps);
  EXPECT_EQ(VariancePlan::StepsOf(schedule, 126, 0), 30 / 4);
  EXPECT_EQ(VariancePlan::StepsOf(schedule, 129, 0), 30 / 4);
  EXPECT_EQ(VariancePlan::StepsOf(schedule, 130, 0), 1);
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 126, 0), 100);
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 128, 0), 100 + 2 * 7);
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 132, 0), 100 + 4 * 7 + 2);
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 126, 40), 60) << "a tensor that began at step 40";
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 128, 128), 0);
  EXPECT_EQ(VariancePlan::StepsBefore(schedule, 132, 128), 4);
}

TEST(VariancePlan, AYoungTensorIsRefreshedMoreOften) {
  Schedule schedule;
  VariancePlan plan(schedule);
  plan.Freeze(1000);
  plan.Extend(1250);
  for (uint64_t step = 1001; step <= 1314; ++step) plan.BeginStep(step, true, /*youngest=*/1250);
  EXPECT_EQ(schedule.variance_steps(), 1314);
  EXPECT_EQ(schedule.refresh_step(), 1314 + (1314 - 1250) / 4);
}

TEST(VariancePlan, KnowsTheRefreshesThatHaveJustEnded) {
  Schedule schedule;
  VariancePlan plan(schedule);
  plan.Freeze(100);
  for (uint64_t step = 101; step <= 131; ++step) plan.BeginStep(step, true, 0);
  ASSERT_EQ(schedule.variance_steps(), 130);
  for (uint64_t step = 100; step <= 131; ++step) {
    const Kind kind = VariancePlan::KindOf(schedule, step);
    EXPECT_EQ(kind == Kind::kSettle, step == 125) << step;
    EXPECT_EQ(kind == Kind::kRefresh, step >= 126 && step < 130) << step;
  }
}

}  // namespace
}  // namespace signpost
