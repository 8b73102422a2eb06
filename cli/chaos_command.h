// `signpost chaos`.

#ifndef SIGNPOST_CLI_CHAOS_COMMAND_H_
#define SIGNPOST_CLI_CHAOS_COMMAND_H_

#include <string>
#include <vector>

#include "cli/command.h"

namespace signpost::cli {

// `command` is what stands behind "--".
Command AddChaosCommand(CLI::App& program, const std::vector<std::string>& command);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CHAOS_COMMAND_H_
