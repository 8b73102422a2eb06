#include "node/definition.h"

#include <filesystem>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace signpost::node {
namespace {

// Every option off its default, and no two numbers alike.
TEST(Definition, BringsEveryOptionToTheNodesWorker) {
  SessionOptions session;
  session.worker.block_elements = 16;
  session.worker.chunk_elements = 64;
  session.worker.gamma = 1.25f;
  session.worker.join_timeout = absl::Seconds(11);
  session.worker.exchange_timeout = absl::Seconds(12);
  session.worker.round_deadline = absl::Seconds(13);
  session.worker.min_workers = 3;
  session.worker.codec_library = "libcodec.so";
  session.worker.codec_options = "ratio=0.5";
  OptimizerOptions optimizer = {.bias_correction = false,
                                .freeze_step = 7,
                                .warm_up_codec = INT8,
                                .codec = CUSTOM,
                                .variance_codec = INT4,
                                .variance_floor = 0.125,
                                .variance_refresh_interval = 9,
                                .as_deepspeed = true};
  optimizer.lamb = {.max_coeff = 21,
                    .min_coeff = 0.02,
                    .coeff_beta = 0.7,
                    .factor_max = 5,
                    .factor_min = 0.25,
                    .factor_threshold = 0.3};
  optimizer.zero_one = {.var_update_scaler = 22, .local_step_scaler = 23, .local_step_clipper = 24};
  std::vector<float> values(6);
  const std::vector<Parameter> parameters = {
      {.name = "w", .shape = {2, 2}, .values = absl::MakeSpan(values).first(4)},
      {.name = "b", .shape = {2}, .values = absl::MakeSpan(values).last(2), .group = 1}};
  const Definition definition = DefinitionOf(session, optimizer, parameters);

  WorkerOptions worker;
  SetWorkerOptions(definition.options(), worker);
  EXPECT_EQ(worker.block_elements, 16);
  EXPECT_EQ(worker.chunk_elements, 64);
  EXPECT_EQ(worker.gamma, 1.25f);
  EXPECT_EQ(worker.join_timeout, absl::Seconds(11));
  EXPECT_EQ(worker.exchange_timeout, absl::Seconds(12));
  EXPECT_EQ(worker.round_deadline, absl::Seconds(13));
  EXPECT_EQ(worker.min_workers, 3);
  EXPECT_EQ(worker.codec_library, std::filesystem::absolute("libcodec.so"));
  EXPECT_EQ(worker.codec_options, "ratio=0.5");

  const OptimizerOptions there = OptimizerOptionsOf(definition.options());
  EXPECT_EQ(DescribeOptions(there), DescribeOptions(optimizer));
  ASSERT_TRUE(there.lamb);
  EXPECT_EQ(there.lamb->max_coeff, 21);
  EXPECT_EQ(there.lamb->min_coeff, 0.02);
  EXPECT_EQ(there.lamb->factor_threshold, 0.3);
  ASSERT_TRUE(there.zero_one);
  EXPECT_EQ(there.zero_one->var_update_scaler, 22);
  EXPECT_EQ(there.zero_one->local_step_scaler, 23);
  EXPECT_EQ(there.zero_one->local_step_clipper, 24);

  const std::vector<Parameter> of_node = ParametersOf(definition, absl::MakeSpan(values));
  ASSERT_EQ(of_node.size(), 2);
  EXPECT_EQ(of_node[0].name, "w");
  EXPECT_EQ(of_node[1].values.data(), values.data() + 4);
  EXPECT_EQ(of_node[1].group, 1);
}

TEST(Definition, AnOptimizerWithoutOptionsOfItsOwnHasNone) {
  const Definition definition = DefinitionOf({}, {}, {});
  const OptimizerOptions there = OptimizerOptionsOf(definition.options());
  EXPECT_FALSE(there.lamb);
  EXPECT_FALSE(there.zero_one);
}

}  // namespace
}  // namespace signpost::node
