#include "cli/run_command.h"

#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cli/launch_flags.h"
#include "cli/launcher.h"
#include "cli/trace_command.h"
#include "log/log.h"
#include "proto/exit_code.h"
#include "trace/merge.h"

namespace signpost::cli {
namespace {

// Where a run's processes record what is to become that file.
absl::StatusOr<std::string> PartsOf(const std::string& trace) {
  std::error_code error;
  const std::string parts =
      absl::StrCat(std::filesystem::absolute(trace, error).string(), ".parts");
  const bool is_there = !error && std::filesystem::exists(parts, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--trace: cannot look for ", trace, ".parts: ", error.message()));
  }
  if (!is_there) return parts;
  return absl::InvalidArgumentError(
      absl::StrCat(parts, " is there already, from a run that was killed. `signpost trace merge ",
                   trace, " ", parts, "` makes a trace of it; then remove it"));
}

absl::StatusOr<int> Run(LaunchOptions& launch, const std::string& trace) {
  signal(SIGPIPE, SIG_IGN);  // nor must the trace be lost with a closed output
  if (!trace.empty()) {
    if (absl::Status status = trace::CheckOutput(trace, {}); !status.ok()) return status;
    absl::StatusOr<std::string> parts = PartsOf(trace);
    if (!parts.ok()) return parts.status();
    launch.trace_dir = *std::move(parts);
  }
  const LaunchResult result = Launch(launch);
  if (result.exit_code != 0) {
    log::Write(log::Level::kError, "signpost run", result.explanation);
  }
  if (trace.empty()) return result.exit_code;
  const absl::Status merged = MergeTraceOfRun(launch.trace_dir, trace);
  if (merged.ok()) return result.exit_code;
  log::Write(log::Level::kError, "signpost run", merged.message());
  return result.exit_code != 0 ? result.exit_code : ExitCodeOf(merged);
}

}  // namespace

Command AddRunCommand(CLI::App& program, const std::vector<std::string>& command) {
  // Shared by the flags' and the command's closures.
  auto launch = std::make_shared<LaunchOptions>();
  auto trace = std::make_shared<std::string>();
  CLI::App& app = *program.add_subcommand(
      "run", "Run a training job on this machine: COMMAND as every rank, and aggregators");
  app.footer(
      "COMMAND and its arguments stand behind ' -- '. SIGNPOST_AGGREGATORS, SIGNPOST_JOB,\n"
      "SIGNPOST_RANK, SIGNPOST_WORLD_SIZE and SIGNPOST_FAILURE_TIMEOUT are in each rank's\n"
      "environment; a Session joins with them. So are RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR\n"
      "and MASTER_PORT, for torch.distributed. Each rank compresses and applies with its share of "
      "the\n"
      "processors, or with SIGNPOST_THREADS threads; PyTorch of several ranks computes with as\n"
      "many as there are for each, or with OMP_NUM_THREADS. If a rank fails, the others are "
      "stopped,\n"
      "and the exit code is that rank's. Ctrl-C stops all, a second one kills them.\n\n"
      "With --state-dir, an aggregator that dies is started again in its place, up to ten times a\n"
      "minute. The state is in DIR/run-..., which is removed when the run has ended; where an\n"
      "aggregator failed, or the run itself was killed, it is left, and of no use to others.\n"
      "With --round-deadline and --min-workers, rounds close without late workers and the run\n"
      "goes on without failed ones while enough are left; with --worker-restarts those are\n"
      "started again, and take their places with the state of the others.\n\n"
      "With --per-node, ranks of programs in C and C++ attach in groups to a 'signpost worker', "
      "as\n"
      "those of a node do, which sends once for all of them, and SIGNPOST_NODE says where; with\n"
      "--worker-restarts ranks that fail attach to it again. In Python use shard_mesh instead.\n\n"
      "Example:\n"
      "  signpost run -n 4 --aggregators 2 -- python3 train.py --epochs 3");
  AddLaunchFlags(app, *launch);
  app.add_option("--state-dir", launch->state_dir,
                 "Aggregators keep their state here, and are started again when they die")
      ->type_name("DIR");
  app.add_option(
         "--trace", *trace,
         "Write what every process did, and when, to this file, however the run ends, for "
         "ui.perfetto.dev and `signpost trace summary`; during the run FILE.parts has 16 MiB of "
         "each")
      ->type_name("FILE");
  return {&app,
          [launch, trace, &command]() -> absl::StatusOr<int> {
            if (absl::Status status = SetCommand(command, "run", *launch); !status.ok()) {
              return status;
            }
            return Run(*launch, *trace);
          },
          /*answers=*/false};
}

}  // namespace signpost::cli
