#include "client/demo/windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

namespace signpost::demo {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

constexpr uint32_t kWindowBytes = 4;

TEST(RandomWindows, AreTheSameForTheSameKey) {
  const std::vector<uint8_t> text(1000);
  const BatchKey key = {.seed = 1, .rank = 2, .step = 3};
  EXPECT_EQ(RandomWindows(text, kWindowBytes, 16, key), RandomWindows(text, kWindowBytes, 16, key));
}

TEST(RandomWindows, DifferBySeedRankAndStep) {
  const std::vector<uint8_t> text(1000);
  const BatchKey keys[] = {{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {1, 1, 2}};
  std::set<Batch> batches;
  for (const BatchKey& key : keys) batches.insert(RandomWindows(text, kWindowBytes, 16, key));
  EXPECT_EQ(batches.size(), 4);
}

TEST(RandomWindows, StartAtEveryPlaceWhereOneFits) {
  const std::vector<uint8_t> text(6);
  const Batch batch = RandomWindows(text, kWindowBytes, 100, {});
  const std::set<const uint8_t*> places(batch.begin(), batch.end());
  EXPECT_THAT(places, UnorderedElementsAre(&text[0], &text[1], &text[2]));
}

TEST(SpreadWindows, AreAtEqualDistances) {
  const std::vector<uint8_t> text(15);
  EXPECT_THAT(SpreadWindows(text, kWindowBytes, 3), ElementsAre(&text[0], &text[4], &text[8]));
}

TEST(SpreadWindows, AreAllWindowsOfAShortText) {
  const std::vector<uint8_t> text(5);
  EXPECT_THAT(SpreadWindows(text, kWindowBytes, 100), ElementsAre(&text[0], &text[1]));
}

}  // namespace
}  // namespace signpost::demo
