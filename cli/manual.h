// The manual, as man(7) macros, from the flags that the program has: it is never out of date.

#ifndef SIGNPOST_CLI_MANUAL_H_
#define SIGNPOST_CLI_MANUAL_H_

#include <string>

#include "CLI/CLI.hpp"

namespace signpost::cli {

// signpost(1): what there is, each command with its flags, exit codes, environment and files.
std::string ManualOf(const CLI::App& program);

// signpost-COMMAND(1), of one of the program's commands.
std::string ManualOfCommand(const CLI::App& command);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_MANUAL_H_
