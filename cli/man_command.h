// signpost man: the manual.

#ifndef SIGNPOST_CLI_MAN_COMMAND_H_
#define SIGNPOST_CLI_MAN_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

// `program` must live as long as the command: the manual is of what it has by then.
Command AddManCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_MAN_COMMAND_H_
