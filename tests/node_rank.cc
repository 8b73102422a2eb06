// A training process for node_run_test.cc, which may die as its environment says.
//
//   NODE_RANK_DIES=RANK@STEP,before   that rank kills itself before it takes the step
//   NODE_RANK_DIES=RANK@STEP,during   ... while its node's exchange is under way: ranks of other
//                                     nodes do not take the step before it is dead
//   NODE_RANK_FORKS=1                 ... and leaves a child, which has its connections
//   NODE_RANK_MARKS=DIRECTORY         where it leaves a mark when it has died, so that it dies once
//   NODE_RANK_COMPUTES=DURATION       for so long all do before the second step
//   NODE_RANK_STAYS=1                 who is told that another has died joins again, and does not
//                                     end
//   NODE_RANK_SIGNALS=RANK@STEP,9     that rank sends its node's worker the signal of that number
//                                     before it takes the step

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "proto/failure_timeout.h"
#include "security/client_security.h"
#include "tests/job.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

constexpr uint64_t kSteps = 30;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What NODE_RANK_DIES says.
struct Death {
  Death() {
    const std::string text = Variable("NODE_RANK_DIES");
    char when[16] = "";
    unsigned of_rank = 0, at_step = 0;
    planned = std::sscanf(text.c_str(), "%u@%u,%15s", &of_rank, &at_step, when) == 3;
    rank = of_rank;
    step = at_step;
    during = std::string(when) == "during";
    mark = absl::StrCat(Variable("NODE_RANK_MARKS"), "/died");
  }

  bool has_come() const { return std::filesystem::exists(mark); }
  void Come() const {
    std::ofstream(mark).put('1');
    if (!Variable("NODE_RANK_FORKS").empty() && fork() == 0) StayAsChild();
    kill(getpid(), SIGKILL);
  }

  // Until the directory of the mark is removed, but for its parent's output.
  [[noreturn]] void StayAsChild() const {
    setsid();  // `signpost run` ends the group of a process that has ended
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(fd);
    while (access(mark.c_str(), F_OK) == 0) usleep(10'000);
    _exit(0);
  }

  bool planned, during;
  uint32_t rank;
  uint64_t step;
  std::string mark;
};

// What NODE_RANK_SIGNALS says.
void SignalWorker(const SessionOptions& options, uint64_t at_step) {
  unsigned rank = 0, step = 0;
  int signal = 0;
  const std::string text = Variable("NODE_RANK_SIGNALS");
  if (std::sscanf(text.c_str(), "%u@%u,%d", &rank, &step, &signal) != 3) return;
  if (rank != options.worker.rank || step != at_step) return;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = options.node.substr(std::strlen("unix:"));
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ucred worker = {};
  socklen_t size = sizeof worker;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &worker, &size) == 0) {
    kill(worker.pid, signal);
  }
  close(fd);
}

// Returns when the first node has sent its part of that step, and the second one has not.
void AwaitExchange(const SessionOptions& options, uint64_t step) {
  const auto security =
      ClientSecurity::Open(options.security, options.aggregators, PrintConnection);
  auto channel = ConnectToAggregator(options.aggregators[0], FailureTimeout(),
                                     /*on_connection=*/nullptr, security.value_or(nullptr));
  StatusRequest request;
  request.set_job(options.worker.job);
  while (true) {
    const auto status = channel->Status(request, absl::Now() + absl::Seconds(30));
    if (status.ok() && status->jobs_size() == 1 && status->jobs(0).step() == step &&
        status->jobs(0).waiting_for_ranks_size() == 1) {
      return;
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
}

absl::Status TrainAsRank() {
  absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  if (!options.ok()) return options.status();
  JobOptionsForTest job;
  options->worker.block_elements = job.worker.block_elements;
  options->worker.chunk_elements = job.worker.chunk_elements;
  const uint32_t rank = options->worker.rank;
  const bool is_of_first_node = 2 * rank < options->worker.world_size;
  const Death death;
  Replica replica(job, rank);
  absl::StatusOr<std::unique_ptr<Session>> session;
  const auto join = [&] {
    session = Session::Join(*options, {.freeze_step = 8, .variance_refresh_interval = 6},
                            replica.Parameters());
    if (session.ok() && (*session)->returned()) {
      std::printf("back at step %d\n", static_cast<int>((*session)->steps()));
    }
    return session.status();
  };
  if (absl::Status status = join(); !status.ok()) return status;
  while ((*session)->steps() < kSteps) {
    const uint64_t step = (*session)->steps();
    std::thread killer;
    if (death.planned && step == death.step && !death.has_come()) {
      if (rank == death.rank && !death.during) death.Come();
      if (rank == death.rank) {
        killer = std::thread([&] {
          AwaitExchange(*options, step);
          death.Come();
        });
      }
      if (!is_of_first_node && death.during) {
        while (!death.has_come()) absl::SleepFor(absl::Milliseconds(1));
      }
    }
    absl::Duration computing;
    if (step == 1 && absl::ParseDuration(Variable("NODE_RANK_COMPUTES"), &computing)) {
      absl::SleepFor(computing);
    }
    SignalWorker(*options, step);
    replica.gradient = GradientOf(rank, step, replica.values.size());
    const absl::StatusOr<StepReport> report =
        (*session)->Step(replica.Gradients(), {GroupRates{.learning_rate = 0.01}});
    if (killer.joinable()) killer.join();
    if (report.ok()) continue;
    std::printf("told: %s\n", std::string(report.status().message()).c_str());
    if (!absl::IsAborted(report.status()) || Variable("NODE_RANK_STAYS").empty()) {
      return report.status();
    }
    session->reset();
    if (absl::Status status = join(); !status.ok()) return status;
  }
  std::printf("done: parameters %08x\n", (*session)->ParametersCrc32c());
  return (*session)->Leave();
}

}  // namespace
}  // namespace signpost::testing

int main() {
  const absl::Status status = signpost::testing::TrainAsRank();
  std::fflush(stdout);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
