// signpost completion: a script for a shell; and signpost complete, which that script asks.

#ifndef SIGNPOST_CLI_COMPLETION_COMMAND_H_
#define SIGNPOST_CLI_COMPLETION_COMMAND_H_

#include <string>
#include <vector>

#include "cli/command.h"

namespace signpost::cli {

Command AddCompletionCommand(CLI::App& program);

// `tail` are the words to complete. `program` and `tail` must live as long as the command.
Command AddCompleteCommand(CLI::App& program, const std::vector<std::string>& tail);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_COMPLETION_COMMAND_H_
