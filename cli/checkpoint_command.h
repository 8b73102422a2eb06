// signpost checkpoint: what is in a directory of checkpoints, and whether it is whole.

#ifndef SIGNPOST_CLI_CHECKPOINT_COMMAND_H_
#define SIGNPOST_CLI_CHECKPOINT_COMMAND_H_

#include <string>
#include <vector>

#include "cli/command.h"
#include "worker/checkpoint_dir.h"

namespace signpost::cli {

Command AddCheckpointCommand(CLI::App& program);

// A line for each checkpoint, the newest first, then what its manifest says of the job and of each
// file. `entries` as CheckpointDir::List returns them, at least one.
std::string FormatCheckpoints(const std::vector<CheckpointEntry>& entries);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CHECKPOINT_COMMAND_H_
