#include "cli/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cli/child_process.h"
#include "cli/kept_memory.h"
#include "cli/process_scope.h"
#include "cli/restart_limit.h"
#include "log/log.h"
#include "proto/exit_code.h"
#include "proto/free_port.h"
#include "proto/processors.h"
#include "proto/steady_time.h"
#include "security/identity.h"
#include "security/throwaway_certificates.h"
#include "storage/temporary_directory.h"

namespace signpost::cli {
namespace {

std::string NameOf(Role role, uint32_t index) {
  switch (role) {
    case Role::kAggregator:
      return absl::StrCat("aggregator ", index);
    case Role::kNode:
      return absl::StrCat("node ", index);
    case Role::kRank:
      break;
  }
  return absl::StrCat("rank ", index);
}

// In TMPDIR, unless the paths of sockets would be too long there.
std::string PrefixOfRun() {
  constexpr char kName[] = "signpost-run";
  constexpr size_t kMostNode = sizeof "-XXXXXX/4294967295" - 1;
  const std::string prefix = TemporaryPrefix(kName);
  if (prefix.size() + kMostNode < sizeof sockaddr_un().sun_path) return prefix;
  return absl::StrCat("/tmp/", kName);
}

class LaunchedRun {
 public:
  explicit LaunchedRun(const LaunchOptions& options)
      : options_(options),
        job_(absl::StrCat("run-", absl::ToUnixMicros(absl::Now()), "-", getpid())) {}

  LaunchResult Run() {
    if (absl::Status status = MakeCertificates(); !status.ok()) {
      return {ExitCodeOf(status), std::string(status.message())};
    }
    CountWhileRunning();
    StartAggregators();
    while (!AllEnded(aggregators_) || !AllEnded(nodes_) || !AllEnded(workers_)) {
      WaitForEvent();
      ReadOutput();
      while (const std::optional<int> signal = scope_.NextSignal()) {
        if (*signal == SIGPIPE) {
          Stop({kExitTryAgain, "whoever read the output is gone; all processes have ended"});
        } else if (*signal != SIGCHLD) {
          Interrupt();
        }
      }
      Reap();
      CheckDeadlines();
    }
    if (!options_.state_dir.empty()) RemoveState();
    return std::move(result_);
  }

 private:
  using Processes = std::vector<std::unique_ptr<ChildProcess>>;  // by shard, node or rank
  using Environment = std::vector<std::pair<std::string, std::string>>;
  static constexpr Role kRoles[] = {Role::kAggregator, Role::kNode, Role::kRank};

  Processes& ProcessesOf(Role role) {
    switch (role) {
      case Role::kAggregator:
        return aggregators_;
      case Role::kNode:
        return nodes_;
      case Role::kRank:
        break;
    }
    return workers_;
  }

  static bool AllEnded(const Processes& processes) {
    return std::all_of(processes.begin(), processes.end(),
                       [](const auto& process) { return process->ended(); });
  }

  // Starting.

  absl::Status MakeCertificates() {
    if (options_.plain_text && options_.per_node == 0) return absl::OkStatus();
    if (directory_.path().empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "there is no directory for the run's certificates and sockets: ", directory_.why_not(),
          "; TMPDIR may name another place"));
    }
    if (options_.plain_text) return absl::OkStatus();
    return WriteThrowawayCertificates(
        directory_.path(), {PeerRole::kAggregator, PeerRole::kWorker, PeerRole::kObserver});
  }

  // Of a node's worker.
  std::string SocketOf(uint32_t node) const {
    return absl::StrCat("unix:", directory_.path(), "/", node);
  }

  // Empty: plain text.
  std::string TlsDirOf(PeerRole role) const {
    return options_.plain_text ? "" : ThrowawayTlsDir(directory_.path(), role);
  }

  // What the environment of this process says of security is not for the run's.
  Environment SecurityOf(PeerRole role) const {
    return {{"SIGNPOST_TLS_DIR", TlsDirOf(role)},
            {"SIGNPOST_INSECURE_I_UNDERSTAND", "0"},
            {"SIGNPOST_TOKEN_FILE", ""}};
  }

