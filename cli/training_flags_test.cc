#include "cli/training_flags.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

demo::TrainingOptions Parse(std::vector<std::string> arguments) {
  demo::TrainingOptions options;
  CLI::App app;
  AddTrainingFlags(app, options);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  app.parse(arguments);
  return options;
}

void ExpectEqual(const demo::TrainingOptions& a, const demo::TrainingOptions& b) {
  EXPECT_EQ(a.text, b.text);
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.freeze_step, b.freeze_step);
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.batch, b.batch);
  EXPECT_EQ(a.learning_rate, b.learning_rate);
  EXPECT_EQ(a.model.context, b.model.context);
  EXPECT_EQ(a.model.embedding, b.model.embedding);
  EXPECT_EQ(a.model.hidden, b.model.hidden);
  EXPECT_EQ(a.model.layers, b.model.layers);
}

TEST(TrainingFlags, ReachTheWorkersAsTheyWereGiven) {
  const demo::TrainingOptions options = {
      .text = {"a.txt", "b c.txt"},
      .model = {.context = 3, .embedding = 5, .hidden = 7, .layers = 2},
      .steps = 11,
      .seed = 13,
      .batch = 17,
      .learning_rate = 1.0 / 3,
      .freeze_step = 4};
  ExpectEqual(Parse(TrainingArguments(options)), options);
}

TEST(TrainingFlags, LeaveTheDefaultsWhereNothingWasGiven) {
  ExpectEqual(Parse({}), {});
  ExpectEqual(Parse(TrainingArguments({})), {});
}

}  // namespace
}  // namespace signpost::cli
