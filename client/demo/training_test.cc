#include "client/demo/training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace signpost::demo {
namespace {

using ::testing::HasSubstr;

TEST(LearningRate, RisesOverTheFirstTwentiethOfTheSteps) {
  const TrainingOptions options = {.steps = 200, .learning_rate = 1};
  EXPECT_DOUBLE_EQ(LearningRate(options, 0), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(options, 4), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(options, 9), 1);
}

TEST(LearningRate, FallsAlongACosineToAFiftieth) {
  const TrainingOptions options = {.steps = 200, .learning_rate = 1};
  EXPECT_DOUBLE_EQ(LearningRate(options, 10), 1);
  EXPECT_DOUBLE_EQ(LearningRate(options, 105), 0.51);  // half way
  EXPECT_DOUBLE_EQ(LearningRate(options, 200), 0.02);
}

TEST(LearningRate, IsTheHighestInARunOfOneStep) {
  EXPECT_EQ(LearningRate({.steps = 1, .learning_rate = 0.5}, 0), 0.5);
}

TEST(TrainingOptions, AreFineAsTheyAre) { EXPECT_TRUE(CheckOptions({}).ok()); }

TEST(TrainingOptions, NameTheOneThatIsOutOfRange) {
  const auto expect_error = [](const TrainingOptions& options, const std::string& message) {
    const absl::Status status = CheckOptions(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(message));
  };
  expect_error({.model = {.context = 65}}, "option --context is 65, wanted 1 to 64");
  expect_error({.model = {.embedding = 0}}, "option --embedding is 0, wanted 1 to 1024");
  expect_error({.model = {.hidden = 0}}, "option --hidden is 0, wanted 1 to 8192");
  expect_error({.model = {.layers = 0}}, "option --layers is 0, wanted 1 to 16");
  expect_error({.steps = 0}, "option --steps is 0, wanted 2 to 1000000000");
  expect_error({.batch = 0}, "option --batch is 0, wanted 1 to 65536");
  expect_error({.learning_rate = 0}, "option --learning-rate is 0, wanted");
  expect_error({.learning_rate = std::numeric_limits<double>::quiet_NaN()},
               "option --learning-rate is nan");
  expect_error({.steps = 100, .freeze_step = 0}, "option --freeze-step is 0, wanted 1 to 99");
  expect_error({.steps = 100, .freeze_step = 100}, "option --freeze-step is 100, wanted 1 to 99");
}

TEST(TrainingOptions, NeedADirectoryForCheckpoints) {
  EXPECT_FALSE(CheckOptions({.checkpoint_every = 5}).ok());
  EXPECT_FALSE(CheckOptions({.resume = true}).ok());
  EXPECT_TRUE(CheckOptions({.checkpoint_directory = "d", .checkpoint_every = 5}).ok());
}

TEST(TrainAsWorker, RefusesOptionsBeforeItJoins) {
  EXPECT_EQ(TrainAsWorker({.batch = 0}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(TrainAsWorker, NamesATextThatIsMissing) {
  EXPECT_THAT(TrainAsWorker({.text = {"/nowhere/at.all"}}).message(), HasSubstr("/nowhere/at.all"));
}

TEST(LiveLine, SaysWhereTheTimeAndTheBytesGo) {
  // 10 steps of 412 ms, 7% of which are validation and checkpoints; 1000 parameters cost fp32 8000
  // bytes a step.
  Interval interval = {.steps = 10,
                       .training_bpb = 2.3149,
                       .duration = absl::Milliseconds(4120),
                       .in_steps = 0.93 * absl::Milliseconds(4120),
                       .wire = 0.18 * absl::Milliseconds(4120),
                       .wait = 0.11 * absl::Milliseconds(4120),
                       .bytes = {.sent = 1434, .received = 1434}};
  EXPECT_EQ(FormatLiveLine(1200, interval, /*parameters=*/1000, /*world_size=*/4),
            "step 1200  loss 2.31  412 ms (compute 64% wire 18% wait 11% other 7%)  27.9x fewer "
            "bytes  4/4 workers");
  interval.late_workers = 1;
  EXPECT_THAT(FormatLiveLine(1200, interval, /*parameters=*/1000, /*world_size=*/4),
              HasSubstr("  3/4 workers"));
}

}  // namespace
}  // namespace signpost::demo
