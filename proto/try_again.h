// Errors behind which nothing is wrong: they pass when the process that got one is started again.

#ifndef SIGNPOST_PROTO_TRY_AGAIN_H_
#define SIGNPOST_PROTO_TRY_AGAIN_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace signpost {

// The error, marked: another rank's end, say, which is FAILED_PRECONDITION for all calls of this
// process and none for those of the next. The mark crosses the wire (grpc_status.h). Requires an
// error.
absl::Status TryAgain(absl::Status error);

// Whether it has the mark.
bool IsTryAgain(const absl::Status& status);

// The error with a message that says more of it: its code, and its mark if it has one.
absl::Status WithMessage(const absl::Status& error, absl::string_view message);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_TRY_AGAIN_H_
