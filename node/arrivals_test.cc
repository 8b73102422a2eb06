#include "node/arrivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace signpost::node {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Arrivals, ATensorIsCompleteWithTheLastProcessesGradient) {
  Arrivals arrivals(/*tensors=*/3, /*processes=*/2);
  EXPECT_TRUE(arrivals.Add(0, {2, 0}).ok());
  EXPECT_FALSE(arrivals.has_complete());
  EXPECT_TRUE(arrivals.Add(1, {0}).ok());
  EXPECT_TRUE(arrivals.has_complete());
  EXPECT_THAT(arrivals.TakeComplete(), ElementsAre(0));
  EXPECT_FALSE(arrivals.has_complete());
  EXPECT_TRUE(arrivals.Add(1, {1, 2}).ok());
  EXPECT_THAT(arrivals.TakeComplete(), ElementsAre(2));
}

TEST(Arrivals, WhoHasNoMoreToSendHasTheRest) {
  Arrivals arrivals(/*tensors=*/3, /*processes=*/2);
  EXPECT_TRUE(arrivals.Add(0, {1}).ok());
  arrivals.AddRest(0);
  EXPECT_THAT(arrivals.TakeComplete(), IsEmpty());
  arrivals.AddRest(1);
  EXPECT_THAT(arrivals.TakeComplete(), ElementsAre(0, 1, 2));
}

TEST(Arrivals, RefusesWhatCannotArrive) {
  Arrivals arrivals(/*tensors=*/3, /*processes=*/2);
  EXPECT_THAT(std::string(arrivals.Add(0, {3}).message()), HasSubstr("of tensor 3, of 3"));
  EXPECT_TRUE(arrivals.Add(0, {2}).ok());
  EXPECT_THAT(std::string(arrivals.Add(0, {2}).message()), HasSubstr("of tensor 2 twice"));
  EXPECT_TRUE(arrivals.Add(1, {2}).ok());
  EXPECT_THAT(arrivals.TakeComplete(), ElementsAre(2));
}

}  // namespace
}  // namespace signpost::node
