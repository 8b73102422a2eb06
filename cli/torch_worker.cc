#include "cli/torch_worker.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cli/launcher.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

namespace fs = std::filesystem;

// Where `import signpost` looks first.
std::string PythonPath(const fs::path& directory) {
  const char* others = std::getenv("PYTHONPATH");
  return others == nullptr ? directory.string() : absl::StrCat(directory.string(), ":", others);
}

absl::Status CheckImport(const std::string& python, const std::vector<std::string>& interpreter) {
  LaunchOptions launch;
  launch.command = interpreter;
  launch.command.insert(launch.command.end(), {"-c", "import signpost.torch"});
  launch.timeout = absl::Minutes(2);  // PyTorch on a slow disk
  launch.on_line = [](const OutputLine&) {};
  const LaunchResult result = Launch(launch);
  if (result.exit_code == kExitOk) return absl::OkStatus();
  if (result.exit_code == kExitTryAgain) return absl::CancelledError(result.explanation);
  return absl::InvalidArgumentError(absl::StrCat(
      "--torch: '", python, "' cannot import PyTorch and Signpost: ", result.explanation,
      "\nInstall PyTorch there (", python, " -m pip install torch), or name another interpreter with "
      "--python"));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> TorchWorker(const std::string& program,
                                                     const std::string& python) {
  const fs::path package = fs::path(program).parent_path();
  const fs::path script = package / "examples" / "language_model.py";
  std::error_code ignored;
  if (!fs::exists(script, ignored)) {
    return absl::NotFoundError(absl::StrCat(
        "--torch: there is no Python package around '", program,
        "'. In a checkout './signpost demo --torch' builds one; elsewhere install the wheel, which "
        "has a signpost of its own"));
  }
  // The workers share this machine: a thread for each of its cores in each of them would be slow.
  std::vector<std::string> command = {
      "env", absl::StrCat("PYTHONPATH=", PythonPath(package.parent_path())), "OMP_NUM_THREADS=1",
      python};
  if (absl::Status status = CheckImport(python, command); !status.ok()) return status;
  command.push_back(script.string());
  return command;
}

}  // namespace signpost::cli
