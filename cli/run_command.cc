#include "cli/run_command.h"

#include <cstdio>
#include <memory>

#include "absl/strings/str_format.h"
#include "cli/launcher.h"

namespace signpost::cli {

Command AddRunCommand(CLI::App& program, const std::vector<std::string>& command) {
  // Shared by the flags' and the command's closures.
  auto launch = std::make_shared<LaunchOptions>();
  CLI::App& app = *program.add_subcommand(
      "run", "Run a training job on this machine: COMMAND as every rank, and aggregators");
  app.footer(
      "COMMAND and its arguments stand behind ' -- '. SIGNPOST_AGGREGATORS, SIGNPOST_JOB,\n"
      "SIGNPOST_RANK, SIGNPOST_WORLD_SIZE and SIGNPOST_FAILURE_TIMEOUT are in each rank's\n"
      "environment; a Session joins with them. If a rank fails, the others are stopped, and the\n"
      "exit code is that rank's. Ctrl-C stops all, a second one kills them.\n\n"
      "With --state-dir, an aggregator that dies is started again in its place, up to ten times a\n"
      "minute. With --round-deadline and --min-workers, rounds close without late workers and the\n"
      "run goes on without failed ones while enough are left.\n\n"
      "Example:\n"
      "  signpost run -n 4 --aggregators 2 -- python3 train.py --epochs 3");
  app.add_option("-n,--workers", launch->workers, "Ranks to start")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--aggregators", launch->aggregators, "Aggregators to start, one for each shard")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->capture_default_str();
  AddFailureTimeoutFlag(
      app, launch->failure_timeout,
      "A peer without sign of life for this long is given up and looked for anew");
  AddDurationFlag(app, "--round-deadline", launch->round_deadline,
                  "Rounds close without workers that are so much later than the first [wait]");
  app.add_option("--min-workers", launch->min_workers,
                 "With a round deadline: least workers in a round; fewer end the run")
      ->type_name("N");
  app.add_option("--state-dir", launch->state_dir,
                 "Aggregators keep their state here, and are started again when they die")
      ->type_name("DIR");
  AddDurationFlag(app, "--timeout", launch->timeout, "Stop the run after this long [no limit]");
  AddDurationFlag(app, "--grace", launch->grace,
                  "How long a process may take to end before it is killed [10s]");

  return {&app, [launch, &command]() -> absl::StatusOr<int> {
            if (command.empty()) {
              return absl::InvalidArgumentError(
                  "nothing to run: COMMAND is missing. It stands behind ' -- ', as in\n"
                  "  signpost run -n 4 --aggregators 2 -- python3 train.py");
            }
            if ((launch->round_deadline > absl::ZeroDuration()) != (launch->min_workers > 0)) {
              return absl::InvalidArgumentError(
                  "--round-deadline and --min-workers go together: give both, or neither");
            }
            if (launch->min_workers > launch->workers) {
              return absl::InvalidArgumentError(absl::StrFormat(
                  "--min-workers is %d, of %d", launch->min_workers, launch->workers));
            }
            launch->command = command;
            const LaunchResult result = Launch(*launch);
            if (result.exit_code != 0) {
              std::fprintf(stderr, "signpost run: %s\n", result.explanation.c_str());
            }
            return result.exit_code;
          }};
}

}  // namespace signpost::cli
