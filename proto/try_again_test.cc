#include "proto/try_again.h"

#include "gtest/gtest.h"

namespace signpost {
namespace {

TEST(TryAgain, IsKeptWithAnotherMessage) {
  const absl::Status error = absl::FailedPreconditionError("rank 1 has left");
  const absl::Status retold = WithMessage(TryAgain(error), "step 3: rank 1 has left");
  EXPECT_EQ(retold.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(retold.message(), "step 3: rank 1 has left");
  EXPECT_TRUE(IsTryAgain(retold));
}

TEST(TryAgain, IsNotGivenByAnotherMessage) {
  const absl::Status error = absl::FailedPreconditionError("layout");
  EXPECT_EQ(WithMessage(error, "step 3: layout"), absl::FailedPreconditionError("step 3: layout"));
  EXPECT_FALSE(IsTryAgain(WithMessage(error, "step 3: layout")));
}

}  // namespace
}  // namespace signpost
