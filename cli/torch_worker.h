// One worker of `signpost demo --torch`: the language model among the Python package's examples.

#ifndef SIGNPOST_CLI_TORCH_WORKER_H_
#define SIGNPOST_CLI_TORCH_WORKER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace signpost::cli {

// The command that runs it, without arguments, in one thread. `program` is this one's executable,
// as it lies in the Python package, and `python` the interpreter.
//
// Runs the interpreter once, so it is called from the main thread (launcher.h). NOT_FOUND if there
// is no package around the program; INVALID_ARGUMENT, with what Python says, if the interpreter
// cannot import it and PyTorch; CANCELLED if interrupted.
absl::StatusOr<std::vector<std::string>> TorchWorker(const std::string& program,
                                                     const std::string& python);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_TORCH_WORKER_H_
