#include "proto/try_again.h"

#include "absl/strings/cord.h"

namespace signpost {
namespace {

constexpr char kMark[] = "signpost/try-again";

}  // namespace

absl::Status TryAgain(absl::Status error) {
  error.SetPayload(kMark, absl::Cord());
  return error;
}

bool IsTryAgain(const absl::Status& status) { return status.GetPayload(kMark).has_value(); }

absl::Status WithMessage(const absl::Status& error, absl::string_view message) {
  const absl::Status retold(error.code(), message);
  return IsTryAgain(error) ? TryAgain(retold) : retold;
}

}  // namespace signpost
