#include "bench/exchange.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "bench/costs.h"
#include "bench/hosts.h"
#include "bench/leftovers.h"
#include "bench/line_process.h"
#include "bench/plain_memory.h"
#include "bench/plain_tcp.h"
#include "client/session_options.h"
#include "doctor/limits.h"
#include "log/log.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/free_port.h"
#include "security/identity.h"
#include "security/throwaway_certificates.h"
#include "storage/temporary_directory.h"

namespace signpost::bench {
namespace {

constexpr absl::string_view kListening = "listening on ";

std::string NameOf(const RankOptions& rank) {
  const std::string codec = CodecName(rank.codec);
  if (rank.mode == "frames") return absl::StrCat("packed frames, ", codec);
  if (rank.mode == "mean") return absl::StrCat("gradients to mean, ", codec);
  const std::string of =
      rank.optimizer == StepOptimizer::kAdam ? "" : NameOfOptimizer(rank.optimizer) + ", ";
  return absl::StrCat("optimizer step, ", of, codec);
}

// Who serves a group, or several: in plain text, or over mTLS.
struct Service {
  std::string certificates;  // the directory of them all; empty: plain text
  std::vector<std::unique_ptr<LineProcess>> aggregators;
  std::vector<std::string> addresses;
  int error = STDERR_FILENO;  // where errors of all that take part go

