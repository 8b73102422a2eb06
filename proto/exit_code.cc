#include "proto/exit_code.h"

#include "proto/try_again.h"

namespace signpost {
namespace {

constexpr ExitCodeMeaning kMeanings[] = {
    {kExitOk, "It went well."},
    {kExitBadConfiguration,
     "A flag, variable, file or certificate is wrong, or a limit is reached."},
    {kExitDamaged, "What was saved is damaged, or an aggregator has lost what it had to keep."},
    {kExitUnreachable, "An aggregator cannot be reached, or a GPU has failed."},
    {kExitInternalError, "A defect of Signpost: please report it."},
    {kExitTryAgain,
     "Interrupted, or somebody did not come in time, or is gone: it passes when the process is "
     "started again."},
    {kExitMismatch, "Another model, other options or another version than the others'."},
};

}  // namespace

absl::Span<const ExitCodeMeaning> AllExitCodes() { return kMeanings; }

ExitCode ExitCodeOf(const absl::Status& status) {
  if (IsTryAgain(status)) return kExitTryAgain;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kResourceExhausted:  // a limit; the message names its flag
      return kExitBadConfiguration;
    case absl::StatusCode::kDataLoss:
      return kExitDamaged;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kAlreadyExists:  // another process holds the rank: it may be about to
                                            // end
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitTryAgain;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:  // the peer lacks the call: another version
      return kExitMismatch;
    default:
      return kExitInternalError;
  }
}

}  // namespace signpost
