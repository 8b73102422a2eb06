#include "worker/open_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace signpost {
namespace {

using testing::Optional;

Tensor Vector(const std::string& name, uint64_t elements) {
  Tensor tensor;
  tensor.set_name(name);
  tensor.add_shape(elements);
  return tensor;
}

// Three chunks: {a, the first of c}, {more of c}, {d}.
Layout ThreeChunks() {
  JobOptions options;
  options.set_block_elements(8);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  return *Layout::Create({Vector("a", 8), Vector("c", 24), Vector("d", 16)}, options);
}

TEST(OpenStep, AChunkIsReadyWithTheLastOfItsTensors) {
  const Layout layout = ThreeChunks();
  ASSERT_EQ(layout.chunks().size(), 3);
  ASSERT_EQ(layout.chunks()[0].segments.size(), 2);
  ASSERT_EQ(layout.chunks()[1].segments.size(), 1);
  ASSERT_EQ(layout.chunks()[2].segments.size(), 1);
  OpenStep step(layout, /*window=*/8);
  step.AddGradient(1, Gradient());
  EXPECT_THAT(step.queue.TakeNext(), Optional(1));
  EXPECT_EQ(step.queue.TakeNext(), std::nullopt);
  step.AddGradient(2, Gradient());
  EXPECT_THAT(step.queue.TakeNext(), Optional(2));
  EXPECT_EQ(step.queue.TakeNext(), std::nullopt);
  step.AddGradient(0, Gradient());
  EXPECT_THAT(step.queue.TakeNext(), Optional(0));
}

TEST(OpenStep, SaysWhichGradientsAreMissing) {
  const Layout layout = ThreeChunks();
  OpenStep step(layout, /*window=*/8);
  EXPECT_EQ(step.gradients_missing(), 3);
  EXPECT_EQ(step.first_missing(), 0);
  const float numbers[4] = {};
  step.AddGradient(0, Gradient(numbers, 4, GradientType::kFloat32));
  EXPECT_EQ(step.gradients_missing(), 2);
  EXPECT_EQ(step.first_missing(), 1);
  EXPECT_TRUE(step.has_gradient(0));
  EXPECT_FALSE(step.has_gradient(2));
  EXPECT_EQ(step.gradients()[0].values, numbers);
}

}  // namespace
}  // namespace signpost
