#include "proto/grpc_status.h"

#include <string>

#include "gtest/gtest.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

TEST(GrpcStatus, EveryCodeAndItsMessageGoThereAndBack) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what and where");
    const grpc::Status sent = ToGrpcStatus(status);
    EXPECT_EQ(sent.error_code(), code);
    EXPECT_EQ(FromGrpcStatus(sent), status);
  }
}

TEST(GrpcStatus, WhetherToTryAgainGoesThereAndBack) {
  const absl::Status status = TryAgain(absl::FailedPreconditionError("rank 1 has left"));
  EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  EXPECT_TRUE(IsTryAgain(FromGrpcStatus(ToGrpcStatus(status))));
  EXPECT_FALSE(IsTryAgain(FromGrpcStatus(ToGrpcStatus(absl::FailedPreconditionError("layout")))));
}

TEST(GrpcStatus, OkStaysOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(GrpcStatus, CodesMeanTheSameOnBothSides) {
  EXPECT_EQ(ToGrpcStatus(absl::FailedPreconditionError("")).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ToGrpcStatus(absl::UnavailableError("")).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(GrpcStatus, ACodeThatNoStandardNamesBecomesUnknown) {
  for (const int code : {-1, 17, 1000}) {
    const absl::Status status =
        FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(code), "odd"));
    EXPECT_EQ(status, absl::UnknownError("odd")) << code;
  }
}

TEST(GrpcStatus, AMessageThatTrailersCannotCarryIsCut) {
  const std::string fits(kMaxStatusMessageBytes, 'x');
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(fits)).error_message(), fits);
  const std::string cut = ToGrpcStatus(absl::InternalError(fits + "y")).error_message();
  EXPECT_EQ(cut.size(), kMaxStatusMessageBytes);
  EXPECT_EQ(cut.substr(cut.size() - 4), "x...");
}

}  // namespace
}  // namespace signpost
