#include "cli/worker_command.h"

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cli/flag.h"
#include "cli/trace_command.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "node/server.h"
#include "proto/exit_code.h"
#include "trace/recorder.h"

namespace signpost::cli {
namespace {

struct Flags {
  node::ServerOptions server;
  std::string aggregators;
  std::optional<uint32_t> threads;
  std::optional<int> gpu;
};

absl::StatusOr<int> Serve(Flags& flags) {
  SessionOptions& session = flags.server.node.session;
  absl::StatusOr<std::vector<std::string>> aggregators = ParseAddresses(flags.aggregators);
  if (!aggregators.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--aggregators: ", aggregators.status().message()));
  }
  session.aggregators = *std::move(aggregators);
  session.worker.threads = flags.threads.value_or(ShareOfProcessors());
  if (!session.trace.empty()) {
    absl::Status status = trace::Start(session.trace, absl::StrCat("node ", session.worker.rank));
    if (!status.ok()) return status;
  }
  // Blocked before the server starts its threads, so that none of them is interrupted.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  sigprocmask(SIG_BLOCK, &stop, nullptr);

  std::unique_ptr<kernels::cuda::Gpu> gpu;
  if (flags.gpu) {
    absl::StatusOr<std::unique_ptr<kernels::cuda::Gpu>> opened =
        kernels::cuda::OpenGpu(*flags.gpu, " of the node's worker");
    if (!opened.ok()) {
      return absl::Status(opened.status().code(),
                          absl::StrCat("--gpu: ", opened.status().message()));
    }
    gpu = *std::move(opened);
    flags.server.node.gpu = gpu.get();
  }
  absl::Mutex mutex;
  bool is_ending = false;
  absl::Status why_lost;
  flags.server.node.on_lost_gpu = [&](const absl::Status& why) {
    absl::MutexLock lock(&mutex);
    why_lost.Update(why);
    if (!std::exchange(is_ending, true)) kill(getpid(), SIGTERM);
  };
  const absl::StatusOr<std::unique_ptr<node::Server>> server = node::Server::Start(flags.server);
  if (!server.ok()) return server.status();
  std::printf("listening on %s\n", flags.server.listen.c_str());
  std::fflush(stdout);

  int signal = 0;
  sigwait(&stop, &signal);
  bool has_more_to_say;
  {
    absl::MutexLock lock(&mutex);
    is_ending = true;
    has_more_to_say = !why_lost.ok();
  }
  // A second signal ends the process at once.
  if (!has_more_to_say) sigprocmask(SIG_UNBLOCK, &stop, nullptr);
  (*server)->Stop();
  absl::MutexLock lock(&mutex);
  if (!why_lost.ok()) return why_lost;
  return kExitOk;
}

}  // namespace

Command AddWorkerCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "worker", "Be the worker of a node: train for all of its processes, and send once for them");
  app.footer(
      "Training processes with SIGNPOST_NODE=unix:PATH in their environment attach to it, instead "
      "of\n"
      "being workers themselves: they need nothing else but SIGNPOST_JOB, SIGNPOST_RANK and\n"
      "SIGNPOST_WORLD_SIZE, which count processes, node by node (torchrun's RANK and WORLD_SIZE "
      "will\n"
      "do). Gradients and parameters are in memory that they share, so it must run as the same "
      "user,\n"
      "and in the same container, or one that sees its processes. With --gpu that is memory of "
      "its\n"
      "GPU, the optimizer runs there, and nothing but what travels crosses to the host: all\n"
      "processes must then have their tensors on GPUs, which copy to and from it directly.\n\n"
      "The optimizer's state, the error and the connections are its own: when a process dies, the\n"
      "others are told which, all of them attach again, and the job goes on where it was.\n"
      "The first line that it prints is 'listening on unix:PATH'. A path that a worker has left\n"
      "behind is used again; one where another listens is refused. SIGTERM ends it: it finishes "
      "the\n"
      "step that is under way, and leaves its jobs. After a fault of its GPU it ends by itself, "
      "and\n"
      "says what happened; jobs go on from their checkpoints.\n\n"
      "Example, the first of two nodes with four processes each:\n"
      "  signpost worker --listen unix:/run/signpost/worker --processes 4 --rank 0 --world-size 2 "
      "\\\n"
      "      --aggregators 10.0.0.1:4000,10.0.0.2:4000");
  app.add_option("--listen", flags->server.listen, "The socket that processes attach to")
      ->type_name("unix:PATH")
      ->required();
  node::NodeOptions& node = flags->server.node;
  app.add_option("--processes", node.processes, "Training processes of each node")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->required();
  app.add_option("--rank", node.session.worker.rank, "Which node this is, from 0 on")
      ->envname("SIGNPOST_RANK")
      ->type_name("N")
      ->required();
  app.add_option("--world-size", node.session.worker.world_size, "Number of nodes")
      ->envname("SIGNPOST_WORLD_SIZE")
      ->type_name("N")
      ->required();
  AddClientSecurityFlags(app, flags->server.node.session.security);
  app.add_option("--aggregators", flags->aggregators,
                 "Where the aggregator of each shard listens, in shard order")
      ->envname("SIGNPOST_AGGREGATORS")
      ->type_name("HOST:PORT,...")
      ->required();
  AddFailureTimeoutFlag(app, node.session.failure_timeout,
                        "An aggregator without sign of life for this long is reconnected to");
  app.add_option("--connections", node.session.connections,
                 "TCP connections to each aggregator, for links that one does not fill")
      ->envname("SIGNPOST_CONNECTIONS")
      ->check(CLI::Range(1u, SessionOptions::kMostConnections).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--threads", flags->threads,
                 "Threads that compress and apply [its share of the processors, up to 8]")
      ->envname("SIGNPOST_THREADS")
      ->check(CLI::Range(1, 256).description(""))
      ->type_name("N");
  app.add_option("--gpu", flags->gpu, "Train on this GPU, as CUDA counts them [on its processors]")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("N");
  AddTraceFlag(app, node.session.trace);
  app.add_option("--max-parameters", node.max_parameters, "Most parameters of a job")
      ->transform(PositiveCount())
      ->capture_default_str();
  return {&app, [flags] { return Serve(*flags); }, /*answers=*/false};
}

}  // namespace signpost::cli
