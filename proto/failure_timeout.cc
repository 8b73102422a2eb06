#include "proto/failure_timeout.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

absl::Status Unfit(absl::string_view text) {
  return absl::InvalidArgumentError(
      absl::StrCat("a failure timeout of '", text, "' is not possible, wanted a duration from ",
                   absl::FormatDuration(FailureTimeout::kLeast), " to ",
                   absl::FormatDuration(FailureTimeout::kMost), ", such as 10s"));
}

}  // namespace

absl::StatusOr<FailureTimeout> FailureTimeout::Of(absl::Duration duration) {
  if (duration < kLeast || duration > kMost) return Unfit(absl::FormatDuration(duration));
  return FailureTimeout(duration);
}

absl::StatusOr<FailureTimeout> FailureTimeout::Parse(absl::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) return Unfit(text);
  return Of(duration);
}

absl::Duration FailureTimeout::longest_backoff() const {
  return std::min(duration_ / 4, absl::Milliseconds(500));
}

}  // namespace signpost
