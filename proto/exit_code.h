// What the program's exit code says. The numbers are those of sysexits.h.

#ifndef SIGNPOST_PROTO_EXIT_CODE_H_
#define SIGNPOST_PROTO_EXIT_CODE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace signpost {

enum ExitCode : int {
  kExitOk = 0,
  kExitBadConfiguration = 64,
  kExitDamaged = 65,      // what was saved
  kExitUnreachable = 69,  // an aggregator, or a GPU that has failed
  kExitInternalError = 70,
  kExitTryAgain = 75,  // interrupted, or somebody did not come in time
  kExitMismatch = 76,  // of layouts, options or versions
};

// What a code says, in a few words: of the manual, and of docs/errors.md.
struct ExitCodeMeaning {
  ExitCode code;
  absl::string_view meaning;
};

// All of them, in their order.
absl::Span<const ExitCodeMeaning> AllExitCodes();

// The one place where errors become exit codes.
ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_EXIT_CODE_H_
