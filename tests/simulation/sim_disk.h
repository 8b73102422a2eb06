// A disk that loses what was not synced, tears what was being written, fills up, and ends the
// process that uses it in the middle of an operation.

#ifndef SIGNPOST_TESTS_SIMULATION_SIM_DISK_H_
#define SIGNPOST_TESTS_SIMULATION_SIM_DISK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/disk.h"
#include "tests/simulation/scheduler.h"

namespace signpost::simulation {

class SimDisk final : public Disk {
 public:
  explicit SimDisk(Scheduler& scheduler) : scheduler_(scheduler) {}

  absl::Status Write(const std::string& name, Fill fill) override;
  absl::Status Sync(const std::string& name) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status SyncDirectory() override;
  absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) override;
  absl::StatusOr<std::vector<std::string>> List() override;
  absl::Status Remove(const std::string& name) override;

  // Called before each operation, and each part of a Write: others may do something meanwhile.
  void set_pause(std::function<void()> pause) { pause_ = std::move(pause); }

  // All operations fail from now on, also those that are under way.
  void Die() { died_ = true; }
  // The process dies in its `operations`-th operation from now on (1: the next): that one happens
  // in part or not at all, and all later ones fail.
  void DieIn(uint64_t operations) { operations_left_ = operations; }
  bool will_die() const { return operations_left_ > 0; }
  bool died() const { return died_; }

  void set_full(bool full) { full_ = full; }

  // What the next process finds after a crash of the machine.
  void Crash();
  // Flips one bit of a file, as it lies on the disk.
  void FlipBit(const std::string& name);

 private:
  struct File {
    std::string durable;
    std::string contents;  // as the running system has them
  };
  using Names = std::map<std::string, std::shared_ptr<File>>;

  // Whether the process is dead, or dies now.
  bool Dies();
  void Pause() {
    if (pause_ != nullptr) pause_();
  }
  void Tear(File& file);

  Scheduler& scheduler_;
  std::function<void()> pause_;
  Names names_;
  Names durable_names_;
  uint64_t operations_left_ = 0;  // 0: as many as it likes
  bool died_ = false;
  bool full_ = false;
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SIM_DISK_H_
