// Many seeds of the simulation.
//
//   simulation_test [--seeds=N] [--first=SEED]
//
// Ends with an error at the first seed that violates an invariant, and says how to repeat it.
// --expect_violation turns that round: planted_bug_test.bzl holds the simulator against known bugs.

#include "tests/simulation/simulation.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace signpost::simulation {
namespace {

struct Flags {
  uint64_t seeds = 2000;
  uint64_t first = 1;
  bool expect_violation = false;
} flags;

void Parse(absl::string_view argument) {
  if (absl::ConsumePrefix(&argument, "--seeds=")) {
    ASSERT_TRUE(absl::SimpleAtoi(argument, &flags.seeds));
  } else if (absl::ConsumePrefix(&argument, "--first=")) {
    ASSERT_TRUE(absl::SimpleAtoi(argument, &flags.first));
  } else {
    ASSERT_EQ(argument, "--expect_violation");
    flags.expect_violation = true;
  }
}

TEST(Simulation, HoldsTheInvariants) {
  SimulationResult total;
  for (uint64_t seed = flags.first; seed < flags.first + flags.seeds; ++seed) {
    const SimulationResult result = Simulate(seed);
    total.kills += result.kills;
    total.kills_while_saving += result.kills_while_saving;
    total.stops += result.stops;
    total.replayed_frames += result.replayed_frames;
    total.skipped_rounds += result.skipped_rounds;
    if (result.violations.empty()) continue;
    for (const std::string& violation : result.violations) std::printf("%s\n", violation.c_str());
    if (flags.expect_violation) {
      std::printf("found with seed %ju\n", uintmax_t{seed});
      return;
    }
    FAIL() << "seed " << seed << "; to see it again:\n"
           << "  ./signpost test //tests/simulation:simulation_test --test_arg=--first=" << seed
           << " --test_arg=--seeds=1";
  }
  std::printf(
      "%ju seeds: %ju kills, %ju while saving, %ju stops, %ju frames replayed, "
      "%ju rounds skipped\n",
      uintmax_t{flags.seeds}, uintmax_t{total.kills}, uintmax_t{total.kills_while_saving},
      uintmax_t{total.stops}, uintmax_t{total.replayed_frames}, uintmax_t{total.skipped_rounds});
  EXPECT_FALSE(flags.expect_violation) << "the planted bug was not found";
}

}  // namespace
}  // namespace signpost::simulation

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) signpost::simulation::Parse(argv[i]);
  return RUN_ALL_TESTS();
}
