// What the program's exit code says. The numbers are those of sysexits.h.

#ifndef SIGNPOST_CLI_EXIT_CODE_H_
#define SIGNPOST_CLI_EXIT_CODE_H_

#include "absl/status/status.h"

namespace signpost::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitBadConfiguration = 64,
  kExitDamaged = 65,      // what was saved
  kExitUnreachable = 69,  // an aggregator
  kExitInternalError = 70,
  kExitTryAgain = 75,  // interrupted, or somebody did not come in time
  kExitMismatch = 76,  // of layouts, options or versions
};

// The one place where errors become exit codes.
ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_EXIT_CODE_H_
