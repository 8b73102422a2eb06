#include "cli/chaos.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "worker/grpc_channel.h"

namespace signpost::cli {
namespace {

constexpr std::pair<Fault, absl::string_view> kNames[] = {
    {Fault::kKill, "kill"},
    {Fault::kStop, "stop"},
    {Fault::kReset, "reset"},
    {Fault::kStall, "stall"},
};

constexpr absl::Duration kStatusTimeout = absl::Seconds(1);
constexpr absl::Duration kPollInterval = absl::Milliseconds(10);

std::string Seconds(absl::Duration duration) {
  return absl::StrFormat("%.2f s", absl::ToDoubleSeconds(duration));
}

}  // namespace

std::string NameOf(Fault fault) {
  for (const auto& [candidate, name] : kNames) {
    if (candidate == fault) return std::string(name);
  }
  return "";
}

absl::StatusOr<std::vector<Fault>> ParseFaults(absl::string_view names) {
  std::vector<Fault> faults;
  for (const absl::string_view wanted : absl::StrSplit(names, ',')) {
    const auto found = std::find_if(std::begin(kNames), std::end(kNames),
                                    [&](const auto& entry) { return entry.second == wanted; });
    if (found == std::end(kNames)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", wanted, "' is not a fault; kill, stop, reset and stall are"));
    }
    faults.push_back(found->first);
  }
  return faults;
}

Chaos::Chaos(const ChaosOptions& options)
    : options_(options), start_(SteadyNow()), shards_(options.aggregators) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Chaos::~Chaos() {
  Finish();
  absl::MutexLock lock(&mutex_);
  for (const Shard& shard : shards_) {
    if (shard.pidfd >= 0) close(shard.pidfd);
  }
}

std::string Chaos::SetListening(const ListeningAggregator& aggregator) {
  absl::MutexLock lock(&mutex_);
  Shard& shard = shards_[aggregator.shard];
  if (shard.pidfd >= 0) close(shard.pidfd);
  shard.aggregator = aggregator;
  shard.pidfd = static_cast<int>(syscall(SYS_pidfd_open, aggregator.pid, 0));
  ++shard.starts;
  if (security_ == nullptr) {
    const auto security = ClientSecurity::Open({.tls_dir = aggregator.tls_dir},
                                               {aggregator.address}, options_.on_line);
    if (security.ok()) security_ = *security;
  }
  if (shard.proxy == nullptr) {
    uint32_t port = 0;
    if (!absl::SimpleAtoi(aggregator.address.substr(aggregator.address.rfind(':') + 1), &port)) {
      return aggregator.address;
    }
    shard.proxy = std::make_unique<Proxy>(static_cast<uint16_t>(port));
  }
  return shard.proxy->target();
}

std::string Chaos::Finish() {
  {
    absl::MutexLock lock(&mutex_);
    finishing_ = true;
  }
  if (thread_.joinable()) thread_.join();
  absl::MutexLock lock(&mutex_);
  int faults = 0;
  std::vector<std::string> kinds;
  for (const auto& [fault, count] : counts_) {
    faults += count;
    kinds.push_back(absl::StrCat(count, " ", NameOf(fault)));
  }
  if (faults == 0) return "no fault: the run was too short";
  std::string text = absl::StrFormat("%d faults (%s)", faults, absl::StrJoin(kinds, ", "));
  if (!recoveries_.empty()) {
    std::sort(recoveries_.begin(), recoveries_.end());
    absl::StrAppend(&text, ", recovered after ", Seconds(recoveries_[recoveries_.size() / 2]),
                    " in the median, ", Seconds(recoveries_.back()), " at most");
  }
  const int unseen = faults - static_cast<int>(recoveries_.size());
  if (unseen > 0) absl::StrAppend(&text, "; the run ended before ", unseen, " recovered");
  return text;
}

int Chaos::faults() const {
  absl::MutexLock lock(&mutex_);
  int faults = 0;
  for (const auto& [fault, count] : counts_) faults += count;
  return faults;
}

int Chaos::recovered() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(recoveries_.size());
}

// The thread.

