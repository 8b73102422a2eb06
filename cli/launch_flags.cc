#include "cli/launch_flags.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cli/command.h"
#include "cli/flag.h"

namespace signpost::cli {

void AddLaunchFlags(CLI::App& app, LaunchOptions& launch) {
  SetUsageOfTail(app, "-- COMMAND [ARG ...]");
  app.add_option("-n,--workers", launch.workers, "Ranks to start")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--aggregators", launch.aggregators, "Aggregators to start, one for each shard")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--per-node", launch.per_node,
                 "Ranks of each node: they attach to its worker, which sends for all of them "
                 "[each rank is a worker]")
      ->type_name("N");
  app.add_option("--node-gpu", launch.node_gpu,
                 "With --per-node: the GPU that each node's worker trains on, as CUDA counts them "
                 "[on its processors]")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("N");
  AddFailureTimeoutFlag(
      app, launch.failure_timeout,
      "A peer without sign of life for this long is given up and looked for anew");
  app.add_flag(
      "--plain-text", launch.plain_text,
      "No TLS on loopback, for which each run otherwise makes certificates of its own: faster, "
      "but open to other users of this machine");
  AddDurationFlag(app, "--round-deadline", launch.round_deadline,
                  "Rounds close without workers that are later than the first by this much [wait]");
  app.add_option("--min-workers", launch.min_workers,
                 "With --round-deadline: least workers in a round; the run ends if fewer are left")
      ->type_name("N");
  app.add_option(
         "--worker-restarts", launch.worker_restarts,
         "With --min-workers or --per-node: how often a rank that fails is started again, to "
         "take its place with the state of the others, or of its node's worker")
      ->type_name("N")
      ->capture_default_str();
  AddDurationFlag(app, "--timeout", launch.timeout, "Stop the run after this long [no limit]");
  AddDurationFlag(app, "--grace", launch.grace,
                  "How long a process may take to end before it is killed [10s]");
}

absl::Status SetCommand(const std::vector<std::string>& command, const std::string& name,
                        LaunchOptions& launch) {
  if (command.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("nothing to run: COMMAND is missing. It stands behind ' -- ', as in\n"
                     "  signpost ",
                     name, " -n 4 --aggregators 2 -- python3 train.py"));
  }
  if (launch.min_workers > 0 && launch.round_deadline == absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "--min-workers needs a --round-deadline above 0s: how long late workers are waited for");
  }
  if (launch.round_deadline > absl::ZeroDuration() && launch.min_workers == 0) {
    return absl::InvalidArgumentError(
        "--round-deadline needs --min-workers above 0: with how many a round may close");
  }
  if (launch.worker_restarts > 0 && launch.min_workers == 0 && launch.per_node == 0) {
    return absl::InvalidArgumentError(
        "--worker-restarts needs --per-node, so that a node's worker keeps the state, or "
        "--round-deadline and --min-workers: the others must be able to go on meanwhile");
  }
  if (launch.node_gpu && launch.per_node == 0) {
    return absl::InvalidArgumentError("--node-gpu needs --per-node: it is for a node's worker");
  }
  if (launch.per_node > 0 && launch.workers % launch.per_node != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--per-node is ", launch.per_node,
                                                   ", which does not divide the ", launch.workers,
                                                   " ranks: all nodes have as many"));
  }
  if (launch.per_node > 0 && launch.min_workers > 0) {
    return absl::InvalidArgumentError(
        "--per-node and --min-workers do not go together: ranks of a node wait for each other");
  }
  if (launch.min_workers > launch.workers) {
    return absl::InvalidArgumentError(
        absl::StrCat("--min-workers is ", launch.min_workers, ", of ", launch.workers));
  }
  launch.command = command;
  return absl::OkStatus();
}

}  // namespace signpost::cli
