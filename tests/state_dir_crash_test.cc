// State directories on a disk that loses what was not synced, in any order.

#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "server/state_dir.h"
#include "server/test_state.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"

namespace signpost::simulation {
namespace {

// A job's state that was saved after two steps.
struct SavedJob {
  explicit SavedJob(uint64_t seed) : scheduler(seed), disk(scheduler), state_dir(Open()) {
    for (const uint64_t step : {4, 5}) EXPECT_TRUE(Save(*state_dir, TestState(7, step)).ok());
  }
  std::unique_ptr<StateDir> Open() { return *StateDir::Open(disk, kShard); }
  auto Recover() { return Open()->Recover(/*allow_error_reset=*/false); }

  Scheduler scheduler;
  SimDisk disk;
  const std::unique_ptr<StateDir> state_dir;
};

// Were it back, with the one before it gone, no aggregator would start.
TEST(StateDirCrash, ADamagedSnapshotThatWasSetAsideIsNotBackAfterACrash) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SavedJob job(seed);
    job.disk.FlipBit("0000000000000007-0000000000000002.snapshot");
    ASSERT_TRUE(job.Recover().ok());
    // The job is being forgotten.
    ASSERT_TRUE(job.disk.Remove("0000000000000007-0000000000000001.snapshot").ok());
    job.disk.Crash();
    const auto recovered = job.Recover();
    EXPECT_TRUE(recovered.ok()) << "seed " << seed << ": " << recovered.status();
  }
}

// An older one does not know who has left, and would bring back a job that is over.
TEST(StateDirCrash, AJobThatIsBeingForgottenIsInItsNewestSnapshotOrGoneAfterACrash) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SavedJob job(seed);
    job.disk.DieIn(1 + job.scheduler.Below(6));
    job.state_dir->Forget(7).IgnoreError();
    job.disk.Crash();
    const auto recovered = job.Recover();
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_EQ(recovered->known, std::vector<uint64_t>{7}) << "seed " << seed;
    if (recovered->jobs.empty()) continue;
    EXPECT_EQ(recovered->jobs[0].chunks[0].open_step, 5) << "seed " << seed;
  }
}

}  // namespace
}  // namespace signpost::simulation
