#include "cli/demo_command.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cli/child_process.h"
#include "cli/demo_worker_command.h"
#include "cli/flag.h"
#include "cli/launcher.h"
#include "cli/torch_worker.h"
#include "cli/training_flags.h"
#include "client/demo/report.h"
#include "client/demo/text.h"
#include "log/log.h"
#include "proto/exit_code.h"
#include "proto/failure_timeout.h"
#include "storage/temporary_directory.h"

namespace signpost::cli {
namespace {

// With fewer 1-bit Adam may not find its freeze: its first look is at step 64, and others every 32.
constexpr uint64_t kLeastSteps = 128;

struct Flags {
  demo::TrainingOptions training;
  bool torch = false;
  std::string python = "/usr/bin/python3";  // the wheel sets SIGNPOST_PYTHON to its own
  // With --torch: those of the model's own flags that were given, as the example takes them.
  std::vector<std::string> torch_model;
  uint32_t workers = 4;
  uint32_t aggregators = 2;
  FailureTimeout failure_timeout;
  std::string output = "signpost-demo";
  std::string json;
};

// Everything that can be known to fail before minutes of training: options, text, places to write
// to.
absl::Status Prepare(Flags& flags) {
  demo::TrainingOptions& training = flags.training;
  const bool finds_freeze = training.freeze_step == OptimizerOptions::kAuto;
  const uint64_t least = finds_freeze ? kLeastSteps : 2;
  if (training.steps < least) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--steps is ", training.steps, ", wanted at least ", least, ": 1-bit Adam needs a warm-up",
        finds_freeze ? ", of 64 steps or more unless there is a --freeze-step" : ""));
  }
  demo::TrainingOptions checked = training;
  if (flags.torch) checked.model = {};  // the example's is another
  absl::Status status = demo::CheckOptions(checked);
  if (!training.text.empty()) status.Update(demo::LoadText(training.text).status());
  if (!status.ok()) return status;

  std::error_code error;
  std::filesystem::create_directories(flags.output, error);
  if (access(flags.output.c_str(), W_OK) != 0) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("--output: cannot write to directory '", flags.output,
                     "': ", std::system_category().message(errno))));
  }
  const std::string why_not = flags.json.empty() ? "" : WhyNotWritable(flags.json);
  if (!why_not.empty()) status.Update(absl::InvalidArgumentError("--json: " + why_not));
  return status;
}

// Rank 0's lines are the live view; the others' are for when something goes wrong.
void PrintLive(const OutputLine& line) {
  if (line.role != Role::kRank || line.is_error || line.index != 0) return;
  std::printf("  %.*s\n", static_cast<int>(line.text.size()), line.text.data());
  std::fflush(stdout);
}

// What both trainings start, and the arguments in which they differ.
struct Workers {
  std::vector<std::string> command;
  std::vector<std::string> adam, onebit;
};

absl::StatusOr<Workers> TorchWorkers(const Flags& flags) {
  absl::StatusOr<std::vector<std::string>> command = TorchWorker(OwnExecutable(), flags.python);
  if (!command.ok()) return command.status();
  const demo::TrainingOptions& training = flags.training;
  command->insert(command->end(), {absl::StrCat("--steps=", training.steps),
                                   absl::StrCat("--seed=", training.seed)});
  command->insert(command->end(), flags.torch_model.begin(), flags.torch_model.end());
  std::vector<std::string> onebit = {"--optimizer=onebit_adam"};
  if (training.freeze_step != OptimizerOptions::kAuto) {
    onebit.insert(onebit.end(),
                  {absl::StrCat("--freeze-step=", training.freeze_step),
                   "--variance-refresh-interval=0", "--warm-up-codec=fp32"});
  }
  return Workers{
      .command = *std::move(command), .adam = {"--optimizer=adam"}, .onebit = std::move(onebit)};
}

Workers OwnWorkers(const Flags& flags) {
  std::vector<std::string> command = {OwnExecutable(), "demo-worker"};
  const std::vector<std::string> arguments = TrainingArguments(flags.training);
  command.insert(command.end(), arguments.begin(), arguments.end());
  return {.command = std::move(command),
          .adam = {"--optimizer=adam"},
          .onebit = {"--optimizer=onebit_adam"}};
}

LaunchResult Train(const Flags& flags, const std::vector<std::string>& command,
                   const std::vector<std::string>& arguments, const std::string& results) {
  std::error_code error;
  if (!std::filesystem::create_directory(results, error)) {
    return {kExitBadConfiguration,
            absl::StrCat("cannot make the directory ", results, ": ", error.message())};
  }
  LaunchOptions launch;
  launch.workers = flags.workers;
  launch.aggregators = flags.aggregators;
  launch.failure_timeout = flags.failure_timeout;
  launch.on_line = PrintLive;
  launch.command = command;
  launch.command.insert(launch.command.end(), arguments.begin(), arguments.end());
  launch.command.push_back(absl::StrCat("--results=", results));
  return Launch(launch);
}