  void StartAggregators() {
    shards_.resize(options_.aggregators);
    if (!options_.limit_restarts) {
      for (Shard& shard : shards_)
        shard.restarts = RestartLimit(std::numeric_limits<size_t>::max());
    }
    start_deadline_ = SteadyNow() + options_.aggregator_start_timeout;
    deadline_ = SteadyNow() + options_.timeout;
    for (uint32_t shard = 0; shard < options_.aggregators; ++shard) {
      std::unique_ptr<ChildProcess> process =
          StartProcess(AggregatorCommand(shard), AggregatorEnvironment());
      if (process == nullptr) return;
      aggregators_.push_back(std::move(process));
    }
  }

  // The run's own: others' jobs are not for its aggregators, which may be of another number, too.
  std::string StateDir() const { return absl::StrCat(options_.state_dir, "/", job_); }

  // Another run would not find its job here. What an aggregator failed with may be what it wanted.
  void RemoveState() {
    std::error_code error;
    if (aggregator_has_failed_) {
      if (std::filesystem::exists(StateDir(), error)) {
        absl::StrAppend(&result_.explanation, "\nThe aggregators' state is left in ", StateDir());
      }
      return;
    }
    std::filesystem::remove_all(StateDir(), error);
    if (error) {
      options_.on_failure(absl::StrCat("cannot remove ", StateDir(), ": ", error.message()));
    }
  }

