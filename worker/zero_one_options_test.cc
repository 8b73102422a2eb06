#include "worker/zero_one_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ZeroOneSchedule, UpdatesTheVarianceAtTheStepsOfThePaper) {
  const ZeroOneSchedule schedule({.var_update_scaler = 2}, 100);
  std::vector<uint64_t> updates, intervals;
  for (uint64_t step = 0; step < 32; ++step) {
    const ZeroOneSchedule::Update update = schedule.LastUpdate(step);
    if (update.step != step) continue;
    updates.push_back(step);
    intervals.push_back(update.interval);
  }
  EXPECT_THAT(updates, ElementsAre(0, 1, 2, 4, 6, 10, 14, 22, 30));
  EXPECT_THAT(intervals, ElementsAre(1, 1, 1, 2, 2, 4, 4, 8, 8));
}

// k_0 = 0 and k_{j+1} = k_j + 2^floor(j / kappa), one after the other.
TEST(ZeroOneSchedule, FindsTheLastUpdateOfEachStep) {
  for (const uint32_t scaler : {1, 3, 16}) {
    const ZeroOneSchedule schedule({.var_update_scaler = scaler}, 1);
    uint64_t last = 0, before = 0, next = 1;
    int updates = 1;
    for (uint64_t step = 0; step < 500; ++step) {
      if (step == next) {
        before = last;
        last = next;
        next += uint64_t{1} << (updates++ / scaler);
      }
      const ZeroOneSchedule::Update update = schedule.LastUpdate(step);
      EXPECT_EQ(update.step, last);
      EXPECT_EQ(update.interval, last == 0 ? 1 : last - before);
    }
  }
}

// H = min(2^floor(c / s), H_max), one interval after the other.
TEST(ZeroOneSchedule, FindsTheStepsOfEachRound) {
  for (const uint32_t clipper : {1, 2, 5, 16}) {
    for (const uint64_t scaler : {1, 2, 7, 100}) {
      const uint64_t freeze_step = 3;
      const ZeroOneSchedule schedule({.local_step_scaler = scaler, .local_step_clipper = clipper},
                                     freeze_step);
      uint64_t step = 0;
      for (uint64_t round = 0; round < 400; ++round) {
        uint64_t steps = 1;
        if (step >= freeze_step) {
          steps = std::min<double>(std::pow(2, (step - freeze_step) / scaler), clipper);
        }
        const ZeroOneSchedule::Interval interval = schedule.StepsOf(round);
        ASSERT_EQ(interval.first_step, step) << round;
        ASSERT_EQ(interval.steps, steps) << round;
        step += steps;
      }
    }
  }
}

// What DeepSpeed's counters do, step after step.
TEST(ZeroOneSchedule, OfDeepSpeedCountsAsItDoes) {
  for (const uint32_t scaler : {1, 3, 16}) {
    for (const uint32_t clipper : {1, 2, 5, 16}) {
      const uint64_t freeze_step = 40;
      const ZeroOneSchedule schedule({.var_update_scaler = scaler,
                                      .local_step_scaler = 2 * scaler,
                                      .local_step_clipper = clipper},
                                     freeze_step, /*as_deepspeed=*/true);
      uint64_t interval = 1, counter = 0, last = 0;
      for (uint64_t step = 1; step < freeze_step; ++step) {
        if ((step + 1) % interval == 0) {
          last = step;
          if (++counter == scaler) {
            counter = 0;
            interval *= 2;
          }
        }
        ASSERT_EQ(schedule.LastUpdate(step).step, last) << step << " " << scaler;
      }
      interval = 1;
      counter = 0;
      uint64_t round = freeze_step, first_step = freeze_step;
      for (uint64_t step = freeze_step; step < 500; ++step) {
        if ((step + 1) % interval == 0) {
          ASSERT_EQ(schedule.StepsOf(round).first_step, first_step) << round;
          ASSERT_EQ(schedule.StepsOf(round).steps, step + 1 - first_step) << round;
          ++round;
          first_step = step + 1;
        }
        if (++counter == 2 * scaler) {
          counter = 0;
          interval = std::min<uint64_t>(2 * interval, clipper);
        }
      }
    }
  }
}

TEST(ZeroOneSchedule, WithoutAScalerTakesTheFreezeStepForIt) {
  const ZeroOneSchedule schedule({}, 10);
  EXPECT_EQ(schedule.StepsOf(19).steps, 1);
  EXPECT_EQ(schedule.StepsOf(20).steps, 2);
}

// Of which the freeze step is one more.
TEST(ZeroOneSchedule, OfDeepSpeedWithoutAScalerTakesItsVarFreezeStep) {
  const uint64_t var_freeze_step = 10;
  const ZeroOneSchedule schedule({}, var_freeze_step + 1, /*as_deepspeed=*/true);
  const ZeroOneSchedule given({.local_step_scaler = var_freeze_step}, var_freeze_step + 1,
                              /*as_deepspeed=*/true);
  for (uint64_t round = 0; round < 200; ++round) {
    ASSERT_EQ(schedule.StepsOf(round).first_step, given.StepsOf(round).first_step) << round;
    ASSERT_EQ(schedule.StepsOf(round).steps, given.StepsOf(round).steps) << round;
  }
}

TEST(ZeroOneOptions, ThatCannotBeAreRefusedByName) {
  EXPECT_TRUE(CheckZeroOneOptions({}, 1).ok());
  const auto message = [](const ZeroOneOptions& options, uint64_t freeze_step = 1) {
    return std::string(CheckZeroOneOptions(options, freeze_step).message());
  };
  EXPECT_THAT(message({.var_update_scaler = 0}), HasSubstr("var_update_scaler is 0, wanted 1 to"));
  EXPECT_THAT(message({.local_step_scaler = uint64_t{1} << 41}), HasSubstr("local_step_scaler"));
  EXPECT_THAT(message({.local_step_clipper = 0}), HasSubstr("local_step_clipper is 0, wanted 1"));
  EXPECT_THAT(message({.local_step_clipper = 65537}), HasSubstr("wanted 1 to 65536"));
  EXPECT_THAT(message({}, ~uint64_t{0}), HasSubstr("freeze_step of 0/1 Adam is a number of steps"));
}

}  // namespace
}  // namespace signpost
