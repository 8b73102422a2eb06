#include "proto/failure_timeout.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

FailureTimeout Of(absl::Duration duration) {
  const absl::StatusOr<FailureTimeout> timeout = FailureTimeout::Of(duration);
  EXPECT_TRUE(timeout.ok()) << timeout.status();
  return timeout.value_or(FailureTimeout());
}

TEST(FailureTimeout, IsTenSecondsUnlessToldOtherwise) {
  EXPECT_EQ(FailureTimeout().duration(), absl::Seconds(10));
}

TEST(FailureTimeout, DerivesEachDuration) {
  const struct {
    absl::Duration timeout, time, answer, connect, backoff;
  } kCases[] = {
      {absl::Milliseconds(500), absl::Milliseconds(250), absl::Milliseconds(250),
       absl::Milliseconds(500), absl::Milliseconds(125)},
      {absl::Seconds(1), absl::Milliseconds(500), absl::Milliseconds(500), absl::Seconds(1),
       absl::Milliseconds(250)},
      {absl::Seconds(2), absl::Seconds(1), absl::Seconds(1), absl::Seconds(2),
       absl::Milliseconds(500)},
      {absl::Seconds(10), absl::Seconds(5), absl::Seconds(5), absl::Seconds(10),
       absl::Milliseconds(500)},
      {absl::Hours(1), absl::Minutes(30), absl::Minutes(30), absl::Hours(1),
       absl::Milliseconds(500)},
  };
  for (const auto& wanted : kCases) {
    const FailureTimeout timeout = Of(wanted.timeout);
    EXPECT_EQ(timeout.keepalive_time(), wanted.time) << wanted.timeout;
    EXPECT_EQ(timeout.keepalive_timeout(), wanted.answer) << wanted.timeout;
    EXPECT_EQ(timeout.connect_timeout(), wanted.connect) << wanted.timeout;
    EXPECT_EQ(timeout.longest_backoff(), wanted.backoff) << wanted.timeout;
  }
}

TEST(FailureTimeout, ReadsWhatItWrites) {
  for (const absl::Duration duration :
       {FailureTimeout::kLeast, absl::Milliseconds(1500), absl::Seconds(90)}) {
    const absl::StatusOr<FailureTimeout> parsed = FailureTimeout::Parse(Of(duration).ToString());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->duration(), duration);
  }
}

TEST(FailureTimeout, RefusesWhatIsNoneAndSaysWhatIs) {
  for (const char* text : {"", "10", "soon", "0s", "-1s", "499ms", "1h1s", "inf"}) {
    const absl::Status status = FailureTimeout::Parse(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(text), HasSubstr("500ms to 1h")));
  }
}

}  // namespace
}  // namespace signpost
