#include "cli/chaos_command.h"

#include <signal.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/chaos.h"
#include "cli/launch_flags.h"
#include "cli/launcher.h"
#include "failpoint/failpoint.h"
#include "log/log.h"
#include "proto/exit_code.h"
#include "storage/temporary_directory.h"

namespace signpost::cli {
namespace {

struct Flags {
  LaunchOptions launch;
  ChaosOptions chaos;
  std::string faults = "kill";
  bool list_failpoints = false;
};

void Print(const std::string& line) { log::Write(log::Level::kInfo, "chaos", line); }

int ListFailpoints() {
  for (const FailpointPlace& place : AllFailpoints()) {
    std::printf("%-20s %s\n", std::string(place.name).c_str(), std::string(place.where).c_str());
  }
  return kExitOk;
}

absl::StatusOr<int> Run(Flags& flags, const std::vector<std::string>& command) {
  if (flags.list_failpoints) return ListFailpoints();
  signal(SIGPIPE, SIG_IGN);  // a closed output must not leave the temporary directory behind
  if (absl::Status status = SetCommand(command, "chaos", flags.launch); !status.ok()) {
    return status;
  }
  absl::StatusOr<std::vector<Fault>> faults = ParseFaults(flags.faults);
  if (!faults.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--faults: ", faults.status().message()));
  }
  std::optional<TemporaryDirectory> state_dir;  // if the user wants none in particular
  if (flags.launch.state_dir.empty()) {
    flags.launch.state_dir = state_dir.emplace(TemporaryPrefix("signpost-chaos")).path();
  }
  if (flags.launch.state_dir.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        state_dir->why_not(), "; name a state directory with --state-dir, or another TMPDIR"));
  }
  flags.chaos.faults = *std::move(faults);
  flags.chaos.aggregators = flags.launch.aggregators;
  flags.chaos.on_line = Print;
  Chaos chaos(flags.chaos);
  flags.launch.limit_restarts = false;
  flags.launch.on_listening = [&](const ListeningAggregator& aggregator) {
    return chaos.SetListening(aggregator);
  };
  const LaunchResult result = Launch(flags.launch);
  Print(absl::StrCat(chaos.Finish(), ". The job ended with exit code ", result.exit_code));
  if (result.exit_code != 0) {
    log::Write(log::Level::kError, "signpost chaos", result.explanation);
  }
  return result.exit_code;
}

}  // namespace

Command AddChaosCommand(CLI::App& program, const std::vector<std::string>& command) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "chaos", "Run a training job as 'run' does, and break its aggregators and network");
  app.footer(
      "Every few seconds one fault, of a random kind, to a random aggregator; what is done, and\n"
      "how long it took until that aggregator closed rounds again, is said in one line each:\n"
      "  kill   SIGKILL; it is started again and goes on from its state directory\n"
      "  stop   SIGSTOP, and SIGCONT after --pause\n"
      "  reset  all connections to it are reset\n"
      "  stall  nothing gets to it or from it during --pause; connections stay\n"
      "The job should end as it does with 'signpost run', with the same parameters. In a cluster,\n"
      "whatever kills and partitions processes there does for it; to have an aggregator die at a\n"
      "certain place, start it with, say, SIGNPOST_FAILPOINT=round.closed=kill@100.\n\n"
      "Example:\n"
      "  signpost chaos --every 5s --faults kill,reset -n 4 --aggregators 2 -- python3 train.py");
  AddLaunchFlags(app, flags->launch);
  app.add_option("--state-dir", flags->launch.state_dir,
                 "Aggregators keep their state here [a directory that is removed at the end]")
      ->type_name("DIR");
  AddDurationFlag(
      app, "--every", flags->chaos.every,
      "Time from one fault to the next, or longer if that has not been recovered from [5s]");
  AddDurationFlag(app, "--pause", flags->chaos.pause, "How long stop and stall last [2s]");
  app.add_option("--faults", flags->faults, "The kinds of faults, separated by commas")
      ->type_name("kill|stop|reset|stall,...")
      ->capture_default_str();
  app.add_option("--seed", flags->chaos.seed, "The same seed plans the same faults")
      ->capture_default_str();
  app.add_flag("--list-failpoints", flags->list_failpoints,
               "Only print the names that SIGNPOST_FAILPOINT knows, and where they are");
  return {&app, [flags, &command] { return Run(*flags, command); }, /*answers=*/false};
}

}  // namespace signpost::cli
