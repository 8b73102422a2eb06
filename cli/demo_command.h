// signpost demo: trains a real model twice, with Adam and with 1-bit Adam, and compares.

#ifndef SIGNPOST_CLI_DEMO_COMMAND_H_
#define SIGNPOST_CLI_DEMO_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddDemoCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_DEMO_COMMAND_H_
