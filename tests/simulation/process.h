// An aggregator process: the real aggregator and state directory on a simulated disk. It dies, and
// is started again.

#ifndef SIGNPOST_TESTS_SIMULATION_PROCESS_H_
#define SIGNPOST_TESTS_SIMULATION_PROCESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/aggregator.h"
#include "server/state_dir.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"

namespace signpost::simulation {

// After which a peer that says nothing has no connection any more. As outside, about a third of:
inline constexpr absl::Duration kFailureTimeout = absl::Milliseconds(333);
// Longer than any worker takes to come back, which one that leaves another shard first does late.
inline constexpr absl::Duration kRestartGrace = absl::Seconds(1);

class Process {
 public:
  // `report` gets what must not happen.
  using Report = std::function<void(const std::string& violation)>;
  using IsConnected = std::function<bool(const std::string& connection)>;
  // `damages_late_ranks`: what is written down of them may be.
  Process(Scheduler& scheduler, ShardId shard, bool damages_late_ranks, IsConnected is_connected,
          Report report);
  ~Process();

  void Start();
  // At once, or in the middle of one of the next disk operations.
  void Kill();
  // Kills, and changes a bit of what is written down of late ranks, if that may be; or of the
  // newest snapshot, if there is another that is as good, and this has not happened to this process
  // before.
  void KillAndFlipBit(bool other_is_as_good, bool may_be_of_late_ranks);
  uint64_t bit_flips() const { return bit_flips_; }  // that came of it
  void KillWhileSaving() { disk_.DieIn(1 + scheduler_.Below(6)); }
  // As SIGTERM does, soon.
  void Stop() { is_stopping_ = is_up(); }
  bool is_stopping() const { return is_stopping_; }
  // How often it has written down what was due, or all there was when it was stopped; and the
  // number of the next time that begins after now.
  uint64_t saves() const { return saves_; }
  uint64_t next_save() const { return saves_ + (is_saving_ ? 2 : 1); }
  // For good: its tasks are to end.
  void Retire() { is_retired_ = true; }

  // That of each of its incarnations.
  ProcessClock& clock() { return clock_; }
  bool is_up() const { return aggregator_ != nullptr; }
  // Replies of an earlier incarnation never arrive.
  uint64_t incarnation() const { return incarnation_; }
  // A name that none has had.
  std::string NewConnection() { return absl::StrCat("connection ", ++connections_); }
  Aggregator& aggregator() { return *aggregator_; }
  SimDisk& disk() { return disk_; }
  const SimDisk& disk() const { return disk_; }

 private:
  // Two tasks, as the real one has threads. Others run, and the process dies, while they write.
  void SaveNowAndThen();
  void CloseLateRoundsNowAndThen();
  // Calls `use` with the aggregator, which stays until it returns, whatever happens meanwhile.
  void Use(absl::FunctionRef<void(Aggregator& aggregator)> use);
  void Suspend();

  void StartLater();
  // Nothing comes of its aggregator any more; it is started again when nobody uses it.
  void End();
  void HasEnded();
  struct Flip {
    bool other_is_as_good;  // the other snapshot
    bool may_be_of_late_ranks;
  };
  void FlipBit(const Flip& flip);

  Scheduler& scheduler_;
  ProcessClock clock_;
  const ShardId shard_;
  const bool damages_late_ranks_;
  const IsConnected is_connected_;
  const Report report_;
  SimDisk disk_;
  std::unique_ptr<StateDir> state_dir_;
  std::unique_ptr<Aggregator> aggregator_;  // null: it is down
  std::unique_ptr<StateDir> ended_state_dir_;
  std::unique_ptr<Aggregator> ended_aggregator_;
  int users_ = 0;  // of one of both
  uint64_t incarnation_ = 0;
  uint64_t connections_ = 0;
  uint64_t saves_ = 0;
  bool is_saving_ = false;
  bool is_stopping_ = false;
  bool is_retired_ = false;
  std::optional<Flip> flip_;  // a bit, once it has ended
  bool flipped_ = false;
  uint64_t bit_flips_ = 0;
  const absl::Duration longest_save_;
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_PROCESS_H_
