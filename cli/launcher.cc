#include "cli/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cli/child_process.h"
#include "cli/exit_code.h"
#include "cli/process_scope.h"
#include "cli/restart_limit.h"
#include "proto/steady_time.h"

namespace signpost::cli {
namespace {

std::string NameOf(bool is_aggregator, uint32_t index) {
  return absl::StrCat(is_aggregator ? "aggregator " : "rank ", index);
}

class LaunchedRun {
 public:
  explicit LaunchedRun(const LaunchOptions& options)
      : options_(options),
        job_(absl::StrCat("run-", absl::ToUnixMicros(absl::Now()), "-", getpid())) {}

  LaunchResult Run() {
    StartAggregators();
    while (!AllEnded(aggregators_) || !AllEnded(workers_)) {
      WaitForEvent();
      ReadOutput();
      while (const std::optional<int> signal = scope_.NextSignal()) {
        if (*signal != SIGCHLD) Interrupt();
      }
      Reap();
      CheckDeadlines();
    }
    return std::move(result_);
  }

 private:
  using Processes = std::vector<std::unique_ptr<ChildProcess>>;  // by shard or rank

  static bool AllEnded(const Processes& processes) {
    return std::all_of(processes.begin(), processes.end(),
                       [](const auto& process) { return process->ended(); });
  }

  // Starting.

  void StartAggregators() {
    shards_.resize(options_.aggregators);
    if (!options_.limit_restarts) {
      for (Shard& shard : shards_)
        shard.restarts = RestartLimit(std::numeric_limits<size_t>::max());
    }
    start_deadline_ = SteadyNow() + options_.aggregator_start_timeout;
    deadline_ = SteadyNow() + options_.timeout;
    for (uint32_t shard = 0; shard < options_.aggregators; ++shard) {
      std::unique_ptr<ChildProcess> process = StartProcess(AggregatorCommand(shard), {});
      if (process == nullptr) return;
      aggregators_.push_back(std::move(process));
    }
  }

  std::vector<std::string> AggregatorCommand(uint32_t shard) const {
    std::vector<std::string> command = options_.aggregator_command;
    if (command.empty()) command = {OwnExecutable(), "aggregator"};
    const std::string& address = shards_[shard].address;
    command.push_back(absl::StrCat("--listen=", address.empty() ? "127.0.0.1:0" : address));
    command.push_back(absl::StrCat("--shard=", shard, "/", options_.aggregators));
    // No grace of its own: it is stopped when its workers have ended.
    command.push_back("--drain-grace=0s");
    command.push_back(absl::StrCat("--failure-timeout=", options_.failure_timeout.ToString()));
    if (!options_.state_dir.empty()) {
      command.push_back(absl::StrCat("--state-dir=", options_.state_dir, "/shard-", shard));
    }
    return command;
  }

  void StartWorkers() {
    worker_restarts_.resize(options_.workers);
    for (uint32_t rank = 0; rank < options_.workers; ++rank) {
      std::unique_ptr<ChildProcess> process = StartWorker(rank);
      if (process == nullptr) return;
      workers_.push_back(std::move(process));
    }
  }

  std::unique_ptr<ChildProcess> StartWorker(uint32_t rank) {
    std::vector<std::string> addresses;
    for (const Shard& shard : shards_) addresses.push_back(shard.address_for_workers);
    std::vector<std::pair<std::string, std::string>> environment = {
        {"SIGNPOST_AGGREGATORS", absl::StrJoin(addresses, ",")},
        {"SIGNPOST_JOB", job_},
        {"SIGNPOST_RANK", absl::StrCat(rank)},
        {"SIGNPOST_WORLD_SIZE", absl::StrCat(options_.workers)},
        {"LOCAL_WORLD_SIZE", absl::StrCat(options_.workers)},
        {"SIGNPOST_FAILURE_TIMEOUT", options_.failure_timeout.ToString()}};
    if (options_.min_workers > 0) {
      environment.push_back(
          {"SIGNPOST_ROUND_DEADLINE", absl::FormatDuration(options_.round_deadline)});
      environment.push_back({"SIGNPOST_MIN_WORKERS", absl::StrCat(options_.min_workers)});
    }
    return StartProcess(options_.command, environment);
  }

