#include "config/suggestion.h"

#include "gtest/gtest.h"

namespace signpost::config {
namespace {

TEST(EditDistance, CountsInsertedRemovedReplacedAndSwappedLetters) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("steps", "steps"), 0u);
  EXPECT_EQ(EditDistance("steps", "step"), 1u);
  EXPECT_EQ(EditDistance("steps", "stepps"), 1u);
  EXPECT_EQ(EditDistance("steps", "staps"), 1u);
  EXPECT_EQ(EditDistance("steps", "setps"), 1u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

const std::vector<std::string> kKnown = {"aggregator", "demo", "run", "status", "version"};

TEST(Nearest, FindsTheWordBehindATypingError) {
  EXPECT_EQ(Nearest("demoo", kKnown), "demo");
  EXPECT_EQ(Nearest("agregater", kKnown), "aggregator");
  EXPECT_EQ(Nearest("rnu", kKnown), "run");
}

TEST(Nearest, FindsTheWordBehindItsBeginning) {
  EXPECT_EQ(Nearest("aggr", kKnown), "aggregator");
  EXPECT_EQ(Nearest("vers", kKnown), "version");
}

TEST(Nearest, SaysNothingRatherThanNonsense) {
  EXPECT_EQ(Nearest("xylophone", kKnown), "");
  EXPECT_EQ(Nearest("", kKnown), "");
}

}  // namespace
}  // namespace signpost::config
