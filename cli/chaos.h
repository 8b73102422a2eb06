// Faults that are done to a job's aggregators and their connections while it runs, and how long the
// job takes to get over each.

#ifndef SIGNPOST_CLI_CHAOS_H_
#define SIGNPOST_CLI_CHAOS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cli/launcher.h"
#include "cli/proxy.h"
#include "security/client_security.h"

namespace signpost::cli {

enum class Fault {
  kKill,   // SIGKILL
  kStop,   // SIGSTOP, and SIGCONT after the pause
  kReset,  // all connections to the aggregator end with RST
  kStall,  // nothing is forwarded, in either direction, during the pause
};

std::string NameOf(Fault fault);  // "kill"

// "kill,reset". INVALID_ARGUMENT names what is not a fault.
absl::StatusOr<std::vector<Fault>> ParseFaults(absl::string_view names);

struct PlannedFault {
  Fault fault;
  uint32_t shard;
};

// The same seed plans the same faults.
class FaultPlan {
 public:
  // Requires some faults and shards.
  FaultPlan(uint64_t seed, std::vector<Fault> faults, uint32_t shards)
      : random_(seed), faults_(std::move(faults)), shards_(shards) {}

  PlannedFault Next() {
    return {faults_[random_() % faults_.size()], static_cast<uint32_t>(random_() % shards_)};
  }

 private:
  std::mt19937_64 random_;
  const std::vector<Fault> faults_;
  const uint32_t shards_;
};

struct ChaosOptions {
  absl::Duration every = absl::Seconds(5);  // from one fault to the next, or longer: one at a time
  absl::Duration pause = absl::Seconds(2);
  uint64_t seed = 1;
  std::vector<Fault> faults = {Fault::kKill};
  uint32_t aggregators = 1;
  // Gets one line for each fault and each recovery, from a thread of Chaos.
  std::function<void(const std::string& line)> on_line;
};

// Faults have an end: a shard has recovered when it has closed a round of a step that it had not
// begun before. Works from a thread of its own, to which no signal goes. Thread-safe.
class Chaos {
 public:
  explicit Chaos(const ChaosOptions& options);
  ~Chaos();  // as Finish

  // For LaunchOptions::on_listening: returns the address of a proxy in front of the aggregator. The
  // first fault comes after `every` from when all aggregators are there.
  std::string SetListening(const ListeningAggregator& aggregator);

  // No further fault. Returns what there was: "4 faults (3 kill, 1 reset), recovered after 0.31 s
  // in the median, 0.62 s at most".
  std::string Finish();

  int faults() const;     // so far
  int recovered() const;  // of them

 private:
  struct Shard {
    ListeningAggregator aggregator;
    int starts = 0;
    int pidfd = -1;  // cannot become another process's
    std::unique_ptr<Proxy> proxy;
  };
  struct Progress {
    uint64_t rounds_closed = 0;  // over all chunks
    uint64_t chunks = 0;
    uint64_t step = 0;
  };

  void Run();
  void Inflict(const PlannedFault& planned);
  void Do(const PlannedFault& planned);
  void Signal(uint32_t shard, int signal);
  // False: there is nothing to see: the job has not begun, is over, or has no chunks there.
  bool ReadProgress(uint32_t shard, Progress& progress);
  // False: the end came first.
  bool AwaitNextRound(uint32_t shard, const Progress& before);
  bool AwaitStart(uint32_t shard, int starts);
  bool Pause(absl::Duration duration);
  bool AllListen() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Say(const std::string& text) const;

  const ChaosOptions options_;
  const absl::Time start_;
  mutable absl::Mutex mutex_;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Shard> shards_ ABSL_GUARDED_BY(mutex_);
  std::map<Fault, int> counts_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Duration> recoveries_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const ClientSecurity> security_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CHAOS_H_