std::vector<std::string> ResultFiles(const std::string& directory, uint32_t workers) {
  std::vector<std::string> files;
  for (uint32_t rank = 0; rank < workers; ++rank) files.push_back(DemoResultFile(directory, rank));
  return files;
}

// The flags among `names` that were given, each with its values.
std::vector<std::string> Given(const CLI::App& app, const std::vector<std::string>& names) {
  std::vector<std::string> arguments;
  for (const std::string& name : names) {
    const CLI::Option& option = *app.get_option(name);
    if (option.count() == 0) continue;
    arguments.push_back(name);
    arguments.insert(arguments.end(), option.results().begin(), option.results().end());
  }
  return arguments;
}

absl::StatusOr<int> RunDemo(Flags& flags) {
  signal(SIGPIPE, SIG_IGN);  // a closed output must not leave the temporary directory behind
  if (absl::Status status = Prepare(flags); !status.ok()) return status;
  const TemporaryDirectory directory(TemporaryPrefix("signpost-demo"));
  if (directory.path().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(directory.why_not(), "; TMPDIR may name another place"));
  }
  const absl::StatusOr<Workers> workers = flags.torch ? TorchWorkers(flags) : OwnWorkers(flags);
  if (!workers.ok()) return workers.status();

  struct Training {
    const char* name;
    const std::vector<std::string>& arguments;
    std::string results;
  };
  const Training trainings[] = {{"Adam", workers->adam, directory.path() + "/adam"},
                                {"1-bit Adam", workers->onebit, directory.path() + "/onebit"}};
  for (const Training& training : trainings) {
    std::printf("%s: %u workers, %u aggregators, %s steps\n", training.name, flags.workers,
                flags.aggregators, absl::StrCat(flags.training.steps).c_str());
    std::fflush(stdout);
    const LaunchResult result =
        Train(flags, workers->command, training.arguments, training.results);
    if (result.exit_code != 0) {
      log::Write(log::Level::kError, "signpost demo",
                 absl::StrCat("training with ", training.name, ": ", result.explanation));
      return result.exit_code;
    }
  }

  const demo::ReportFiles files = {
      .svg = flags.output + "/loss.svg", .csv = flags.output + "/loss.csv", .json = flags.json};
  const absl::StatusOr<std::string> table =
      demo::Report({.adam = ResultFiles(trainings[0].results, flags.workers),
                    .onebit = ResultFiles(trainings[1].results, flags.workers)},
                   files);
  if (!table.ok()) return table.status();
  std::printf("\n%s\nLoss curves: %s and %s\n", table->c_str(), files.svg.c_str(),
              files.csv.c_str());
  return kExitOk;
}

}  // namespace

Command AddDemoCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "demo",
      "Train a real model on this machine, with Adam and with 1-bit Adam, and compare them");
  app.footer(
      "Both trainings start from the same seed, each with aggregators and workers of its own, "
      "which\n"
      "talk over TCP. At the end: both losses, and the bytes that were measured on the wire.\n\n"
      "With --torch the model is the transformer of the Python SDK's examples (language_model.py), "
      "with\n"
      "sizes of its own where none are given.\n\n"
      "Examples:\n"
      "  signpost demo\n"
      "  signpost demo --torch\n"
      "  signpost demo --steps 200 --workers 2 --hidden 256 --json figures.json");
  app.add_option("-n,--workers", flags->workers, "Workers of each training")
      ->check(CLI::Range(1, 256).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--aggregators", flags->aggregators, "Aggregators of each training")
      ->check(CLI::Range(1, 256).description(""))
      ->type_name("N")
      ->capture_default_str();
  AddFailureTimeoutFlag(
      app, flags->failure_timeout,
      "A peer without sign of life for this long is given up and looked for anew");
  AddTrainingFlags(app, flags->training);
  CLI::Option* torch =
      app.add_flag("--torch", flags->torch, "Train a transformer in PyTorch, from Python");
  app.add_option("--python", flags->python, "With --torch: the Python interpreter")
      ->type_name("PROGRAM")
      ->envname("SIGNPOST_PYTHON")
      ->capture_default_str();
  app.add_option("--width", "With --torch: numbers that stand for each byte of text")
      ->type_name("N")
      ->needs(torch);
  for (const char* name : {"--embedding", "--hidden"}) app.get_option(name)->excludes(torch);
  app.add_option("--output", flags->output, "Where loss.svg and loss.csv go")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--json", flags->json, "Also write the figures to this file")->type_name("FILE");
  return {&app,
          [flags, &app] {
            flags->torch_model = Given(
                app, {"--batch", "--learning-rate", "--context", "--layers", "--width", "--text"});
            return RunDemo(*flags);
          },
          /*answers=*/false};
}

}  // namespace signpost::cli
