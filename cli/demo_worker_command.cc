#include "cli/demo_worker_command.h"

#include <signal.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cli/training_flags.h"
#include "client/demo/training.h"
#include "client/session.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

struct Flags {
  demo::TrainingOptions training;
  std::string results;
};

// Ends with "try again" at a SIGTERM that comes before the training takes requests to stop: while
// it waits in its join, say. The first process of a container is not ended by a signal that it has
// no handler for.
void EndAtSigterm() {
  struct sigaction end = {};
  end.sa_handler = [](int) { _exit(kExitTryAgain); };
  sigaction(SIGTERM, &end, nullptr);
}

absl::StatusOr<int> Work(Flags& flags) {
  EndAtSigterm();
  const absl::StatusOr<SessionOptions> session = SessionOptions::FromEnvironment();
  if (!session.ok()) return session.status();
  if (!flags.results.empty()) {
    flags.training.result_file = DemoResultFile(flags.results, session->worker.rank);
  }
  if (absl::Status status = demo::TrainAsWorker(flags.training); !status.ok()) return status;
  return kExitOk;
}

}  // namespace

Command AddDemoWorkerCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand("demo-worker", "One worker of the demo");
  app.group("");  // hidden
  AddTrainingFlags(app, flags->training);
  app.add_option("--optimizer", flags->training.optimizer, "adam or onebit_adam [onebit_adam]")
      ->transform(CLI::CheckedTransformer(std::map<std::string, demo::Optimizer>{
          {"adam", demo::Optimizer::kAdam}, {"onebit_adam", demo::Optimizer::kOneBitAdam}}));
  app.add_option("--results", flags->results, "Directory for the results")->type_name("DIR");
  app.add_option("--checkpoint-dir", flags->training.checkpoint_directory,
                 "Directory of the job's checkpoints, which all workers see")
      ->type_name("DIR");
  app.add_option("--checkpoint-every", flags->training.checkpoint_every,
                 "Steps between two checkpoints [never]")
      ->type_name("N");
  app.add_flag("--resume", flags->training.resume, "Go on from the newest checkpoint there");
  app.add_flag("--resume-if-any", flags->training.resume_if_any,
               "Go on from the newest checkpoint, or begin anew if there is none");
  return {&app, [flags] { return Work(*flags); }, /*answers=*/false};
}

std::string DemoResultFile(const std::string& directory, uint32_t rank) {
  return absl::StrCat(directory, "/rank-", rank);
}

}  // namespace signpost::cli
