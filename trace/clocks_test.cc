#include "trace/clocks.h"

#include <cstdlib>
#include <random>

#include "gtest/gtest.h"

namespace signpost::trace {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

// Messages there and back, each under way for at least `least`.
void Talk(Clocks& clocks, size_t a, int64_t ahead_a, size_t b, int64_t ahead_b, int64_t least,
          int64_t jitter) {
  std::mt19937_64 random(a * 10 + b);
  const auto way = [&] { return least + static_cast<int64_t>(random() % (jitter + 1)); };
  for (int64_t i = 0; i < 100; ++i) {
    const int64_t there = 20 * i * kMillisecond;
    clocks.AddMessage(a, there + ahead_a, b, there + way() + ahead_b);
    const int64_t back = there + 10 * kMillisecond;
    clocks.AddMessage(b, back + ahead_b, a, back + way() + ahead_a);
  }
}

TEST(Clocks, FindsAnOffsetWithinItsBound) {
  Clocks clocks(2);
  Talk(clocks, 0, 0, 1, -7'000'123, 100'000, 3 * kMillisecond);
  const auto offset = clocks.Solve()[1];
  ASSERT_TRUE(offset.has_value());
  EXPECT_LE(std::abs(offset->offset - -7'000'123), offset->bound);
  // The quickest of a hundred.
  EXPECT_GE(offset->bound, 100'000);
  EXPECT_LE(offset->bound, 250'000);
  EXPECT_FALSE(offset->is_contradictory);
}

TEST(Clocks, FindsHostsThatNeverSpokeToTheFirst) {
  Clocks clocks(3);
  Talk(clocks, 0, 0, 2, 5 * kMillisecond, 50'000, 0);
  Talk(clocks, 1, 900 * kMillisecond, 2, 5 * kMillisecond, 30'000, 0);
  const auto offset = clocks.Solve()[1];
  ASSERT_TRUE(offset.has_value());
  EXPECT_EQ(offset->offset, 900 * kMillisecond);
  EXPECT_EQ(offset->bound, 80'000);
}

TEST(Clocks, TakesTheBetterOfTwoWays) {
  Clocks clocks(3);
  Talk(clocks, 0, 0, 1, kMillisecond, 5 * kMillisecond, 0);
  Talk(clocks, 0, 0, 2, 0, 10'000, 0);
  Talk(clocks, 2, 0, 1, kMillisecond, 10'000, 0);
  EXPECT_EQ(clocks.Solve()[1]->bound, 20'000);
}

TEST(Clocks, KnowsNothingOfAHostThatOnlySpoke) {
  Clocks clocks(2);
  clocks.AddMessage(0, 10, 1, 20);
  EXPECT_FALSE(clocks.Solve()[1].has_value());
}

TEST(Clocks, SaysThatOneRunsFasterThanTheOther) {
  Clocks clocks(2);
  for (int64_t t = 0; t < 1000; ++t) {
    const int64_t there = t * 1000 * kMillisecond, theirs = there + t * 100'000;  // 100 ppm
    clocks.AddMessage(0, there, 1, theirs + 50'000);
    clocks.AddMessage(1, theirs + 60'000, 0, there + 110'000);
  }
  const auto offset = clocks.Solve()[1];
  EXPECT_TRUE(offset->is_contradictory);
  EXPECT_NEAR(offset->bound, 50 * kMillisecond, kMillisecond);
  EXPECT_NEAR(offset->offset, 50 * kMillisecond, kMillisecond);
}

}  // namespace
}  // namespace signpost::trace
