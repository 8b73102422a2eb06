// signpost trace: from what processes have recorded to a picture, and to figures.

#ifndef SIGNPOST_CLI_TRACE_COMMAND_H_
#define SIGNPOST_CLI_TRACE_COMMAND_H_

#include <string>

#include "absl/status/status.h"
#include "cli/command.h"

namespace signpost::cli {

Command AddTraceCommand(CLI::App& program);

// Of a run that has ended: merges what lies in `directory` into `file`, says so on standard error,
// and removes the directory; it stays when that fails, or not
// all of it could be read.
absl::Status MergeTraceOfRun(const std::string& directory, const std::string& file);

// --trace DIR, which is $SIGNPOST_TRACE too.
void AddTraceFlag(CLI::App& app, std::string& directory);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_TRACE_COMMAND_H_
