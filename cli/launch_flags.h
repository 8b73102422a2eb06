// The flags of the commands that run a training job on this machine.

#ifndef SIGNPOST_CLI_LAUNCH_FLAGS_H_
#define SIGNPOST_CLI_LAUNCH_FLAGS_H_

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "cli/launcher.h"

namespace signpost::cli {

void AddLaunchFlags(CLI::App& app, LaunchOptions& launch);

// Checks the flags, and that there is a command: INVALID_ARGUMENT, with an example of `signpost
// NAME` if it is empty.
absl::Status SetCommand(const std::vector<std::string>& command, const std::string& name,
                        LaunchOptions& launch);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_LAUNCH_FLAGS_H_
