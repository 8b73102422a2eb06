// Who may call what. What is not listed here nobody may, so a new method is closed until it is.

#ifndef SIGNPOST_SECURITY_ACCESS_H_
#define SIGNPOST_SECURITY_ACCESS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "security/identity.h"

namespace signpost {

// `method` as HTTP/2's :path has it: "/signpost.AggregatorService/Join". PERMISSION_DENIED, naming
// both, when the caller's role may not call it.
absl::Status CheckMethod(absl::string_view method, const Identity& caller);

// PERMISSION_DENIED when the caller has no part in the job; an empty name stands for all jobs.
absl::Status CheckJob(absl::string_view job, const Identity& caller);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_ACCESS_H_
