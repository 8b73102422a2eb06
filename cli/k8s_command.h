// signpost k8s: a job in a cluster.

#ifndef SIGNPOST_CLI_K8S_COMMAND_H_
#define SIGNPOST_CLI_K8S_COMMAND_H_

#include <string>
#include <vector>

#include "cli/command.h"

namespace signpost::cli {

// `tail` is the training program's command line.
Command AddK8sCommand(CLI::App& program, const std::vector<std::string>& tail);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_K8S_COMMAND_H_
