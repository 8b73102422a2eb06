#include "proto/running_time.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "proto/steady_time.h"

namespace signpost {
namespace {

constexpr absl::Duration kInterval = RunningTime::kTickInterval;
constexpr absl::Duration kMostCounted = RunningTime::kMostCounted;

class RunningTimeTest : public ::testing::Test {
 protected:
  RunningTimeTest() { steady_ = absl::ZeroDuration(); }

  void Pass(absl::Duration time) { steady_ += time; }
  void PassAndTick(absl::Duration time) {
    Pass(time);
    time_.Tick();
  }

  static inline absl::Duration steady_;
  RunningTime time_{[] { return steady_; }};
};

TEST_F(RunningTimeTest, IsSteadyTimeWhileNobodyTicks) {
  Pass(absl::Hours(1));
  EXPECT_EQ(time_.Now(), absl::Hours(1));
  PassAndTick(absl::Hours(1));
  EXPECT_EQ(time_.Now(), absl::Hours(2));
}

TEST_F(RunningTimeTest, IsSteadyTimeWhileTicksComeInTime) {
  for (int i = 0; i < 100; ++i) PassAndTick(kInterval);
  PassAndTick(kMostCounted);  // late, as on a busy machine
  Pass(kInterval / 2);
  EXPECT_EQ(time_.Now(), 100 * kInterval + kMostCounted + kInterval / 2);
}

TEST_F(RunningTimeTest, StandsStillUntilTheNextTickWhereOneIsMissing) {
  PassAndTick(kInterval);
  Pass(kMostCounted + absl::Nanoseconds(1));
  EXPECT_EQ(time_.Now(), kInterval + kMostCounted);
  Pass(absl::Hours(1));
  // Whoever looks before the tick, and after it.
  EXPECT_EQ(time_.Now(), kInterval + kMostCounted);
  time_.Tick();
  EXPECT_EQ(time_.Now(), kInterval + kMostCounted);
  PassAndTick(kInterval);
  EXPECT_EQ(time_.Now(), kInterval + kMostCounted + kInterval);
}

TEST_F(RunningTimeTest, CountsNoneOfSeveralStandstillsFurther) {
  time_.Tick();
  for (int i = 1; i <= 3; ++i) {
    PassAndTick(absl::Minutes(i));
    PassAndTick(kInterval);
    EXPECT_EQ(time_.Now(), i * (kMostCounted + kInterval));
  }
}

TEST_F(RunningTimeTest, PassesAgainOnceThereAreNoMoreTicks) {
  PassAndTick(kInterval);
  PassAndTick(absl::Hours(1));
  time_.EndTicks();
  Pass(absl::Hours(2));
  EXPECT_EQ(time_.Now(), kInterval + kMostCounted + absl::Hours(2));
}

// It has no thread that ticks.
TEST(SteadyTime, PassesInAForkToo) {
  CountWhileRunning();
  const absl::Time start = SteadyNow();
  const pid_t child = fork();
  if (child == 0) {
    const absl::Duration wanted = 2 * kMostCounted;
    absl::SleepFor(wanted);
    _exit(SteadyNow() - start >= wanted ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace signpost
