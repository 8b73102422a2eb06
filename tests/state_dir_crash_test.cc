// State directories on a disk that loses what was not synced, in any order.

#include <cstdint>
#include <memory>

#include "gtest/gtest.h"
#include "server/state_dir.h"
#include "server/test_state.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"

namespace signpost::simulation {
namespace {

// Were it back, with the one before it gone, no aggregator would start.
TEST(StateDirCrash, ADamagedSnapshotThatWasSetAsideIsNotBackAfterACrash) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Scheduler scheduler(seed);
    SimDisk disk(scheduler);
    const auto open = [&] { return *StateDir::Open(disk, kShard); };
    const std::unique_ptr<StateDir> first = open();
    for (const uint64_t step : {4, 5}) ASSERT_TRUE(Save(*first, TestState(7, step)).ok());
    disk.FlipBit("0000000000000007-0000000000000002.snapshot");
    ASSERT_TRUE(open()->Recover(/*allow_error_reset=*/false).ok());
    // The job is being forgotten.
    ASSERT_TRUE(disk.Remove("0000000000000007-0000000000000001.snapshot").ok());
    disk.Crash();
    const auto recovered = open()->Recover(/*allow_error_reset=*/false);
    EXPECT_TRUE(recovered.ok()) << "seed " << seed << ": " << recovered.status();
  }
}

// An older one does not know who has left, and would bring back a job that is over.
TEST(StateDirCrash, AJobThatIsBeingForgottenIsInItsNewestSnapshotOrGoneAfterACrash) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Scheduler scheduler(seed);
    SimDisk disk(scheduler);
    const auto open = [&] { return *StateDir::Open(disk, kShard); };
    const std::unique_ptr<StateDir> state_dir = open();
    for (const uint64_t step : {4, 5}) ASSERT_TRUE(Save(*state_dir, TestState(7, step)).ok());
    disk.DieIn(1 + scheduler.Below(6));
    state_dir->Forget(7).IgnoreError();
    disk.Crash();
    const auto recovered = open()->Recover(/*allow_error_reset=*/false);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    if (recovered->jobs.empty()) continue;
    EXPECT_EQ(recovered->jobs[0].chunks[0].open_step, 5) << "seed " << seed;
  }
}

}  // namespace
}  // namespace signpost::simulation