  // Of who plays that part. That processes do not come to answer, as there are more of them than
  // processors, is no failure: exchanges would be timed over new connections.
  LineProcess::Environment Environment(PeerRole role) const {
    const bool is_plain_text = certificates.empty();
    return {{"SIGNPOST_FAILURE_TIMEOUT", "10m"},
            {"SIGNPOST_INSECURE_I_UNDERSTAND", is_plain_text ? "1" : "0"},
            {"SIGNPOST_TLS_DIR", is_plain_text ? "" : ThrowawayTlsDir(certificates, role)}};
  }
};

// Of benchmarks that were killed.
void RemoveLeftDirectories() {
  for (const std::string& path : LeftIn(TemporaryPrefix(""))) {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
}

absl::Status CheckMemory(const ExchangeOptions& options) {
  const uint64_t least = LeastMemory(options);
  const doctor::Limits limits = doctor::FindLimits();
  if (least <= limits.free_memory_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("%d workers with %d parameters take %.1f GB of memory at least, and %.1f GB "
                      "are free, by %s: measure with fewer --workers or --parameters",
                      options.workers, options.ranks[0].parameters, least / 1e9,
                      limits.free_memory_bytes / 1e9, limits.memory_bound));
}

// The ranks of one program. Exchanges of theirs take the processor when they are told to.
struct Group {
  const Service* service = nullptr;  // of ours
  RankOptions options;               // likewise
  std::vector<std::unique_ptr<LineProcess>> ranks;
  std::vector<std::vector<double>> seconds;  // by turn: of each exchange
  std::vector<double> cpu_seconds;           // by turn: of an exchange, the aggregators' included
};

class Measurement {
 public:
  explicit Measurement(const ExchangeOptions& options) : options_(options) {}

  // All are asked to end before one is waited for.
  ~Measurement() {
    for (const Group& group : groups_) {
      for (const auto& rank : group.ranks) rank->AskToEnd();
    }
    for (const auto& rank : plain_tcp_.ranks) rank->AskToEnd();
    for (const auto& [group, memory] : memory_) {
      for (const auto& rank : memory.ranks) rank->AskToEnd();
    }
    for (const Service* service : {&plain_text_, &mtls_}) {
      for (const auto& aggregator : service->aggregators) aggregator->AskToEnd();
    }
  }

  absl::StatusOr<Figures> Run() {
    if (absl::Status status = CheckMemory(options_); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<Hosts>> hosts =
        Hosts::Create(options_.workers + options_.shards, options_.rate);
    if (!hosts.ok()) return hosts.status();
    hosts_ = *std::move(hosts);
    if (!hosts_->has_cubic()) {
      log::Write(log::Level::kWarning, "warning",
                 "the hosts' TCP has this machine's congestion control, as its kernel does not let "
                 "network namespaces choose cubic: with BBR exchanges take up to twice as long. To "
                 "let them, as root: sysctl -w net.ipv4.tcp_allowed_congestion_control=\"$(sysctl "
                 "-n net.ipv4.tcp_allowed_congestion_control) cubic\"");
    }
    WarnOfBurst();
    absl::Status status = options_.rate.empty() ? absl::OkStatus() : StartFilter();
    if (status.ok()) status = StartAggregators(plain_text_);
    if (status.ok() && options_.tls) status = MakeCertificates();
    if (status.ok() && options_.tls) status = StartAggregators(mtls_);
    if (!status.ok()) return status;
    for (const RankOptions& rank : options_.ranks) {
      status = StartOurs(plain_text_, rank);
      if (status.ok() && StepBytes(rank, options_.workers)) status = StartMemory(rank);
      if (status.ok() && options_.tls) status = StartOurs(mtls_, rank);
      if (!status.ok()) return status;
    }
    for (const std::string& peer : options_.peers) {
      if (absl::Status status = StartPeer(peer); !status.ok()) return status;
    }
    if (options_.rate.empty()) {
      if (absl::Status status = StartPlainTcp(); !status.ok()) return status;
    }
    // The first turn pages memory in and opens TCP's windows.
    for (uint32_t turn = 0; turn < 1 + options_.turns; ++turn) {
      for (Group& group : groups_) {
        if (absl::Status status = TakeTurn(group); !status.ok()) return status;
      }
      if (!plain_tcp_.ranks.empty()) {
        if (absl::Status status = TakeTurn(plain_tcp_); !status.ok()) return status;
      }
      for (auto& [group, memory] : memory_) {
        if (absl::Status status = TakeTurn(memory); !status.ok()) return status;
      }
    }
    return Report();
  }

 private:
  void WarnOfBurst() const {
    if (options_.rate.empty()) return;
    const double rate = *ParseRate(options_.rate);
    for (const RankOptions& rank : options_.ranks) {
      const double bytes = LinkBound(rank, options_.workers, options_.shards, rate) * rate / 8;
      if (10.0 * Hosts::kBurst <= options_.exchanges * bytes) continue;
      log::Write(log::Level::kWarning, "warning",
                 absl::StrFormat("a link that was idle lets %d KiB through at once, more than a "
                                 "tenth of what it carries in a turn (%d exchanges of %.0f KB): "
                                 "figures may be better than their bound. Measure more "
                                 "--parameters, or more --exchanges in a turn",
                                 Hosts::kBurst >> 10, options_.exchanges, bytes / 1e3));
      return;
    }
  }

  absl::Status CheckDirectory() const {
    if (!directory_.path().empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("there is no directory for temporary files: ", directory_.why_not(),
                     "; TMPDIR may name another place"));
  }

  absl::Status MakeCertificates() {
    if (absl::Status status = CheckDirectory(); !status.ok()) return status;
    mtls_.certificates = directory_.path();
    return WriteThrowawayCertificates(mtls_.certificates,
                                      {PeerRole::kAggregator, PeerRole::kWorker});
  }

  // Warnings that plain text is in use are for who has others on the network; on that of the hosts
  // is nobody.
  absl::Status StartFilter() {
    auto filter = LineProcess::Start(
        {"sh", "-c",
         absl::StrCat("exec grep -a -v -F --line-buffered 'plain text at ", kHostNetwork, "' >&2")},
        {});
    if (!filter.ok()) return filter.status();
    filter_ = *std::move(filter);
    plain_text_.error = filter_->in();
    return absl::OkStatus();
  }

  absl::Status StartAggregators(Service& service) {
    for (uint32_t shard = 0; shard < options_.shards; ++shard) {
      const uint32_t host = options_.workers + shard;
      const auto command = hosts_->On(host, {options_.program, "aggregator", "--listen",
                                             absl::StrCat(hosts_->address(host), ":0"), "--shard",
                                             absl::StrCat(shard, "/", options_.shards)});
      auto aggregator = LineProcess::Start(command, service.Environment(PeerRole::kAggregator),
                                           {.error = service.error, .end_signal = SIGTERM});
      if (!aggregator.ok()) return aggregator.status();
      absl::StatusOr<std::string> line = (*aggregator)->ReadLine(absl::Now() + options_.timeout);
      if (!line.ok()) return line.status();
      absl::string_view address = *line;
      if (!absl::ConsumePrefix(&address, kListening)) {
        return absl::InternalError(absl::StrCat("an aggregator says '", *line, "'"));
      }
      service.addresses.emplace_back(address);
      service.aggregators.push_back(*std::move(aggregator));
    }
    return absl::OkStatus();
  }

  absl::Status StartOurs(const Service& service, const RankOptions& options) {
    Group& group = groups_.emplace_back();
    group.service = &service;
    group.options = options;
    for (uint32_t rank = 0; rank < options_.workers; ++rank) {
      if (absl::Status status = StartRankOfOurs(service, rank, group); !status.ok()) return status;
    }
    return AwaitReady(group);
  }

  absl::Status StartPlainTcp() {
    plain_tcp_.options = options_.ranks[0];
    plain_tcp_.options.mode = "tcp";
    if (absl::Status status = StartRankOfOurs(plain_text_, 0, plain_tcp_); !status.ok()) {
      return status;
    }
    return AwaitReady(plain_tcp_);
  }

  // Beside the newest group.
  absl::Status StartMemory(const RankOptions& step) {
    Group& memory = memory_[groups_.size() - 1];
    memory.options = step;
    memory.options.mode = "memory";
    if (absl::Status status = StartRankOfOurs(plain_text_, 0, memory); !status.ok()) return status;
    return AwaitReady(memory);
  }

  absl::Status StartRankOfOurs(const Service& service, uint32_t rank, Group& group) const {
    const RankOptions& options = group.options;
    const auto command = hosts_->On(
        rank, {options_.program, "bench", "rank", "--mode", options.mode, "--codec",
               NameOfCodec(options.codec), "--optimizer", NameOfOptimizer(options.optimizer),
               "--parameters", absl::StrCat(options.parameters), "--chunk-elements",
               absl::StrCat(options.chunk_elements)});
    LineProcess::Environment environment = {
        {"SIGNPOST_AGGREGATORS", absl::StrJoin(service.addresses, ",")},
        {"SIGNPOST_JOB", absl::StrCat("bench ", groups_.size())},
        {"SIGNPOST_RANK", absl::StrCat(rank)},
        {"SIGNPOST_WORLD_SIZE", absl::StrCat(options_.workers)},
        {"SIGNPOST_CONNECTIONS", absl::StrCat(options_.connections)},
    };
    for (const auto& variable : service.Environment(PeerRole::kWorker)) {
      environment.push_back(variable);
    }
    environment.push_back({"SIGNPOST_THREADS", absl::StrCat(Threads())});
    return StartRank(command, environment, {.error = service.error}, group);
  }

  // Of each rank, ours and peers'.
  uint32_t Threads() const {
    return options_.threads > 0 ? options_.threads : ShareOfProcessors(options_.workers);
  }

  absl::Status StartPeer(const std::string& peer) {
    Group& group = groups_.emplace_back();
    const std::vector<std::string> command = {
        options_.python, options_.peers_script,
        "--peer",        peer,
        "--parameters",  absl::StrCat(options_.ranks[0].parameters),
        "--threads",     absl::StrCat(Threads())};
    const uint16_t port = FreePort();
    // mpirun starts the ranks itself, of which the first speaks for all.
    const bool is_mpi = peer == "mpi";
    if (absl::Status status = CheckDirectory(); is_mpi && !status.ok()) return status;
    // It ends what it has started on other hosts, and removes its files, when it is told to.
    const LineProcessOptions of_mpi = {.end_signal = SIGTERM, .grace = absl::Seconds(10)};
    for (uint32_t rank = 0; rank < (is_mpi ? 1 : options_.workers); ++rank) {
      const LineProcess::Environment environment = {
          {"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(options_.workers)},
          {"MASTER_ADDR", hosts_->address(0)},
          {"MASTER_PORT", absl::StrCat(port)},
          {"GLOO_SOCKET_IFNAME", hosts_->interface()},
          {"OMP_NUM_THREADS", absl::StrCat(Threads())},  // of BLAS, which is told no other way
      };
      const absl::Status status =
          StartRank(hosts_->On(rank, is_mpi ? UnderMpi(command) : command), environment,
                    is_mpi ? of_mpi : LineProcessOptions(), group);
      if (!status.ok()) return status;
    }
    return AwaitReady(group);
  }

  // The command as mpirun starts it on the workers' hosts, over TCP as between machines.
  std::vector<std::string> UnderMpi(const std::vector<std::string>& command) const {
    // A ring, which takes the fewest bytes, and whose ranks yield: peers.py has what it is worth.
    std::vector<std::string> mpirun = {"mpirun",
                                       "--allow-run-as-root",
                                       "--bind-to",
                                       "none",
                                       "-n",
                                       absl::StrCat(options_.workers),
                                       "--mca",
                                       "orte_tmpdir_base",
                                       directory_.path()};
    for (const auto& [name, value] : {std::pair{"btl", "tcp,self"},
                                      {"mpi_yield_when_idle", "1"},
                                      {"coll_tuned_use_dynamic_rules", "1"},
                                      {"coll_tuned_allreduce_algorithm", "4"}}) {
      mpirun.insert(mpirun.end(), {"--mca", name, value});
    }
    if (options_.rate.empty()) {
      mpirun.insert(mpirun.end(), {"--oversubscribe", "--mca", "btl_tcp_if_include", "lo"});
    } else {
      std::vector<std::string> addresses;
      for (uint32_t rank = 0; rank < options_.workers; ++rank) {
        addresses.push_back(hosts_->address(rank));
      }
      const std::string agent =
          absl::StrCat(std::filesystem::path(options_.peers_script).parent_path().string(),
                       "/netns_agent.sh ", hosts_->name_prefix());
      const std::string network = absl::StrCat(kHostNetwork, "0/24");
      mpirun.insert(mpirun.end(),
                    {"--host", absl::StrJoin(addresses, ","), "--mca", "plm_rsh_agent", agent,
                     "--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "oob_tcp_if_include", network,
                     "--mca", "btl_tcp_if_include", network});
    }
    mpirun.insert(mpirun.end(), command.begin(), command.end());
    return mpirun;
  }

  static absl::Status StartRank(const std::vector<std::string>& command,
                                const LineProcess::Environment& environment,
                                const LineProcessOptions& options, Group& group) {
    auto process = LineProcess::Start(command, environment, options);
    if (process.ok()) group.ranks.push_back(*std::move(process));
    return process.status();
  }

  absl::Status CheckAggregators() const {
    for (const Service* service : {&plain_text_, &mtls_}) {
      for (const auto& aggregator : service->aggregators) {
        if (absl::Status status = aggregator->CheckRuns(); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  static std::string Describe(const std::string& name, const LineProcess& process) {
    return absl::StrFormat("%s (process %d%s)", name, process.pid(),
                           process.is_stopped() ? ", stopped" : "");
  }

  // The ranks that have no line yet wait for one another, and for aggregators.
  void SayWhoIsAwaited(const Group& group, const std::vector<bool>& has_line) const {
    std::vector<std::string> awaited;
    for (size_t rank = 0; rank < has_line.size(); ++rank) {
      if (has_line[rank]) continue;
      awaited.push_back(Describe(absl::StrCat("rank ", rank), *group.ranks[rank]));
    }
    for (size_t shard = 0; group.service != nullptr && shard < options_.shards; ++shard) {
      const LineProcess& aggregator = *group.service->aggregators[shard];
      if (!aggregator.is_stopped()) continue;
      awaited.push_back(Describe(absl::StrCat("aggregator ", shard), aggregator));
    }
    log::Write(log::Level::kWarning, "warning",
               absl::StrFormat("no answer for %s from '%s': waiting for %s",
                               absl::FormatDuration(options_.patience), group.ranks[0]->name(),
                               absl::StrJoin(awaited, ", ")));
  }

  // A line of each rank. UNAVAILABLE as soon as one of them, or an aggregator, has ended.
  absl::StatusOr<std::vector<std::string>> ReadFromAll(const Group& group,
                                                       uint32_t exchanges) const {
    const absl::Duration silence = std::min(
        options_.longest_silence, exchanges * (options_.timeout * StepsPerExchange(group.options)));
    absl::Time last_answer = absl::Now();
    bool said_who_is_awaited = false;
    std::vector<std::string> lines(group.ranks.size());
    std::vector<bool> has_line(group.ranks.size());
    while (!absl::c_all_of(has_line, [](bool has) { return has; })) {
      if (absl::Status status = CheckAggregators(); !status.ok()) return status;
      if (!said_who_is_awaited && absl::Now() - last_answer >= options_.patience) {
        SayWhoIsAwaited(group, has_line);
        said_who_is_awaited = true;
      }
      for (size_t rank = 0; rank < lines.size(); ++rank) {
        if (has_line[rank]) continue;
        const absl::Time soon = absl::Now() + absl::Milliseconds(20);
        absl::StatusOr<std::string> line = group.ranks[rank]->ReadLine(soon);
        has_line[rank] = line.ok();
        if (line.ok()) {
          lines[rank] = *std::move(line);
          last_answer = absl::Now();
        } else if (!absl::IsDeadlineExceeded(line.status())) {
          return line.status();
        } else if (absl::Now() - last_answer >= silence) {
          return absl::DeadlineExceededError(absl::StrCat("no answer from '",
                                                          group.ranks[rank]->name(), "' in ",
                                                          absl::FormatDuration(silence)));
        }
      }
    }
    return lines;
  }

  absl::Status AwaitReady(const Group& group) const {
    const absl::StatusOr<std::vector<std::string>> lines = ReadFromAll(group, 1);
    if (!lines.ok()) return lines.status();
    for (const std::string& line : *lines) {
      if (line == "ready") continue;
      return absl::InternalError(absl::StrCat("a rank says '", line, "', not that it is ready"));
    }
    return absl::OkStatus();
  }

  absl::Duration CpuTime(const Group& group) const {
    absl::Duration sum;
    for (const auto& rank : group.ranks) sum += rank->cpu_time();
    if (group.service == nullptr) return sum;
    for (const auto& aggregator : group.service->aggregators) sum += aggregator->cpu_time();
    return sum;
  }

  absl::Status TakeTurn(Group& group) const {
    const absl::Duration cpu_before = CpuTime(group);
    for (const auto& rank : group.ranks) {
      if (absl::Status status = rank->Write(absl::StrCat(options_.exchanges)); !status.ok()) {
        return status;
      }
    }
    std::vector<double> slowest(options_.exchanges);
    const absl::StatusOr<std::vector<std::string>> lines = ReadFromAll(group, options_.exchanges);
    if (!lines.ok()) return lines.status();
    for (const std::string& line : *lines) {
      const std::vector<absl::string_view> times = absl::StrSplit(line, ' ');
      for (size_t i = 0; i < slowest.size(); ++i) {
        double seconds = 0;
        if (i >= times.size() || !absl::SimpleAtod(times[i], &seconds)) {
          return absl::InternalError(absl::StrCat("a rank says '", line, "', not its times"));
        }
        slowest[i] = std::max(slowest[i], seconds / StepsPerExchange(group.options));
      }
    }
    group.seconds.push_back(std::move(slowest));
    group.cpu_seconds.push_back(absl::ToDoubleSeconds(CpuTime(group) - cpu_before) /
                                options_.exchanges);
    return absl::OkStatus();
  }

  // Without the first turn.
  static Turns TurnsOf(const Group& group) { return absl::MakeConstSpan(group.seconds).subspan(1); }
  static std::vector<double> SecondsOf(const Group& group) { return Medians(TurnsOf(group)); }

  // Ours come first, each behind the one in plain text that it is compared with.
  Figures Report() const {
    Figures figures;
    const size_t ours = groups_.size() - options_.peers.size();
    for (size_t g = 0; g < groups_.size(); ++g) {
      const Group& group = groups_[g];
      const std::vector<double> seconds = SecondsOf(group);
      if (g >= ours) {
        Figure& time = *figures.add_figures();
        time = FigureOfTurns(options_.peers[g - ours], "s", TurnsOf(group));
        const Group& like = LikePeers();
        SetPeer(NameOf(like.options), seconds, SecondsOf(like), Better::kLess, time);
        continue;
      }
      const bool is_mtls = group.service == &mtls_;
      const std::string name = absl::StrCat(NameOf(group.options), is_mtls ? ", mTLS" : "");
      Figure& time = *figures.add_figures();
      time = FigureOfTurns(name, "s", TurnsOf(group));
      const uint32_t steps = StepsPerExchange(group.options);
      if (options_.rate.empty()) {
        std::vector<double> bounds;
        for (const double bound : SecondsOf(plain_tcp_)) bounds.push_back(bound / steps);
        SetBounds(seconds, bounds, Better::kLess, time);
      } else {
        const double bound =
            LinkBound(group.options, options_.workers, options_.shards, *ParseRate(options_.rate));
        SetBound(bound / steps, Better::kLess, time);
      }
      if (is_mtls) {
        SetPeer("plain text", seconds, SecondsOf(groups_[g - 1]), Better::kLess, time);
      } else if (!options_.peers.empty()) {
        SetPeer(options_.peers[0], seconds, SecondsOf(groups_[ours]), Better::kLess, time);
      }
      if (group.options.mode == "step") *figures.add_figures() = PeakMemory(name, group);
      if (const auto memory = memory_.find(g); memory != memory_.end()) {
        Figure& whole = *figures.add_figures();
        whole = FigureOfTurns(absl::StrCat(name, ": on one machine"), "s", TurnsOf(group));
        SetBounds(seconds, SecondsOf(memory->second), Better::kLess, whole);
      }
      if (group.options.mode == "frames") *figures.add_figures() = CpuPerByte(name, group);
    }
    return figures;
  }

  // What of ours does as much as peers do: not packed frames, unless there is nothing else.
  const Group& LikePeers() const {
    const auto is_whole = [](const Group& group) {
      return group.service != nullptr && group.options.mode != "frames";
    };
    const auto whole = absl::c_find_if(groups_, is_whole);
    return whole == groups_.end() ? groups_[0] : *whole;
  }

  // Of the ranks and the aggregators, each when it had most.
  Figure PeakMemory(const std::string& name, const Group& group) const {
    uint64_t bytes = 0;
    for (const auto& rank : group.ranks) bytes += rank->peak_memory_bytes();
    for (const auto& aggregator : group.service->aggregators) {
      bytes += aggregator->peak_memory_bytes();
    }
    return MakeFigure(absl::StrCat(name, ": memory of all"), "GB", {bytes / 1e9});
  }

  Figure CpuPerByte(const std::string& name, const Group& group) const {
    const RankOptions& rank = group.options;
    const double gigabytes =
        2 * options_.workers * rank.parameters * BitsPerParameter(rank.codec) / 8 / 1e9;
    std::vector<double> per_gigabyte;
    for (size_t turn = 1; turn < group.cpu_seconds.size(); ++turn) {
      per_gigabyte.push_back(group.cpu_seconds[turn] / gigabytes);
    }
    return MakeFigure(absl::StrCat(name, ": processor time"), "s/GB", per_gigabyte);
  }

  const ExchangeOptions& options_;
  const InterruptScope interrupts_;
  std::unique_ptr<Hosts> hosts_;                                       // outlives what runs on them
  const TemporaryDirectory directory_{TemporaryPrefix(NamePrefix())};  // certificates; mpirun's
  std::unique_ptr<LineProcess> filter_;  // of what plain_text_ says; outlives it, and its ranks
  Service plain_text_, mtls_;
  std::vector<Group> groups_;       // ours, then the peers
  Group plain_tcp_;                 // without links
  std::map<size_t, Group> memory_;  // what steps go through; by their group
};

}  // namespace

uint64_t LeastMemory(const ExchangeOptions& options) {
  constexpr double kNumber = sizeof(float);
  constexpr double kProcess = 5e6;  // of its own, with nothing to do
  const double services = options.tls ? 2 : 1;
  double bytes = services * options.shards * kProcess;
  for (const RankOptions& rank : options.ranks) {
    const bool has_error = !DenseTypeOf(rank.codec);
    double of_worker = 0;  // for each parameter
    if (rank.mode == "frames") {
      of_worker = 2 * BitsPerParameter(rank.codec) / 8;  // as many payloads, of all chunks
    } else if (rank.mode == "mean") {
      of_worker = (has_error ? 2 : 1) * kNumber;  // gradient, error
    } else {
      of_worker = 3 * kNumber;  // parameters, moments or denominators and error
      // From the freeze on a fresh variance; or momentum beside the denominators, what it was at
      // the last synchronisation, and the sum since.
      if (rank.optimizer == StepOptimizer::kLamb && rank.codec == ONE_BIT) of_worker += kNumber;
      if (rank.optimizer == StepOptimizer::kZeroOneAdam) of_worker += (has_error ? 3 : 2) * kNumber;
    }
    const double of_aggregators = has_error ? kNumber : 0;
    bytes += services * (options.workers * (kProcess + rank.parameters * of_worker) +
                         rank.parameters * of_aggregators);
  }
  if (options.rate.empty()) {
    const RankOptions& rank = options.ranks[0];
    const double payload = rank.parameters * BitsPerParameter(rank.codec) / 8;
    const double room = std::min<double>(payload / options.shards, PlainTcp::kRoom);
    bytes += kProcess + options.workers * options.shards * 2 * room;
  }
  for (const RankOptions& rank : options.ranks) {
    const std::optional<double> step = StepBytes(rank, options.workers);
    if (step) bytes += kProcess + std::min(*step / 2, PlainMemory::kRoom);
  }
  const double of_peer = kProcess + options.ranks[0].parameters * kNumber;
  constexpr double kMost = 1e18;  // of what no machine has, a number that still is one
  return static_cast<uint64_t>(
      std::min(bytes + options.peers.size() * options.workers * of_peer, kMost));
}

double LinkBound(const RankOptions& rank, uint32_t workers, uint32_t shards,
                 double bits_per_second) {
  // An aggregator's link carries its chunks of what all workers send.
  const uint64_t chunks = ChunkCount(rank.parameters, rank.chunk_elements, workers);
  const double share = static_cast<double>(MostChunksOfAShard(chunks, shards)) / chunks;
  const double busiest = std::max(1.0, workers * share);
  return busiest * rank.parameters * BitsPerParameter(rank.codec) / bits_per_second;
}

absl::StatusOr<Figures> MeasureExchange(const ExchangeOptions& options) {
  RemoveLeftDirectories();
  return Measurement(options).Run();
}

}  // namespace signpost::bench