  // Flags say all: a file that configures aggregators, elsewhere, is not for the run's.
  Environment AggregatorEnvironment() const {
    Environment environment = SecurityOf(PeerRole::kAggregator);
    environment.push_back({"SIGNPOST_CONFIG", ""});
    return environment;
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
      command.push_back(absl::StrCat("--state-dir=", StateDir(), "/shard-", shard));
    }
    return command;
  }

  // Once all aggregators listen. Ranks start when these do.
  void StartNodes() {
    const uint32_t nodes = options_.workers / options_.per_node;
    node_listens_.resize(nodes);
    start_deadline_ = SteadyNow() + options_.aggregator_start_timeout;
    for (uint32_t node = 0; node < nodes; ++node) {
      std::vector<std::string> command = options_.node_command;
      if (command.empty()) command = {OwnExecutable(), "worker"};
      command.push_back(absl::StrCat("--listen=", SocketOf(node)));
      command.push_back(absl::StrCat("--processes=", options_.per_node));
      if (options_.node_gpu) command.push_back(absl::StrCat("--gpu=", *options_.node_gpu));
      std::unique_ptr<ChildProcess> process = StartProcess(command, EnvironmentOf(node, nodes));
      if (process == nullptr) return;
      nodes_.push_back(std::move(process));
    }
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
    Environment environment = EnvironmentOf(rank, options_.workers);
    environment.push_back({"SIGNPOST_JOB", job_});
    environment.push_back({"SIGNPOST_LAUNCHER", "signpost run"});  // ends the others if one fails
    // torch.distributed's, and what is built on it: without them each rank would train by itself.
    environment.insert(environment.end(), {{"RANK", absl::StrCat(rank)},
                                           {"LOCAL_RANK", absl::StrCat(rank)},
                                           {"WORLD_SIZE", absl::StrCat(options_.workers)},
                                           {"MASTER_ADDR", "127.0.0.1"},
                                           {"MASTER_PORT", absl::StrCat(torch_port_)}});
    // An empty one overrides that of a run around this one.
    environment.push_back(
        {"SIGNPOST_NODE", options_.per_node == 0 ? "" : SocketOf(rank / options_.per_node)});
    if (options_.min_workers > 0) {
      environment.push_back(
          {"SIGNPOST_ROUND_DEADLINE", absl::FormatDuration(options_.round_deadline)});
      environment.push_back({"SIGNPOST_MIN_WORKERS", absl::StrCat(options_.min_workers)});
    }
    for (const auto& [name, value] : {std::pair{"MALLOC_MMAP_THRESHOLD_", kMmapThreshold},
                                      std::pair{"MALLOC_TRIM_THRESHOLD_", kTrimThreshold}}) {
      if (std::getenv(name) == nullptr) environment.push_back({name, absl::StrCat(value)});
    }
    // PyTorch and BLAS would have a thread for each processor in each rank, which wait for each
    // other in loops.
    if (options_.workers > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
      environment.push_back({"OMP_NUM_THREADS", absl::StrCat(ShareOfProcessors())});
    }
    return StartProcess(options_.command, environment);
  }

  // A rank's, of those that this program may run on.
  uint32_t ShareOfProcessors() const { return std::max(ProcessorCount() / options_.workers, 1u); }

  // Of a rank, or of a node's worker.
  Environment EnvironmentOf(uint32_t rank, uint32_t world_size) const {
    std::vector<std::string> addresses;
    for (const Shard& shard : shards_) addresses.push_back(shard.address_for_workers);
    Environment environment = SecurityOf(PeerRole::kWorker);
    environment.insert(environment.end(),
                       {{"SIGNPOST_AGGREGATORS", absl::StrJoin(addresses, ",")},
                        {"SIGNPOST_RANK", absl::StrCat(rank)},
                        {"SIGNPOST_WORLD_SIZE", absl::StrCat(world_size)},
                        {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
                        {"SIGNPOST_FAILURE_TIMEOUT", options_.failure_timeout.ToString()}});
    return environment;
  }

  // Null: it could not be started, and the run stops.
  std::unique_ptr<ChildProcess> StartProcess(const std::vector<std::string>& command,
                                             Environment environment) {
    if (!options_.trace_dir.empty()) environment.push_back({"SIGNPOST_TRACE", options_.trace_dir});
    absl::StatusOr<std::unique_ptr<ChildProcess>> process =
        ChildProcess::Start(command, environment);
    if (process.ok()) return *std::move(process);
    Stop({ExitCodeOf(process.status()), std::string(process.status().message())});
    return nullptr;
  }

  // Events.

  void WaitForEvent() {
    std::vector<pollfd> fds = {{scope_.fd(), POLLIN, 0}};
    for (const Role role : kRoles) {
      for (const auto& process : ProcessesOf(role)) {
        for (const int fd : process->pipes()) fds.push_back({fd, POLLIN, 0});
      }
    }
    const absl::Duration left = std::min({start_deadline_, deadline_, kill_deadline_,
                                          late_restarts_deadline_, cause_deadline_}) -
                                SteadyNow();
    const int64_t timeout_ms = absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)));
    poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(timeout_ms, 0, INT_MAX)));
  }

  void ReadOutput() {
    // By index: a line may start processes.
    for (const Role role : kRoles) {
      for (uint32_t i = 0; i < ProcessesOf(role).size(); ++i) {
        ProcessesOf(role)[i]->ReadOutput(Lines(role, i));
      }
    }
  }

  ChildProcess::OnLine Lines(Role role, uint32_t index) {
    return [this, role, index](bool is_error, absl::string_view text) {
      if (role == Role::kAggregator && !is_error && !shards_[index].listening) {
        SetAddress(index, text);
      } else if (role == Role::kNode && !is_error && !node_listens_[index]) {
        SetNodeListens(index, text);
      } else {
        options_.on_line({role, index, is_error, text});
      }
    };
  }

  void SetNodeListens(uint32_t node, absl::string_view first_line) {
    if (!absl::ConsumePrefix(&first_line, "listening on ")) {
      Stop({kExitUnreachable, absl::StrCat(NameOf(Role::kNode, node), " began with '", first_line,
                                           "' instead of 'listening on unix:PATH'")});
      return;
    }
    node_listens_[node] = true;
    const bool all =
        std::find(node_listens_.begin(), node_listens_.end(), false) == node_listens_.end();
    if (!all || stopping_) return;
    start_deadline_ = absl::InfiniteFuture();
    StartWorkers();
  }

  void SetAddress(uint32_t shard, absl::string_view first_line) {
    if (!absl::ConsumePrefix(&first_line, "listening on ")) {
      StopForAggregator(
          {kExitUnreachable, absl::StrCat(NameOf(Role::kAggregator, shard), " began with '",
                                          first_line, "' instead of 'listening on HOST:PORT'")});
      return;
    }
    std::string& address = shards_[shard].address;
    if (!address.empty() && address != first_line) {
      StopForAggregator({kExitUnreachable,
                         absl::StrCat(NameOf(Role::kAggregator, shard), " was started again on ",
                                      address, ", but listens on ", first_line)});
      return;
    }
    const bool is_first = address.empty();
    address = std::string(first_line);
    shards_[shard].listening = true;
    const std::string for_workers = options_.on_listening(
        {shard, address, aggregators_[shard]->pid(), TlsDirOf(PeerRole::kObserver)});
    if (is_first) shards_[shard].address_for_workers = for_workers;
    if (!AllAggregatorsListen() || stopping_) return;
    start_deadline_ = absl::InfiniteFuture();
    if (!workers_.empty() || !nodes_.empty()) return;
    options_.per_node > 0 ? StartNodes() : StartWorkers();
  }

  bool AllAggregatorsListen() const {
    return std::all_of(shards_.begin(), shards_.end(),
                       [](const Shard& shard) { return shard.listening; });
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
      for (const Role role : kRoles) {
        for (uint32_t i = 0; i < ProcessesOf(role).size(); ++i) {
          if (ProcessesOf(role)[i]->pid() == pid) SetEnded(role, i, wait_status);
        }
      }
    }
  }

  void SetEnded(Role role, uint32_t index, int wait_status) {
    ChildProcess& process = *ProcessesOf(role)[index];
    process.SetEnded(wait_status, Lines(role, index));
    const bool is_rank = role == Role::kRank;
    const bool failed = !is_rank || process.exit_code() != 0;
    if (role == Role::kAggregator && MayRestart(index)) {
      RestartAggregator(index);
    } else if (is_rank && failed && MayRestartWorker(index)) {
      RestartWorker(index);
    } else if (!stopping_ && is_rank && failed && HasEnoughWorkers()) {
      options_.on_failure(DescribeLoss(index));
      if (AllEnded(workers_)) StopServers();
    } else if (!stopping_ && is_rank && process.exit_code() == kExitTryAgain) {
      NoteTryAgain(Failure(NameOf(role, index), process));
    } else if (!stopping_ && failed) {
      LaunchResult failure = Failure(NameOf(role, index), process);
      role == Role::kAggregator ? StopForAggregator(std::move(failure)) : Stop(std::move(failure));
    } else if (role != Role::kAggregator && AllEnded(workers_) && (stopping_ || !try_again_)) {
      StopServers();
    }
    if (is_rank) GiveUpLateRestarts();
  }

  // One that has left the job because it fails ends the others so, and may end after them.
  void NoteTryAgain(LaunchResult failure) {
    if (try_again_) return;
    try_again_ = std::move(failure);
    cause_deadline_ = SteadyNow() + options_.time_to_leave;
  }

  std::string DescribeLoss(uint32_t rank) const {
    if (gave_up_late_restarts_) {
      return absl::StrCat(NameOf(Role::kRank, rank),
                          " was stopped: it was started again, but the others had finished ",
                          absl::FormatDuration(options_.grace), " ago, and the job with them");
    }
    return absl::StrCat(NameOf(Role::kRank, rank), " failed: ", workers_[rank]->DescribeEnd(),
                        AnyRuns() ? "; the others go on without it" : "; the others have finished");
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
    options_.on_failure(absl::StrCat(
        NameOf(Role::kAggregator, shard), " failed: ", aggregators_[shard]->DescribeEnd(),
        "; started again (restart ", shards_[shard].restarts.restarts(), ")"));
    shards_[shard].listening = false;
    start_deadline_ = SteadyNow() + options_.aggregator_start_timeout;
    std::unique_ptr<ChildProcess> process =
        StartProcess(AggregatorCommand(shard), AggregatorEnvironment());
    if (process == nullptr) {
      aggregator_has_failed_ = true;
      return;
    }
    aggregators_[shard] = std::move(process);
  }

  bool MayRestartWorker(uint32_t rank) const {
    const bool has_state = options_.per_node > 0 || (options_.min_workers > 0 && AnyRuns());
    return !stopping_ && !try_again_ && has_state && !AnySucceeded() &&
           worker_restarts_[rank] < options_.worker_restarts;
  }

  bool AnyRuns() const {
    return std::any_of(workers_.begin(), workers_.end(),
                       [](const auto& worker) { return !worker->ended(); });
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
    if (options_.per_node > 0) return;  // none ends without the others
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      if (!workers_[rank]->ended() && worker_restarts_[rank] == 0) return;
    }
    late_restarts_deadline_ = SteadyNow() + options_.grace;
  }

  void RestartWorker(uint32_t rank) {
    options_.on_failure(absl::StrCat(NameOf(Role::kRank, rank),
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
    if (try_again_ && (now >= cause_deadline_ || AllEnded(workers_))) {
      Stop(*std::move(try_again_));
      return;
    }
    if (now >= late_restarts_deadline_) {
      late_restarts_deadline_ = absl::InfiniteFuture();
      gave_up_late_restarts_ = true;
      for (const auto& worker : workers_) worker->Signal(SIGKILL);
    }
    if (now >= start_deadline_) {
      const std::string why = absl::StrCat(" did not come up within ",
                                           absl::FormatDuration(options_.aggregator_start_timeout));
      if (AllAggregatorsListen()) {
        Stop({kExitUnreachable, absl::StrCat("the nodes' workers", why)});
      } else {
        StopForAggregator({kExitUnreachable, absl::StrCat("the aggregators", why)});
      }
    } else if (now >= deadline_) {
      Stop({kExitTryAgain, absl::StrCat("stopped after ", absl::FormatDuration(options_.timeout),
                                        ", the run's timeout; still running: ", RunningRanks())});
    }
  }

  std::string RunningRanks() const {
    std::vector<std::string> names;
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      if (!workers_[rank]->ended()) names.push_back(NameOf(Role::kRank, rank));
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

  // Asks all ranks to end, and then who serves them. Once.
  void Stop(LaunchResult result) {
    if (std::exchange(stopping_, true)) return;
    result_ = std::move(result);
    start_deadline_ = deadline_ = cause_deadline_ = absl::InfiniteFuture();
    kill_deadline_ = SteadyNow() + options_.grace;
    for (const auto& worker : workers_) worker->Signal(SIGTERM);
    if (AllEnded(workers_)) StopServers();
  }

  void StopForAggregator(LaunchResult result) {
    if (stopping_) return;
    aggregator_has_failed_ = true;
    Stop(std::move(result));
  }

  // The nodes' workers, which leave the job if their processes have not, and then the aggregators.
  void StopServers() {
    stopping_ = true;
    start_deadline_ = deadline_ = absl::InfiniteFuture();
    const bool nodes_have_ended = AllEnded(nodes_);
    // Once: a second signal would end them at once.
    if (std::exchange(nodes_have_ended ? told_aggregators_ : told_nodes_, true)) return;
    kill_deadline_ = SteadyNow() + options_.grace;
    for (const auto& process : nodes_have_ended ? aggregators_ : nodes_) process->Signal(SIGTERM);
  }

  void SignalAll(int signal) {
    kill_deadline_ = absl::InfiniteFuture();
    for (const Role role : kRoles) {
      for (const auto& process : ProcessesOf(role)) process->Signal(signal);
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
  const uint16_t torch_port_ = FreePort();  // of torch.distributed's store, if the ranks make one
  const ProcessScope scope_;                           // outlives the processes
  const TemporaryDirectory directory_{PrefixOfRun()};  // for certificates and sockets
  std::vector<Shard> shards_;
  Processes aggregators_;
  std::vector<bool> node_listens_;
  Processes nodes_;                        // none until all aggregators' addresses are known
  Processes workers_;                      // none until all of those listen
  std::vector<uint32_t> worker_restarts_;  // by rank
  absl::Time start_deadline_ = absl::InfiniteFuture();
  absl::Time deadline_ = absl::InfiniteFuture();
  absl::Time kill_deadline_ = absl::InfiniteFuture();
  absl::Time late_restarts_deadline_ = absl::InfiniteFuture();
  bool gave_up_late_restarts_ = false;
  std::optional<LaunchResult> try_again_;  // of the first rank that ended so; the cause may come
  absl::Time cause_deadline_ = absl::InfiniteFuture();
  bool aggregator_has_failed_ = false;  // first
  bool stopping_ = false;
  bool told_nodes_ = false, told_aggregators_ = false;  // to end
  bool interrupted_ = false;
  LaunchResult result_;
};

// What the process has written as JSON, and whose it is; any other line becomes a message.
std::string AsJson(const OutputLine& line) {
  log::About about;
  std::optional<uint32_t>& index = line.role == Role::kRank   ? about.worker
                                   : line.role == Role::kNode ? about.node
                                                              : about.shard;
  index = line.index;
  return log::AddTo(line.text, about)
      .value_or(log::JsonLine(log::Level::kInfo, line.text, about, absl::Now()));
}

}  // namespace

void PrintPrefixed(const OutputLine& line) {
  const bool is_log = line.is_error || line.role != Role::kRank;
  FILE* stream = is_log ? stderr : stdout;
  const std::string text =
      is_log && log::format() == log::Format::kJson
          ? absl::StrCat(AsJson(line), "\n")
          : absl::StrCat("[", NameOf(line.role, line.index), "] ", line.text, "\n");
  fwrite(text.data(), 1, text.size(), stream);
  fflush(stream);
}

void PrintFailure(const std::string& what) { log::Write(log::Level::kWarning, "signpost", what); }

LaunchResult Launch(const LaunchOptions& options) { return LaunchedRun(options).Run(); }

}  // namespace signpost::cli
