// signpost worker: trains for the processes of its node.

#ifndef SIGNPOST_CLI_WORKER_COMMAND_H_
#define SIGNPOST_CLI_WORKER_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddWorkerCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_WORKER_COMMAND_H_
