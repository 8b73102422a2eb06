#include "client/stop_request.h"

#include <gtest/gtest.h>

namespace signpost {
namespace {

TEST(StopRequest, IsMadeByEitherSignal) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const StopRequest stop;
    EXPECT_FALSE(stop.made()) << "the last one's request is over";
    raise(signal);
    EXPECT_TRUE(stop.made());
  }
}

TEST(StopRequestDeathTest, LetsTheSecondSignalEndTheProcess) {
  EXPECT_EXIT(
      {
        const StopRequest stop;
        raise(SIGTERM);
        raise(SIGTERM);
      },
      testing::KilledBySignal(SIGTERM), "");
}

TEST(StopRequestDeathTest, LeavesSignalsAsTheyWere) {
  EXPECT_EXIT(
      {
        { const StopRequest stop; }
        raise(SIGTERM);
      },
      testing::KilledBySignal(SIGTERM), "");
}

TEST(StopRequest, ExcusesErrorsOnceItIsMade) {
  const StopRequest stop;
  const absl::Status left = absl::FailedPreconditionError("rank 2 has left job 'a'");
  EXPECT_EQ(stop.Excuse(left), left);
  raise(SIGTERM);
  EXPECT_EQ(stop.Excuse(left), absl::CancelledError("asked to stop; rank 2 has left job 'a'"));
}

}  // namespace
}  // namespace signpost
