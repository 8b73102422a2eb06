#include "failpoint/failpoint.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

constexpr int kUnarmed = 99;

// How a process ends, or stops, that arms these and then does that.
int StatusOf(const std::string& spec, const std::function<void()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    if (!ArmFailpoints(spec).ok()) _exit(kUnarmed);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, WUNTRACED);
  if (WIFSTOPPED(status)) {
    kill(pid, SIGCONT);
    int end = 0;
    waitpid(pid, &end, 0);
    EXPECT_EQ(end, 0) << "it goes on where it was stopped";
  }
  return status;
}

void ReachTimes(Failpoint point, int times) {
  for (int i = 0; i < times; ++i) Reach(point);
}

bool IsKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

TEST(Failpoint, DoesNothingUnlessArmed) { ReachTimes(Failpoint::kRoundClosed, 3); }

TEST(Failpoint, KillsAtTheCount) {
  EXPECT_EQ(StatusOf("round.closed=kill@3", [] { ReachTimes(Failpoint::kRoundClosed, 2); }), 0);
  EXPECT_TRUE(
      IsKilled(StatusOf("round.closed=kill@3", [] { ReachTimes(Failpoint::kRoundClosed, 3); })));
  EXPECT_TRUE(
      IsKilled(StatusOf("round.closed=kill", [] { ReachTimes(Failpoint::kRoundClosed, 1); })));
}

TEST(Failpoint, CountsEachPlaceForItself) {
  EXPECT_EQ(StatusOf("round.closed=kill@2",
                     [] {
                       Reach(Failpoint::kRoundClosed);
                       Reach(Failpoint::kAnswerSent);
                     }),
            0);
}

TEST(Failpoint, TakesSeveral) {
  const std::string spec = "round.closed=sleep:1ms,answer.sent=kill,round.closed=kill@2";
  EXPECT_TRUE(IsKilled(StatusOf(spec, [] { Reach(Failpoint::kAnswerSent); })));
  EXPECT_TRUE(IsKilled(StatusOf(spec, [] { ReachTimes(Failpoint::kRoundClosed, 2); })));
}

TEST(Failpoint, StopsAndGoesOn) {
  EXPECT_TRUE(WIFSTOPPED(StatusOf("round.closed=stop", [] { Reach(Failpoint::kRoundClosed); })));
}

TEST(Failpoint, SleepsOnce) {
  EXPECT_EQ(StatusOf("round.closed=sleep:50ms",
                     [] {
                       const absl::Time start = absl::Now();
                       Reach(Failpoint::kRoundClosed);
                       if (absl::Now() - start < absl::Milliseconds(50)) _exit(1);
                     }),
            0);
  // Were it every time, the test would not end.
  EXPECT_EQ(
      StatusOf("round.closed=sleep:50ms", [] { ReachTimes(Failpoint::kRoundClosed, 1'000'000); }),
      0);
}

TEST(Failpoint, SaysWhatItDoesNotUnderstand) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "there is no ''"},
      {"round.close=kill", "there is no 'round.close', but there are: state_dir.counted,"},
      {"round.closed", "'' is not an action"},
      {"round.closed=die", "'die' is not an action"},
      {"round.closed=sleep:2", "'2' is not a duration"},
      {"round.closed=sleep:-2s", "'-2s' is not a duration"},
      {"round.closed=sleep:inf", "'inf' is not a duration"},
      {"round.closed=kill@0", "'0' is not a count"},
      {"round.closed=kill@", "'' is not a count"},
      {"round.closed=kill@x", "'x' is not a count"},
      {"answer.sent=kill,round.closed=die", "'round.closed=die'"},
  };
  for (const auto& [spec, reason] : wrong) {
    const absl::Status status = ArmFailpoints(spec);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
  }
  Reach(Failpoint::kAnswerSent);  // the test would end here
}

TEST(Failpoint, HasDifferentNames) {
  std::set<absl::string_view> names;
  for (const FailpointPlace& place : AllFailpoints()) {
    EXPECT_TRUE(names.insert(place.name).second) << place.name;
  }
}

}  // namespace
}  // namespace signpost
