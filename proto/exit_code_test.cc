#include "proto/exit_code.h"

#include "gtest/gtest.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

// The numbers are a promise to scripts, hence literals.
TEST(ExitCode, OfSuccessIs0) { EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0); }

TEST(ExitCode, OfBadConfigurationIs64) {
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("")), 64);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), 64);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), 64);
}

TEST(ExitCode, OfDamageIs65) { EXPECT_EQ(ExitCodeOf(absl::DataLossError("")), 65); }

TEST(ExitCode, OfAnUnreachableAggregatorIs69) {
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), 69);
}

TEST(ExitCode, OfAWaitThatEndedIs75) {
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), 75);
  EXPECT_EQ(ExitCodeOf(absl::CancelledError("")), 75);
}

// The process before it in that rank is given up, and its successor is let in, some time later.
TEST(ExitCode, OfARankThatAnotherProcessHoldsIs75) {
  EXPECT_EQ(ExitCodeOf(absl::AlreadyExistsError("")), 75);
}

// Nothing is wrong with this rank.
TEST(ExitCode, OfARankThatAnotherHasLeftAloneIs75) {
  EXPECT_EQ(ExitCodeOf(TryAgain(absl::FailedPreconditionError(""))), 75);
}

TEST(ExitCode, OfAMismatchIs76) {
  EXPECT_EQ(ExitCodeOf(absl::FailedPreconditionError("")), 76);
  EXPECT_EQ(ExitCodeOf(absl::UnimplementedError("")), 76);
}

TEST(ExitCode, OfADefectIs70) { EXPECT_EQ(ExitCodeOf(absl::InternalError("")), 70); }

}  // namespace
}  // namespace signpost
