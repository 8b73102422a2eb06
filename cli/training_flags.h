// The flags of the demo's training job, as `signpost demo` takes them and hands them to its
// workers.

#ifndef SIGNPOST_CLI_TRAINING_FLAGS_H_
#define SIGNPOST_CLI_TRAINING_FLAGS_H_

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "client/demo/training.h"

namespace signpost::cli {

// Of everything but where the result goes. Without --freeze-step, options.freeze_step stays as it
// is.
void AddTrainingFlags(CLI::App& app, demo::TrainingOptions& options);

// The flags, to be parsed by AddTrainingFlags, that give `options`.
std::vector<std::string> TrainingArguments(const demo::TrainingOptions& options);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_TRAINING_FLAGS_H_
