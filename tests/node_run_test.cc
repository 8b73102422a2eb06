// Nodes' workers and their processes as `signpost run --per-node` starts them, and as they die.

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int exit_code = 0;
  std::string output;

  // The checksums with which ranks said that they end.
  std::multiset<std::string> digests() const {
    std::multiset<std::string> found;
    for (const absl::string_view line : absl::StrSplit(output, '\n')) {
      const size_t at = line.find("done: parameters ");
      if (at != absl::string_view::npos) found.emplace(line.substr(at + 17));
    }
    return found;
  }
};

// tests/node_rank.cc in a run with these flags, and variables in its environment.
Outcome RunRanks(const std::string& flags, const std::string& variables = "") {
  char directory[] = "/tmp/node_run_test.XXXXXX";
  Outcome outcome;
  FILE* const stream =
      popen(absl::StrCat("env NODE_RANK_MARKS=", mkdtemp(directory), " ", variables,
                         " cli/signpost run ", flags, " --aggregators 2 -- tests/node_rank 2>&1")
                .c_str(),
            "r");
  for (int byte; (byte = fgetc(stream)) != EOF;) outcome.output.push_back(static_cast<char>(byte));
  outcome.exit_code = WEXITSTATUS(pclose(stream));
  std::filesystem::remove_all(directory);
  return outcome;
}

std::string UndisturbedDigest() {
  static const std::string digest = [] {
    const Outcome outcome = RunRanks("-n 4 --per-node 2");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    const std::multiset<std::string> digests = outcome.digests();
    EXPECT_EQ(digests.size(), 4u) << outcome.output;
    return digests.empty() ? "none" : *digests.begin();
  }();
  return digest;
}

void ExpectUndisturbedEnd(const Outcome& outcome) {
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string digest = UndisturbedDigest();
  EXPECT_EQ(outcome.digests(), (std::multiset<std::string>{digest, digest, digest, digest}))
      << outcome.output;
}

TEST(NodeRun, StartsAgainWhoDiesAndWhoEndsBecauseOfItAndEndsWithTheSameBits) {
  struct Death {
    int rank, after_steps;
  };
  for (const Death death : {Death{1, 0}, Death{0, 13}, Death{3, 29}}) {
    const Outcome outcome =
        RunRanks("-n 4 --per-node 2 --worker-restarts 1",
                 absl::StrCat("NODE_RANK_DIES=", death.rank, "@", death.after_steps, ",before"));
    ExpectUndisturbedEnd(outcome);
    EXPECT_THAT(outcome.output,
                ContainsRegex(absl::StrCat("\\[node ", death.rank / 2, "\\] [^\n]*local rank ",
                                           death.rank % 2, " \\(process [0-9]+\\) is gone after ",
                                           death.after_steps, " steps")));
    EXPECT_THAT(outcome.output, ContainsRegex("failed: killed by SIGKILL; started again"));
    EXPECT_THAT(outcome.output, ContainsRegex("told: local rank [01] \\(process [0-9]+\\) of job"));
  }
}

TEST(NodeRun, EndsWithTheSameBitsWhenAProcessDiesWhileTheExchangeIsUnderWay) {
  const Outcome outcome =
      RunRanks("-n 4 --per-node 2 --worker-restarts 1", "NODE_RANK_DIES=1@11,during");
  ExpectUndisturbedEnd(outcome);
  // The step has been taken.
  EXPECT_THAT(outcome.output, HasSubstr("back at step 12"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("back at step 11")));
}

// It would wait for its place, and others for it, for as long as their timeouts are.
TEST(NodeRun, StartsAgainWhoDiesAndLeavesAChild) {
  const Outcome outcome = RunRanks("-n 4 --per-node 2 --worker-restarts 1",
                                   "NODE_RANK_FORKS=1 NODE_RANK_DIES=1@11,before");
  ExpectUndisturbedEnd(outcome);
  EXPECT_THAT(outcome.output, ContainsRegex("local rank 1 \\(process [0-9]+\\) is gone after 11"));
}

TEST(NodeRun, LetsProcessesThatLiveOnAttachAgain) {
  for (const char* death : {"0@9,before", "1@20,during"}) {
    const Outcome outcome = RunRanks("-n 4 --per-node 2 --worker-restarts 1",
                                     absl::StrCat("NODE_RANK_STAYS=1 NODE_RANK_DIES=", death));
    ExpectUndisturbedEnd(outcome);
    EXPECT_THAT(outcome.output, Not(HasSubstr("restart 2")));
  }
}

TEST(NodeRun, KeepsProcessesThatComputeForLongerThanTheFailureTimeout) {
  // gRPC pings once a second at most.
  ExpectUndisturbedEnd(
      RunRanks("-n 4 --per-node 2 --failure-timeout 500ms", "NODE_RANK_COMPUTES=4s"));
}

TEST(NodeRun, EndsTheRunWhenARankDiesIfItIsNotToBeStartedAgain) {
  const Outcome outcome = RunRanks("-n 4 --per-node 2", "NODE_RANK_DIES=2@5,before");
  // The kernel closes a process's connections before its parent hears of its end: who was told may
  // end first. All others are killed at once, so that a node may miss who was first.
  EXPECT_THAT(outcome.exit_code, ::testing::AnyOf(128 + 9, 1)) << outcome.output;
  EXPECT_THAT(outcome.output, ContainsRegex("rank [23] failed first"));
}

TEST(NodeRun, EndsTheRunWhenANodesWorkerIsKilledWhateverItsRanksSay) {
  const Outcome outcome =
      RunRanks("-n 4 --per-node 2 --worker-restarts 1 --grace 1s", "NODE_RANK_SIGNALS=1@5,9");
  // As above, its ranks may be told before; started again, they find no worker.
  EXPECT_EQ(outcome.exit_code, 128 + 9) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("node 0 failed first: killed by SIGKILL"));
}

TEST(NodeRun, EndsTheRunWhenANodesWorkerHangs) {
  const Outcome outcome = RunRanks("-n 4 --per-node 2 --failure-timeout 1s --grace 1s",
                                   absl::StrCat("NODE_RANK_SIGNALS=1@5,", SIGSTOP));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, ContainsRegex("rank [01] failed first"));
  EXPECT_THAT(outcome.output,
              ContainsRegex("told: the worker of this node, at unix:[^ ]*, is gone, and what it "
                            "had of the job with it"));
}

TEST(NodeRun, RefusesNodesThatAreNotEqual) {
  const Outcome outcome = RunRanks("-n 4 --per-node 3");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--per-node is 3, which does not divide the 4 ranks"));
}

}  // namespace
}  // namespace signpost::testing
