// signpost aggregator: the service.

#ifndef SIGNPOST_CLI_AGGREGATOR_COMMAND_H_
#define SIGNPOST_CLI_AGGREGATOR_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddAggregatorCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_AGGREGATOR_COMMAND_H_
