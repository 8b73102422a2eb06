#include "cli/restart_limit.h"

#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

const absl::Time kStart = absl::UnixEpoch();

TEST(RestartLimit, AllowsTenWithinAMinute) {
  RestartLimit limit;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(limit.Restart(kStart + absl::Seconds(i)));
  EXPECT_FALSE(limit.Restart(kStart + absl::Seconds(59)));
  EXPECT_EQ(limit.restarts(), 10u);
}

TEST(RestartLimit, ForgetsARestartAfterAMinute) {
  RestartLimit limit;
  for (int i = 0; i < 10; ++i) limit.Restart(kStart + absl::Seconds(i));
  EXPECT_TRUE(limit.Restart(kStart + absl::Seconds(60)));
  EXPECT_FALSE(limit.Restart(kStart + absl::Seconds(60)));
  EXPECT_TRUE(limit.Restart(kStart + absl::Seconds(61)));
}

TEST(RestartLimit, AllowsAnyNumberThatIsSpreadOut) {
  RestartLimit limit;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(limit.Restart(kStart + i * absl::Seconds(6)));
  EXPECT_EQ(limit.restarts(), 100u);
}

TEST(RestartLimit, MayBeAnother) {
  RestartLimit limit(/*most=*/12);
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(limit.Restart(kStart));
  EXPECT_FALSE(limit.Restart(kStart));
}

}  // namespace
}  // namespace signpost::cli
