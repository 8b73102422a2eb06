// signpost bench: how fast it is here, against what physics allows and what others need.

#ifndef SIGNPOST_CLI_BENCH_COMMAND_H_
#define SIGNPOST_CLI_BENCH_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddBenchCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_BENCH_COMMAND_H_