void Chaos::Run() {
  {
    absl::MutexLock lock(&mutex_);
    const auto is_time = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return finishing_ || AllListen();
    };
    mutex_.Await(absl::Condition(&is_time));
  }
  FaultPlan plan(options_.seed, options_.faults, options_.aggregators);
  for (absl::Time next = SteadyNow() + options_.every; Pause(next - SteadyNow());
       next = std::max(next + options_.every, SteadyNow())) {
    Inflict(plan.Next());
  }
}

bool Chaos::AllListen() const {
  return std::all_of(shards_.begin(), shards_.end(),
                     [](const Shard& shard) { return shard.starts > 0; });
}

void Chaos::Inflict(const PlannedFault& planned) {
  Progress before;
  if (!ReadProgress(planned.shard, before)) {
    // One without chunks has no part in the job, but the first one has.
    if (planned.shard > 0) Inflict({planned.fault, /*shard=*/0});
    return;
  }
  const absl::Time fault = SteadyNow();
  Say(absl::StrCat(NameOf(planned.fault), " aggregator ", planned.shard, ", step ", before.step));
  {
    absl::MutexLock lock(&mutex_);
    ++counts_[planned.fault];
  }
  Do(planned);
  if (!AwaitNextRound(planned.shard, before)) return;
  const absl::Duration took = SteadyNow() - fault;
  Say(absl::StrCat("aggregator ", planned.shard, " closes rounds again, ", Seconds(took),
                   " after the fault"));
  absl::MutexLock lock(&mutex_);
  recoveries_.push_back(took);
}

void Chaos::Do(const PlannedFault& planned) {
  Proxy* proxy;
  int starts;
  {
    absl::MutexLock lock(&mutex_);
    proxy = shards_[planned.shard].proxy.get();
    starts = shards_[planned.shard].starts;
  }
  switch (planned.fault) {
    case Fault::kKill:
      Signal(planned.shard, SIGKILL);
      AwaitStart(planned.shard, starts + 1);
      break;
    case Fault::kStop:
      Signal(planned.shard, SIGSTOP);
      Pause(options_.pause);
      Signal(planned.shard, SIGCONT);
      break;
    case Fault::kReset:
      proxy->Reset();
      break;
    case Fault::kStall:
      proxy->Stop();
      Pause(options_.pause);
      proxy->Resume();
      break;
  }
}

void Chaos::Signal(uint32_t shard, int signal) {
  absl::MutexLock lock(&mutex_);
  syscall(SYS_pidfd_send_signal, shards_[shard].pidfd, signal, nullptr, 0);
}

bool Chaos::ReadProgress(uint32_t shard, Progress& progress) {
  std::string address;
  std::shared_ptr<const ClientSecurity> security;
  {
    absl::MutexLock lock(&mutex_);
    address = shards_[shard].aggregator.address;
    security = security_;
  }
  // A channel that had lost its connection would wait for its backoff.
  const absl::StatusOr<StatusResponse> status =
      ConnectToAggregator(address, FailureTimeout(), /*on_connection=*/nullptr, security)
          ->Status({}, SteadyNow() + kStatusTimeout);
  if (!status.ok() || status->jobs_size() != 1) return false;
  const JobStatus& job = status->jobs(0);
  progress = {job.rounds_closed(), job.chunks(), job.step()};
  return true;
}

bool Chaos::AwaitNextRound(uint32_t shard, const Progress& before) {
  do {
    Progress now;
    // A round may have closed between the reading and the fault, so it takes one of each chunk.
    if (ReadProgress(shard, now) && now.rounds_closed > before.rounds_closed + before.chunks) {
      return true;
    }
  } while (Pause(kPollInterval));
  return false;
}

bool Chaos::AwaitStart(uint32_t shard, int starts) {
  absl::MutexLock lock(&mutex_);
  const auto is_time = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return finishing_ || shards_[shard].starts >= starts;
  };
  mutex_.Await(absl::Condition(&is_time));
  return !finishing_;
}

bool Chaos::Pause(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  return !mutex_.AwaitWithTimeout(absl::Condition(&finishing_), duration);
}

void Chaos::Say(const std::string& text) const {
  options_.on_line(absl::StrCat("after ", Seconds(SteadyNow() - start_), ": ", text));
}

}  // namespace signpost::cli
