#include "proto/grpc_status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

constexpr absl::string_view kCut = "...";
constexpr char kTryAgain[] = "try again";  // in a status's details

std::string CutMessage(absl::string_view message) {
  if (message.size() <= kMaxStatusMessageBytes) return std::string(message);
  return absl::StrCat(message.substr(0, kMaxStatusMessageBytes - kCut.size()), kCut);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), CutMessage(status.message()),
                      IsTryAgain(status) ? kTryAgain : "");
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  const int code = status.error_code();
  const bool known = code >= grpc::StatusCode::OK && code <= grpc::StatusCode::UNAUTHENTICATED;
  const absl::Status error(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                           status.error_message());
  return !error.ok() && status.error_details() == kTryAgain ? TryAgain(error) : error;
}

}  // namespace signpost
