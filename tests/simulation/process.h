// An aggregator process: the real aggregator and state directory on a simulated disk. It dies, and
// is started again.

#ifndef SIGNPOST_TESTS_SIMULATION_PROCESS_H_
#define SIGNPOST_TESTS_SIMULATION_PROCESS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "server/aggregator.h"
#include "server/state_dir.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"

namespace signpost::simulation {

class Process {
 public:
  // `report` gets what must not happen.
  using Report = std::function<void(const std::string& violation)>;
  // `damages_late_ranks`: what is written down of them may be.
  Process(Scheduler& scheduler, ShardId shard, bool damages_late_ranks, Report report);
  ~Process();

  void Start();
  // At once, or in the middle of one of the next disk operations.
  void Kill();
  // Kills, and changes a bit of what is written down of late ranks, if that may be; or of the
  // newest snapshot, if there is another that is as good, and this has not happened to this process
  // before. Whether it did.
  bool KillAndFlipBit(bool other_is_as_good);
  void KillWhileSaving() { disk_.DieIn(1 + scheduler_.Below(6)); }
  // As SIGTERM does.
  void Stop();
  // Calls that have written down what was due, and those of Stop.
  uint64_t saves() const { return saves_; }

  bool is_up() const { return aggregator_ != nullptr; }
  // Replies of an earlier incarnation never arrive.
  uint64_t incarnation() const { return incarnation_; }
  Aggregator& aggregator() { return *aggregator_; }
  SimDisk& disk() { return disk_; }
  const SimDisk& disk() const { return disk_; }

 private:
  void StartLater();
  void End();
  void SaveNowAndThen(uint64_t incarnation);
  void CloseLateRoundsNowAndThen(uint64_t incarnation);

  Scheduler& scheduler_;
  const ShardId shard_;
  const bool damages_late_ranks_;
  const Report report_;
  SimDisk disk_;
  std::unique_ptr<StateDir> state_dir_;
  std::unique_ptr<Aggregator> aggregator_;
  uint64_t incarnation_ = 0;
  uint64_t saves_ = 0;
  bool flipped_ = false;
  const absl::Duration longest_save_;
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_PROCESS_H_
