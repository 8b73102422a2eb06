// Many seeds of the simulation.
//
//   simulation_test [--seeds=N] [--first=SEED]     expects all invariants to hold
//   simulation_test --without_bug=PROGRAM ...      expects a violation: a bug is planted in this
//                                                  program, but not in that one
//   simulation_test --finds=TEXT ...               expects a violation that says so; what happens
//                                                  undisturbed is this program's own
//
// Says of the first seed of a hundred that violates an invariant how to repeat it.

#include "tests/simulation/simulation.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/codec.h"

namespace signpost::simulation {
namespace {

struct Flags {
  uint64_t seeds = 1000;
  uint64_t first = 1;
  std::string without_bug;
  std::string finds;
  std::string write_expected;  // what the other program is told
} flags;

void Parse(absl::string_view argument) {
  if (absl::ConsumePrefix(&argument, "--seeds=")) {
    ASSERT_TRUE(absl::SimpleAtoi(argument, &flags.seeds));
  } else if (absl::ConsumePrefix(&argument, "--first=")) {
    ASSERT_TRUE(absl::SimpleAtoi(argument, &flags.first));
  } else if (absl::ConsumePrefix(&argument, "--write_expected=")) {
    flags.write_expected = std::string(argument);
  } else if (absl::ConsumePrefix(&argument, "--finds=")) {
    flags.finds = std::string(argument);
  } else if (absl::ConsumePrefix(&argument, "--without_bug=")) {
    flags.without_bug = std::string(argument);
  } else {
    ASSERT_TRUE(absl::StartsWith(argument, "--gtest_")) << argument;
  }
}

// The first seed's digests, in one line.
int WriteExpected() {
  std::ofstream file(flags.write_expected);
  for (const uint32_t digest : Undisturbed(flags.first)) file << digest << " ";
  return file.flush() ? 0 : 1;
}

// Of a seed at a time: most bugs are found in one of the first.
Digests ExpectedWithoutBug(uint64_t seed) {
  const std::string path = testing::TempDir() + "/expected";
  const std::string command =
      absl::StrCat(flags.without_bug, " --first=", seed, " --write_expected=", path);
  if (std::system(command.c_str()) != 0) return {};
  std::ifstream file(path);
  return {std::istream_iterator<uint32_t>(file), std::istream_iterator<uint32_t>()};
}

void Print(const SimulationResult& result, uint64_t seed) {
  for (const std::string& violation : result.violations) std::printf("%s\n", violation.c_str());
  std::printf(
      "seed %ju; to see it again:\n"
      "  ./signpost test //tests/simulation:simulation_test --test_arg=--first=%ju "
      "--test_arg=--seeds=1\n",
      uintmax_t{seed}, uintmax_t{seed});
}

constexpr uint64_t kSeedsOfATest = 100;

// The first of those of each test.
std::vector<uint64_t> FirstSeeds() {
  std::vector<uint64_t> seeds;
  for (uint64_t seed = 0; seed < flags.seeds; seed += kSeedsOfATest) {
    seeds.push_back(flags.first + seed);
  }
  return seeds;
}

void Add(const SimulationResult& result, SimulationResult& total) {
  total.kills += result.kills;
  total.kills_while_saving += result.kills_while_saving;
  total.kills_without_the_dead += result.kills_without_the_dead;
  total.stops += result.stops;
  total.bit_flips += result.bit_flips;
  total.replayed_frames += result.replayed_frames;
  total.skipped_rounds += result.skipped_rounds;
  total.late_rounds += result.late_rounds;
  total.steps_caught_up += result.steps_caught_up;
  total.lost_ranks += result.lost_ranks;
  total.dead_workers += result.dead_workers;
  total.returned_workers += result.returned_workers;
  total.given_up_workers += result.given_up_workers;
  total.job_standstills += result.job_standstills;
  total.worker_standstills += result.worker_standstills;
  total.aggregator_standstills += result.aggregator_standstills;
  total.longest_standstills += result.longest_standstills;
}

class Simulations : public testing::TestWithParam<uint64_t> {};

INSTANTIATE_TEST_SUITE_P(From, Simulations, testing::ValuesIn(FirstSeeds()),
                         testing::PrintToStringParamName());

TEST_P(Simulations, HoldTheInvariants) {
  const uint64_t end = std::min(flags.first + flags.seeds, GetParam() + kSeedsOfATest);
  SimulationResult total;
  for (uint64_t seed = GetParam(); seed < end; ++seed) {
    const Digests expected = Undisturbed(seed);
    std::vector<SimulationResult> results = {Simulate(seed, expected)};
    if (seed % 4 == 0) results.push_back(SimulateResumed(seed, expected));
    for (const SimulationResult& result : results) {
      if (!result.violations.empty()) {
        Print(result, seed);
        FAIL();
      }
      Add(result, total);
    }
  }
  std::printf(
      "%ju kills, %ju of them with a bit flipped, %ju kills while saving, %ju of all without a "
      "dead worker, %ju stops, %ju frames replayed, %ju rounds skipped, %ju times late, %ju steps "
      "caught up, %ju ranks lost, %ju "
      "workers dead, %ju come back, %ju give up; %ju times the job stands still, %ju times a "
      "worker "
      "does, %ju times an aggregator, %ju of both for very long\n",
      uintmax_t{total.kills}, uintmax_t{total.bit_flips}, uintmax_t{total.kills_while_saving},
      uintmax_t{total.kills_without_the_dead}, uintmax_t{total.stops},
      uintmax_t{total.replayed_frames}, uintmax_t{total.skipped_rounds},
      uintmax_t{total.late_rounds}, uintmax_t{total.steps_caught_up}, uintmax_t{total.lost_ranks},
      uintmax_t{total.dead_workers}, uintmax_t{total.returned_workers},
      uintmax_t{total.given_up_workers}, uintmax_t{total.job_standstills},
      uintmax_t{total.worker_standstills}, uintmax_t{total.aggregator_standstills},
      uintmax_t{total.longest_standstills});
  if (end - GetParam() < kSeedsOfATest) return;
  // In so many there is some of everything; of lost ranks not always.
  for (const uint64_t count : {total.kills, total.bit_flips, total.kills_while_saving, total.stops,
                               total.replayed_frames, total.skipped_rounds, total.late_rounds,
                               total.steps_caught_up, total.dead_workers, total.returned_workers}) {
    EXPECT_GT(count, 10) << "a fault is no longer tried";
  }
  for (const uint64_t count :
       {total.kills_without_the_dead, total.given_up_workers, total.job_standstills,
        total.worker_standstills, total.aggregator_standstills}) {
    EXPECT_GT(count, 0) << "a fault is no longer tried";
  }
}

std::string NameOf(const OptimizerOptions& options) {
  if (options.lamb) return "1-bit LAMB";
  return options.zero_one ? "0/1 Adam" : "1-bit Adam";
}

std::string Frozen(const std::string& optimizer, Codec codec) {
  return absl::StrCat(optimizer, " in ", CodecName(codec));
}

std::string WarmUp(const std::string& optimizer, Codec codec) {
  return absl::StrCat(optimizer, " after ", CodecName(codec));
}

std::string UpToDate(const std::string& optimizer, Codec codec) {
  return absl::StrCat(optimizer, " with variances from ", CodecName(codec));
}

TEST(Simulation, SendsWithEachOptimizerInEachCodec) {
  std::set<std::string> missing;
  for (const Codec codec : {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT, CUSTOM}) {
    for (const char* optimizer : {"1-bit Adam", "1-bit LAMB", "0/1 Adam"}) {
      missing.insert(Frozen(optimizer, codec));
      missing.insert(UpToDate(optimizer, codec));
    }
    for (const char* optimizer : {"1-bit Adam", "1-bit LAMB"}) {
      missing.insert(WarmUp(optimizer, codec));
    }
  }
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const OptimizerOptions options = OptimizerOf(seed);
    const std::string name = NameOf(options);
    const bool may_help = missing.contains(Frozen(name, options.codec)) ||
                          missing.contains(WarmUp(name, options.warm_up_codec)) ||
                          missing.contains(UpToDate(name, options.variance_codec));
    if (!may_help) continue;
    // What was drawn need not travel: the freeze step may be behind the last one.
    const AnsweredCodecs answered = AnsweredCodecsOf(seed);
    for (const Codec codec : answered.frozen) missing.erase(Frozen(name, codec));
    for (const Codec codec : answered.warm_up) missing.erase(WarmUp(name, codec));
    for (const Codec codec : answered.variance) missing.erase(UpToDate(name, codec));
  }
  EXPECT_THAT(missing, testing::IsEmpty());
}

TEST(Simulation, FindsThePlantedBug) {
  if (flags.without_bug.empty() && flags.finds.empty()) return;
  for (uint64_t seed = flags.first; seed < flags.first + flags.seeds; ++seed) {
    const Digests expected =
        flags.without_bug.empty() ? Undisturbed(seed) : ExpectedWithoutBug(seed);
    // With the bug the job that nothing fails in may not come to its first step's end.
    ASSERT_TRUE(!expected.empty() || flags.without_bug.empty()) << flags.without_bug;
    const SimulationResult result = Simulate(seed, expected);
    if (result.violations.empty()) continue;
    Print(result, seed);
    EXPECT_THAT(result.violations.front(), testing::HasSubstr(flags.finds));
    return;
  }
  FAIL() << "no seed found it";
}

}  // namespace
}  // namespace signpost::simulation

int main(int argc, char** argv) {
  // Tasks hold mutexes while others run in the same thread, which is none of their orders.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  for (int i = 1; i < argc; ++i) signpost::simulation::Parse(argv[i]);
  if (!signpost::simulation::flags.write_expected.empty()) {
    return signpost::simulation::WriteExpected();
  }
  testing::InitGoogleTest(&argc, argv);  // when there are as many tests as the flags say
  return RUN_ALL_TESTS();
}
