// signpost: one program for all there is to do. Each command has a file of its own.

#include <grpc/support/log.h>
#include <malloc.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cli/aggregator_command.h"
#include "cli/bench_command.h"
#include "cli/cert_command.h"
#include "cli/chaos_command.h"
#include "cli/checkpoint_command.h"
#include "cli/codec_command.h"
#include "cli/command.h"
#include "cli/completion_command.h"
#include "cli/config_command.h"
#include "cli/demo_command.h"
#include "cli/demo_worker_command.h"
#include "cli/doctor_command.h"
#include "cli/flag_settings.h"
#include "cli/k8s_command.h"
#include "cli/kept_memory.h"
#include "cli/man_command.h"
#include "cli/probe_command.h"
#include "cli/run_command.h"
#include "cli/status_command.h"
#include "cli/trace_command.h"
#include "cli/version_command.h"
#include "cli/worker_command.h"
#include "failpoint/failpoint.h"
#include "google/protobuf/stubs/logging.h"
#include "log/log.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, kMmapThreshold);
  mallopt(M_TRIM_THRESHOLD, kTrimThreshold);
}

// Their own logs say what our errors say, at length, and not in the format that was asked for; what
// makes them write may be anybody who connects. gRPC's is there for who asks for it.
void QuietLibraries() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  google::protobuf::SetLogHandler(nullptr);
}

// "help run" is "run --help".
void TakeHelp(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "help") return;
  arguments.erase(arguments.begin());
  arguments.push_back("--help");
}

int Fail(const std::string& name, const absl::Status& status) {
  log::Write(log::Level::kError, name, status.message());
  return ExitCodeOf(status);
}

// With errors of the standard library's as they would be of ours.
absl::StatusOr<int> Run(const Command& command) {
  try {
    return command.run();
  } catch (const std::bad_alloc&) {
    return absl::InternalError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// `exit_code`, unless it is that of success and standard output has not taken all of the answer: a
// script must not go on with half of it.
int CheckOutput(int exit_code) {
  const int earlier = errno;  // of the write that failed, if the last of them did not fit a buffer
  const int reason = std::fflush(stdout) != 0 ? errno : earlier;
  if (exit_code != kExitOk || std::ferror(stdout) == 0) return exit_code;
  return Fail("signpost", absl::ResourceExhaustedError(absl::StrCat(
                              "cannot write to standard output: ", std::strerror(reason))));
}

int Main(std::vector<std::string> arguments) {
  KeepFreedMemory();
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  QuietLibraries();
  const std::vector<std::string> tail = TakeTail(arguments);
  const std::vector<std::string> explained = TakeExplained(arguments);
  TakeHelp(arguments);

  CLI::App program(
      "Signpost trains with one sign bit per parameter each way: workers compress, sharded\n"
      "aggregators average.",
      "signpost");
  program.set_version_flag("--version", DescribeVersion);
  program.require_subcommand(0, 1);  // a command's arguments may be called like another command
  program.footer(
      "Start with 'signpost demo'. Each command explains itself: signpost COMMAND --help\n"
      "In a checkout, './signpost test' runs every test.");
  const std::vector<Command> commands = {
      AddDemoCommand(program),
      AddRunCommand(program, tail),
      AddAggregatorCommand(program),
      AddWorkerCommand(program),
      AddStatusCommand(program),
      AddCheckpointCommand(program),
      AddChaosCommand(program, tail),
      AddBenchCommand(program),
      AddCodecCommand(program),
      AddCertCommand(program),
      AddProbeCommand(program),
      AddK8sCommand(program, tail),
      AddDoctorCommand(program),
      AddConfigCommand(program, explained),
      AddVersionCommand(program),
      AddDemoWorkerCommand(program),
      AddManCommand(program),
      AddCompletionCommand(program),
      AddCompleteCommand(program, tail),
      AddTraceCommand(program),
  };

  if (const char* failpoints = std::getenv("SIGNPOST_FAILPOINT"); failpoints != nullptr) {
    if (const absl::Status armed = ArmFailpoints(failpoints); !armed.ok()) {
      return Fail("signpost: SIGNPOST_FAILPOINT", armed);
    }
  }
  AddLogFlags(program);
  AddConfigFlags(program);
  const absl::Status parsed = Parse(program, arguments);
  if (absl::IsCancelled(parsed)) return CheckOutput(kExitOk);
  if (!parsed.ok()) return Fail("signpost", parsed);
  for (const Command& command : commands) {
    if (!command.flags->parsed()) continue;
    const std::string name = "signpost " + command.flags->get_name();
    if (!tail.empty() && !TakesTail(name)) {
      return Fail(name,
                  absl::InvalidArgumentError("takes nothing behind ' -- '; 'signpost run' does"));
    }
    const absl::StatusOr<int> exit_code = Run(command);
    if (!exit_code.ok()) return Fail(name, exit_code.status());
    return command.answers ? CheckOutput(*exit_code) : *exit_code;
  }
  std::fputs(program.help().c_str(), stderr);
  return kExitBadConfiguration;
}

}  // namespace
}  // namespace signpost::cli

int main(int argc, char** argv) {
  return signpost::cli::Main(std::vector<std::string>(argv + 1, argv + argc));
}
