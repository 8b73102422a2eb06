// `signpost probe`: whether aggregators serve, for those who start and stop them.

#ifndef SIGNPOST_CLI_PROBE_COMMAND_H_
#define SIGNPOST_CLI_PROBE_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddProbeCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_PROBE_COMMAND_H_
