#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {
namespace {

struct Some {
  uint32_t first_block = 0;
};

TEST(ThreadBlock, EachBlockFindsItsSegment) {
  for (uint32_t count = 1; count < 20; ++count) {
    std::vector<Some> segments(count);
    uint32_t blocks = 0;
    for (uint32_t s = 0; s < count; ++s) {
      segments[s].first_block = blocks;
      blocks += 1 + s % 3;
    }
    uint32_t expected = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
      if (expected + 1 < count && segments[expected + 1].first_block == block) ++expected;
      EXPECT_EQ(&SegmentOfBlock(segments.data(), count, block), &segments[expected]);
    }
  }
}

TEST(ThreadBlock, TilesAreWholeWhereAllArraysAreAligned) {
  alignas(16) const float numbers[8] = {};
  const float* const none = nullptr;
  for (const uint32_t length : {kTileElements, 2 * kTileElements}) {
    const BlockOfSegment at = {.index = 0, .begin = 0, .length = length};
    EXPECT_TRUE(AreTilesWhole(at, numbers, numbers + 4, none));
    EXPECT_FALSE(AreTilesWhole(at, numbers, numbers + 1, none));
    EXPECT_FALSE(AreTilesWhole(at, numbers + 2, numbers + 4));
  }
  EXPECT_FALSE(AreTilesWhole({.index = 0, .begin = 0, .length = kTileElements - 8}, numbers));
  EXPECT_FALSE(AreTilesWhole({.index = 0, .begin = 0, .length = kTileElements + 8}, numbers));
}

TEST(ThreadBlock, EachElementOfATileHasOneThread) {
  for (const uint32_t length : {1u, 4u, 5u, 1023u, 4096u}) {
    std::vector<int> visits(length + kQuadElements);
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      ForEachQuad(thread, length, [&](uint32_t begin, uint32_t count, uint32_t q) {
        EXPECT_LT(q, kQuads);
        EXPECT_EQ(begin % kQuadElements, 0);
        for (uint32_t k = 0; k < Min(count, kQuadElements); ++k) ++visits[begin + k];
      });
    }
    for (uint32_t i = 0; i < visits.size(); ++i) EXPECT_EQ(visits[i], i < length) << i;
  }
}

}  // namespace
}  // namespace signpost::kernels::cuda
