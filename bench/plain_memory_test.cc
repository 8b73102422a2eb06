#include "bench/plain_memory.h"

#include "gtest/gtest.h"

namespace signpost::bench {
namespace {

constexpr double kOneBit = (1 + 32.0 / 4096) / 8;

TEST(StepBytes, AreThoseOfAllKernelsOfAllHosts) {
  RankOptions step = {.mode = "step", .codec = ONE_BIT, .parameters = 1000};
  // 12.4 and 12.1 bytes of a worker, and 8.6 of the aggregators.
  EXPECT_DOUBLE_EQ(*StepBytes(step, 4),
                   1000 * (4 * (12 + 2 * kOneBit + 12 + kOneBit) + 8 + 5 * kOneBit));
  step.codec = FLOAT32;
  EXPECT_DOUBLE_EQ(*StepBytes(step, 2), 1000 * (2 * (4 + 4 + 4 + 24) + 3 * 4));
  step.codec = BFLOAT16;
  EXPECT_DOUBLE_EQ(*StepBytes(step, 2), 1000 * (2 * (4 + 8 + 2 + 2 + 24) + 8 + 3 * 2.0));
  step.optimizer = StepOptimizer::kLamb;
  EXPECT_DOUBLE_EQ(*StepBytes(step, 2), 1000 * (2 * (4 + 8 + 2 + 2 + 20 + 16) + 8 + 3 * 2.0));
  step.codec = ONE_BIT;
  EXPECT_DOUBLE_EQ(*StepBytes(step, 1), 1000 * (12 + 16 + 12 + 5 * kOneBit + 8 + 2 * kOneBit));
}

TEST(StepBytes, AreNotKnownOfStepsThatDiffer) {
  EXPECT_FALSE(StepBytes({.mode = "step", .optimizer = StepOptimizer::kZeroOneAdam}, 4));
  EXPECT_FALSE(StepBytes({.mode = "frames"}, 4));
}

TEST(PlainMemory, GoesThroughAsManyBytesInWhateverRoomThereIs) {
  for (const double bytes : {0.0, 1e6, 1.3 * 2 * PlainMemory::kRoom}) {
    for (const uint32_t processors : {1, 3}) {
      PlainMemory memory(bytes, processors);
      const double whole_blocks = 2 * processors * 2 * 16384;
      EXPECT_NEAR(memory.bytes(), bytes, whole_blocks);
      EXPECT_TRUE(memory.Exchange().ok());
    }
  }
}

}  // namespace
}  // namespace signpost::bench
