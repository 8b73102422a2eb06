// signpost version: what this program is and what it runs on.

#ifndef SIGNPOST_CLI_VERSION_COMMAND_H_
#define SIGNPOST_CLI_VERSION_COMMAND_H_

#include <string>

#include "cli/command.h"

namespace signpost::cli {

Command AddVersionCommand(CLI::App& program);

// What `signpost version` and `signpost --version` print.
std::string DescribeVersion();

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_VERSION_COMMAND_H_
