// signpost run: a training job on this machine.

#ifndef SIGNPOST_CLI_RUN_COMMAND_H_
#define SIGNPOST_CLI_RUN_COMMAND_H_

#include <string>
#include <vector>

#include "cli/command.h"

namespace signpost::cli {

// `command` is what stands behind "--"; it is read when the command runs.
Command AddRunCommand(CLI::App& program, const std::vector<std::string>& command);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_RUN_COMMAND_H_