  // Null: it could not be started, and the run stops.
  std::unique_ptr<ChildProcess> StartProcess(
      const std::vector<std::string>& command,
      const std::vector<std::pair<std::string, std::string>>& environment) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> process =
        ChildProcess::Start(command, environment);
    if (process.ok()) return *std::move(process);
    Stop({ExitCodeOf(process.status()), std::string(process.status().message())});
    return nullptr;
  }

  // Events.

  void WaitForEvent() {
    std::vector<pollfd> fds = {{scope_.fd(), POLLIN, 0}};
    for (const Processes* processes : {&aggregators_, &workers_}) {
      for (const auto& process : *processes) {
        for (const int fd : process->pipes()) fds.push_back({fd, POLLIN, 0});
      }
    }
    const absl::Duration left =
        std::min({start_deadline_, deadline_, kill_deadline_, late_restarts_deadline_}) -
        SteadyNow();
    const int64_t timeout_ms = absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)));
    poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(timeout_ms, 0, INT_MAX)));
  }

  void ReadOutput() {
    // By index: an aggregator's line may start the workers.
    for (uint32_t shard = 0; shard < aggregators_.size(); ++shard) {
      aggregators_[shard]->ReadOutput(Lines(/*is_aggregator=*/true, shard));
    }
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      workers_[rank]->ReadOutput(Lines(/*is_aggregator=*/false, rank));
    }
  }

  ChildProcess::OnLine Lines(bool is_aggregator, uint32_t index) {
    return [this, is_aggregator, index](bool is_error, absl::string_view text) {
      if (is_aggregator && !is_error && !shards_[index].listening) {
        SetAddress(index, text);
      } else {
        options_.on_line({is_aggregator, index, is_error, text});
      }
    };
  }

  void SetAddress(uint32_t shard, absl::string_view first_line) {
    if (!absl::ConsumePrefix(&first_line, "listening on ")) {
      Stop({kExitUnreachable, absl::StrCat(NameOf(true, shard), " began with '", first_line,
                                           "' instead of 'listening on HOST:PORT'")});
      return;
    }
    std::string& address = shards_[shard].address;
    if (!address.empty() && address != first_line) {
      Stop({kExitUnreachable, absl::StrCat(NameOf(true, shard), " was started again on ", address,
                                           ", but listens on ", first_line)});
      return;
    }
    const bool is_first = address.empty();
    address = std::string(first_line);
    shards_[shard].listening = true;
    const std::string for_workers =
        options_.on_listening({shard, address, aggregators_[shard]->pid()});
    if (is_first) shards_[shard].address_for_workers = for_workers;
    const bool all = std::all_of(shards_.begin(), shards_.end(),
                                 [](const Shard& shard) { return shard.listening; });
    if (!all || stopping_) return;
    start_deadline_ = absl::InfiniteFuture();
    if (workers_.empty()) StartWorkers();
  }

  void Reap() {
    siginfo_t info = {};
    while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
      const pid_t pid = std::exchange(info.si_pid, 0);
      // What it started goes with it. Not after waitpid: its number could then be another group's.
      kill(-pid, SIGKILL);
      int wait_status = 0;
      waitpid(pid, &wait_status, 0);
      // If it is none of these, it is an orphan of one.
      for (uint32_t shard = 0; shard < aggregators_.size(); ++shard) {
        if (aggregators_[shard]->pid() == pid) SetEnded(/*is_aggregator=*/true, shard, wait_status);
      }
      for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
        if (workers_[rank]->pid() == pid) SetEnded(/*is_aggregator=*/false, rank, wait_status);
      }
    }
  }

  void SetEnded(bool is_aggregator, uint32_t index, int wait_status) {
    ChildProcess& process = is_aggregator ? *aggregators_[index] : *workers_[index];
    process.SetEnded(wait_status, Lines(is_aggregator, index));
    if (is_aggregator && MayRestart(index)) {
      RestartAggregator(index);
    } else if (!is_aggregator && process.exit_code() != 0 && MayRestartWorker(index)) {
      RestartWorker(index);
    } else if (!stopping_ && !is_aggregator && process.exit_code() != 0 && HasEnoughWorkers()) {
      options_.on_failure(absl::StrCat(NameOf(false, index), " failed: ", process.DescribeEnd(),
                                       "; the others go on without it"));
      if (AllEnded(workers_)) StopAggregators();
    } else if (!stopping_ && (is_aggregator || process.exit_code() != 0)) {
      Stop(Failure(NameOf(is_aggregator, index), process));
    } else if (!is_aggregator && AllEnded(workers_)) {
      StopAggregators();
    }
    if (!is_aggregator) GiveUpLateRestarts();
  }

  // That run, or have come to the end.
  bool HasEnoughWorkers() const {
    if (options_.min_workers == 0) return false;
    const auto failed = [](const auto& worker) {
      return worker->ended() && worker->exit_code() != 0;
    };
    return options_.workers - std::count_if(workers_.begin(), workers_.end(), failed) >=
           options_.min_workers;
  }

  // Without its state it would not know the job. One that never came up has a reason that stays.
  bool MayRestart(uint32_t shard) {
    return !stopping_ && !options_.state_dir.empty() && !workers_.empty() &&
           shards_[shard].restarts.Restart(SteadyNow());
  }

  void RestartAggregator(uint32_t shard) {
    options_.on_failure(
        absl::StrCat(NameOf(true, shard), " failed: ", aggregators_[shard]->DescribeEnd(),
                     "; started again (restart ", shards_[shard].restarts.restarts(), ")"));
    shards_[shard].listening = false;
    start_deadline_ = SteadyNow() + options_.aggregator_start_timeout;
    std::unique_ptr<ChildProcess> process = StartProcess(AggregatorCommand(shard), {});
    if (process != nullptr) aggregators_[shard] = std::move(process);
  }

  bool MayRestartWorker(uint32_t rank) const {
    const bool others_run = std::any_of(workers_.begin(), workers_.end(),
                                        [](const auto& worker) { return !worker->ended(); });
    return !stopping_ && options_.min_workers > 0 && others_run && !AnySucceeded() &&
           worker_restarts_[rank] < options_.worker_restarts;
  }

  // Then the job comes to its end.
  bool AnySucceeded() const {
    return std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) {
      return worker->ended() && worker->exit_code() == 0;
    });
  }

  // A rank that was started again when the others were about to end may wait for a job that is
  // over.
  void GiveUpLateRestarts() {
    if (stopping_ || late_restarts_deadline_ != absl::InfiniteFuture() || !AnySucceeded()) return;
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      if (!workers_[rank]->ended() && worker_restarts_[rank] == 0) return;
    }
    late_restarts_deadline_ = SteadyNow() + options_.grace;
  }

  void RestartWorker(uint32_t rank) {
    options_.on_failure(absl::StrCat(NameOf(false, rank),
                                     " failed: ", workers_[rank]->DescribeEnd(),
                                     "; started again (restart ", ++worker_restarts_[rank], ")"));
    std::unique_ptr<ChildProcess> process = StartWorker(rank);
    if (process != nullptr) workers_[rank] = std::move(process);
  }

  static LaunchResult Failure(const std::string& name, const ChildProcess& process) {
    std::string text = absl::StrCat(name, " failed first: ", process.DescribeEnd(), ".");
    absl::StrAppend(&text,
                    process.last_lines().empty() ? " It wrote nothing." : " Its last lines:");
    for (const std::string& line : process.last_lines()) {
      absl::StrAppend(&text, "\n[", name, "] ", line);
    }
    // An aggregator that ends by itself has failed, whatever it says.
    return {process.exit_code() == 0 ? kExitUnreachable : process.exit_code(), text};
  }

  // Stopping.

  void CheckDeadlines() {
    const absl::Time now = SteadyNow();
    if (now >= kill_deadline_) SignalAll(SIGKILL);
    if (stopping_) return;
    if (now >= late_restarts_deadline_) {
      late_restarts_deadline_ = absl::InfiniteFuture();
      for (const auto& worker : workers_) worker->Signal(SIGKILL);
    }
    if (now >= start_deadline_) {
      Stop({kExitUnreachable,
            absl::StrCat("the aggregators did not come up within ",
                         absl::FormatDuration(options_.aggregator_start_timeout))});
    } else if (now >= deadline_) {
      Stop({kExitTryAgain, absl::StrCat("stopped after ", absl::FormatDuration(options_.timeout),
                                        ", the run's timeout; still running: ", RunningRanks())});
    }
  }

  std::string RunningRanks() const {
    std::vector<std::string> names;
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      if (!workers_[rank]->ended()) names.push_back(NameOf(false, rank));
    }
    return names.empty() ? "no rank" : absl::StrJoin(names, ", ");
  }

  void Interrupt() {
    if (std::exchange(interrupted_, true)) {
      SignalAll(SIGKILL);
    } else if (!stopping_) {
      Stop({kExitTryAgain, "interrupted; all processes have ended"});
    }
  }

  // Asks all workers to end, and then the aggregators. Once.
  void Stop(LaunchResult result) {
    if (std::exchange(stopping_, true)) return;
    result_ = std::move(result);
    start_deadline_ = deadline_ = absl::InfiniteFuture();
    kill_deadline_ = SteadyNow() + options_.grace;
    for (const auto& worker : workers_) worker->Signal(SIGTERM);
    if (AllEnded(workers_)) StopAggregators();
  }

  void StopAggregators() {
    stopping_ = true;
    start_deadline_ = deadline_ = absl::InfiniteFuture();
    kill_deadline_ = SteadyNow() + options_.grace;
    for (const auto& aggregator : aggregators_) aggregator->Signal(SIGTERM);
  }

  void SignalAll(int signal) {
    kill_deadline_ = absl::InfiniteFuture();
    for (const Processes* processes : {&aggregators_, &workers_}) {
      for (const auto& process : *processes) process->Signal(signal);
    }
  }

  struct Shard {
    std::string address;  // that its first aggregator got; empty: not known yet
    std::string address_for_workers;
    bool listening = false;
    RestartLimit restarts;
  };

  const LaunchOptions& options_;
  const std::string job_;
  const ProcessScope scope_;  // outlives the processes
  std::vector<Shard> shards_;
  Processes aggregators_;
  Processes workers_;                      // none until all addresses are known
  std::vector<uint32_t> worker_restarts_;  // by rank
  absl::Time start_deadline_ = absl::InfiniteFuture();
  absl::Time deadline_ = absl::InfiniteFuture();
  absl::Time kill_deadline_ = absl::InfiniteFuture();
  absl::Time late_restarts_deadline_ = absl::InfiniteFuture();
  bool stopping_ = false;
  bool interrupted_ = false;
  LaunchResult result_;
};

}  // namespace

void PrintPrefixed(const OutputLine& line) {
  FILE* stream = line.is_error || line.is_aggregator ? stderr : stdout;
  const std::string text =
      absl::StrCat("[", NameOf(line.is_aggregator, line.index), "] ", line.text, "\n");
  fwrite(text.data(), 1, text.size(), stream);
  fflush(stream);
}

void PrintFailure(const std::string& what) { std::fprintf(stderr, "signpost: %s\n", what.c_str()); }

LaunchResult Launch(const LaunchOptions& options) { return LaunchedRun(options).Run(); }

}  // namespace signpost::cli
