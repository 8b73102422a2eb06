// signpost demo-worker: one worker of the demo, started by `signpost demo`. Not in --help.

#ifndef SIGNPOST_CLI_DEMO_WORKER_COMMAND_H_
#define SIGNPOST_CLI_DEMO_WORKER_COMMAND_H_

#include <cstdint>
#include <string>

#include "cli/command.h"

namespace signpost::cli {

Command AddDemoWorkerCommand(CLI::App& program);

// Where the worker of this rank leaves its result.
std::string DemoResultFile(const std::string& directory, uint32_t rank);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_DEMO_WORKER_COMMAND_H_
