#include "cli/exit_code.h"

#include "proto/try_again.h"

namespace signpost::cli {

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

}  // namespace signpost::cli
