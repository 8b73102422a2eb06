#include "cli/launcher.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// What a rank does that waits until it is stopped.
constexpr char kWait[] = "exec tail -f /dev/null";

// The same in a shell that has traps to run. It would report each killed child to standard error.
constexpr char kWaitForTraps[] = "exec 2>/dev/null; while :; do tail -f /dev/null & wait $!; done";

// Runs shell scripts as ranks, beside aggregators that claim to listen on "fake:I/N".
class LaunchTest : public ::testing::Test {
 protected:
  LaunchTest() {
    options_.aggregator_command = {
        "sh", "-c", "echo listening on fake:${2#--shard=}; exec tail -f /dev/null", "fake"};
    options_.on_failure = [this](const std::string& what) { restarts_.push_back(what); };
    options_.on_line = [this](const OutputLine& line) {
      const char* const roles[] = {"aggregator", "node", "rank"};
      output_[{roles[static_cast<int>(line.role)], line.index}].emplace_back(line.text);
    };
  }

  LaunchResult RunScript(const std::string& script) {
    options_.command = {"sh", "-c", script};
    return Launch(options_);
  }

  std::vector<std::string>& OutputOfRank(uint32_t rank) { return output_[{"rank", rank}]; }

  LaunchOptions options_;
  std::vector<std::string> restarts_;
  std::map<std::pair<std::string, uint32_t>, std::vector<std::string>> output_;
};

TEST_F(LaunchTest, TellsEachRankWhoItIsAndWhereTheShardsAre) {
  options_.workers = 2;
  options_.aggregators = 3;
  const LaunchResult result =
      RunScript("echo $SIGNPOST_RANK/$SIGNPOST_WORLD_SIZE $SIGNPOST_AGGREGATORS");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.explanation, "");
  EXPECT_THAT(OutputOfRank(0), ElementsAre("0/2 fake:0/3,fake:1/3,fake:2/3"));
  EXPECT_THAT(OutputOfRank(1), ElementsAre("1/2 fake:0/3,fake:1/3,fake:2/3"));
}

TEST_F(LaunchTest, TellsEachRankWhatTorchrunWould) {
  options_.workers = 2;
  RunScript("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT");
  EXPECT_THAT(OutputOfRank(0), ElementsAre(ContainsRegex("^0 0 2 2 127.0.0.1 [1-9][0-9]*$")));
  EXPECT_EQ(OutputOfRank(1)[0].substr(0, 7), "1 1 2 2");
  EXPECT_EQ(OutputOfRank(1)[0].substr(7), OutputOfRank(0)[0].substr(7));
}

TEST_F(LaunchTest, TellsRanksAndAggregatorsTheFailureTimeout) {
  options_.failure_timeout = *FailureTimeout::Of(absl::Milliseconds(1500));
  options_.aggregator_command = {"sh", "-c", "echo listening on fake:$*; exec tail -f /dev/null",
                                 "fake"};
  RunScript("echo $SIGNPOST_FAILURE_TIMEOUT $SIGNPOST_AGGREGATORS");
  EXPECT_THAT(OutputOfRank(0),
              ElementsAre(AllOf(StartsWith("1.5s "), HasSubstr("--failure-timeout=1.5s"))));
}

TEST_F(LaunchTest, OverridesTheEnvironmentOfALaunchAroundIt) {
  setenv("SIGNPOST_RANK", "17", /*overwrite=*/1);
  RunScript("env | grep ^SIGNPOST_RANK=");
  unsetenv("SIGNPOST_RANK");
  EXPECT_THAT(OutputOfRank(0), ElementsAre("SIGNPOST_RANK=0"));
}

TEST_F(LaunchTest, HasGlibcKeepMemoryUnlessToldOtherwise) {
  const std::string script = "echo $MALLOC_MMAP_THRESHOLD_ $MALLOC_TRIM_THRESHOLD_";
  RunScript(script);
  setenv("MALLOC_TRIM_THRESHOLD_", "1000", /*overwrite=*/1);
  RunScript(script);
  unsetenv("MALLOC_TRIM_THRESHOLD_");
  EXPECT_THAT(OutputOfRank(0), ElementsAre("33554432 2147483647", "33554432 1000"));
}

TEST_F(LaunchTest, SharesTheProcessorsAmongRanksUnlessToldOtherwise) {
  unsetenv("OMP_NUM_THREADS");
  const std::string script = "echo ${OMP_NUM_THREADS:-none}";
  const auto says = [&](uint32_t workers) {
    options_.workers = workers;
    RunScript(script);
    return OutputOfRank(0).back();
  };
  cpu_set_t processors;
  ASSERT_EQ(sched_getaffinity(0, sizeof processors, &processors), 0);
  const uint32_t all = CPU_COUNT(&processors);
  EXPECT_EQ(says(1), "none");
  EXPECT_EQ(says(2), absl::StrCat(std::max(all / 2, 1u)));
  EXPECT_EQ(says(all + 1), "1");
  setenv("OMP_NUM_THREADS", "3", /*overwrite=*/1);
  EXPECT_EQ(says(2), "3");
  unsetenv("OMP_NUM_THREADS");
}

TEST_F(LaunchTest, NamesTheSameJobToAllRanksAndAnotherOneNextTime) {
  options_.workers = 2;
  RunScript("echo $SIGNPOST_JOB");
  const std::string first = OutputOfRank(0)[0];
  EXPECT_THAT(OutputOfRank(1), ElementsAre(first));
  RunScript("echo $SIGNPOST_JOB");
  EXPECT_THAT(OutputOfRank(0), ElementsAre(first, Not(first)));
}

TEST_F(LaunchTest, DeliversWhatIsWrittenRightBeforeTheEnd) {
  RunScript("printf 'a\\nb' >&2; printf 'no newline'");
  EXPECT_THAT(OutputOfRank(0), testing::UnorderedElementsAre("a", "b", "no newline"));
}

TEST_F(LaunchTest, DeliversMoreThanAPipeHolds) {
  RunScript("seq 100000");
  ASSERT_EQ(OutputOfRank(0).size(), 100000u);
  EXPECT_EQ(OutputOfRank(0).back(), "100000");
}

TEST_F(LaunchTest, GivesRanksNoInput) { EXPECT_EQ(RunScript("! read line").exit_code, 0); }

TEST_F(LaunchTest, StopsTheOthersAndExplainsWhenARankFails) {
  options_.workers = 4;
  const LaunchResult result = RunScript(
      absl::StrCat("[ $SIGNPOST_RANK = 2 ] || ", kWait, "; echo out; echo cause >&2; exit 3"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.explanation,
              StartsWith("rank 2 failed first: exit code 3. Its last lines:\n"));
  EXPECT_THAT(result.explanation, HasSubstr("\n[rank 2] out"));
  EXPECT_THAT(result.explanation, HasSubstr("\n[rank 2] cause"));
}

// A rank that leaves its job because it fails, and ends after those that hear of it.
TEST_F(LaunchTest, ExplainsTheFailureThatEndedOthersWithTryAgain) {
  options_.workers = 3;
  options_.time_to_leave = absl::Minutes(5);
  const std::string fifo = testing::TempDir() + "/pid";
  const std::string told =
      absl::StrCat("case $SIGNPOST_RANK in 0) mkfifo ", fifo, "; read pid < ", fifo,
                   "; while kill -0 $pid; do :; done; exit $CODE;; "
                   "1) until test -p ",
                   fifo, "; do :; done; echo $$ > ", fifo, "; exit 75;; 2) ");
  const auto run = [&](const std::string& code, const std::string& rank2) {
    std::filesystem::remove(fifo);
    return RunScript(absl::StrCat("CODE=", code, "; ", told, rank2, ";; esac"));
  };
  const LaunchResult failed = run("64", kWait);
  EXPECT_EQ(failed.exit_code, 64);
  EXPECT_THAT(failed.explanation, StartsWith("rank 0 failed first: exit code 64"));

  // None has another reason, or none in time.
  const LaunchResult all_ended = run("0", "exit 0");
  EXPECT_EQ(all_ended.exit_code, 75);
  EXPECT_THAT(all_ended.explanation, StartsWith("rank 1 failed first: exit code 75"));
  options_.time_to_leave = absl::Milliseconds(1);
  const LaunchResult late = run("0", kWait);
  EXPECT_EQ(late.exit_code, 75);
  EXPECT_THAT(late.explanation, StartsWith("rank 1 failed first: exit code 75"));
}

TEST_F(LaunchTest, ShowsTheLastTwentyLinesOnly) {
  const LaunchResult result = RunScript("seq 101 130; exit 1");
  EXPECT_THAT(result.explanation, Not(HasSubstr("110")));
  EXPECT_THAT(result.explanation, HasSubstr("Its last lines:\n[rank 0] 111\n"));
  EXPECT_THAT(result.explanation, testing::EndsWith("[rank 0] 130"));
}

TEST_F(LaunchTest, NamesTheSignalThatKilledARank) {
  const LaunchResult result = RunScript("kill -SEGV $$");
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_EQ(result.explanation, "rank 0 failed first: killed by SIGSEGV. It wrote nothing.");
}

TEST_F(LaunchTest, SaysWhichCommandItCannotRun) {
  options_.command = {"signpost-no-such-command"};
  const LaunchResult result = Launch(options_);
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.explanation,
              HasSubstr("cannot run 'signpost-no-such-command': No such file or directory"));
}

TEST_F(LaunchTest, FailsWhenAnAggregatorEnds) {
  options_.aggregator_command = {"sh", "-c", "echo listening on fake:1; echo why >&2; exit 5"};
  const LaunchResult result = RunScript(kWait);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.explanation, StartsWith("aggregator 0 failed first: exit code 5"));
  EXPECT_THAT(result.explanation, HasSubstr("[aggregator 0] why"));
}

// Aggregators that leave their process number in their state directory, and run `revived` when they
// find one there.
class RestartTest : public LaunchTest {
 protected:
  RestartTest() {
    std::string directory = testing::TempDir() + "/state-XXXXXX";
    EXPECT_NE(mkdtemp(directory.data()), nullptr);
    options_.state_dir = directory;
  }

  // In a rank's script.
  std::string StateOfShard(int shard) const {
    return absl::StrCat(options_.state_dir, "/$SIGNPOST_JOB/shard-", shard);
  }

  void ExpectStateIsLeft(const LaunchResult& result) const {
    const size_t left = result.explanation.rfind(options_.state_dir);
    ASSERT_NE(left, std::string::npos) << result.explanation;
    EXPECT_TRUE(std::filesystem::exists(result.explanation.substr(left)));
  }

  void SetRevived(const std::string& revived) {
    options_.aggregator_command = {
        "sh", "-c",
        absl::StrCat(
            "listen=$1 shard=$2 dir=${5#--state-dir=}; "
            "if [ ! -d $dir ]; then"
            "  mkdir -p $dir; mkfifo $dir/revived; echo $$ >$dir/pid; echo listening on fake:7;"
            "else ",
            revived, "; fi; exec tail -f /dev/null"),
        "fake"};
  }
};

TEST_F(RestartTest, StartsAnAggregatorAgainAtItsAddressWhileRanksRun) {
  SetRevived("echo listening on fake:7; echo $listen $shard >$dir/revived");
  options_.aggregators = 2;
  const std::string dir = StateOfShard(1);
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", dir, "/pid); cat ", dir, "/revived"));
  EXPECT_EQ(result.exit_code, 0) << result.explanation;
  EXPECT_THAT(OutputOfRank(0), ElementsAre("--listen=fake:7 --shard=1/2"));
  EXPECT_THAT(restarts_,
              ElementsAre("aggregator 1 failed: killed by SIGKILL; started again (restart 1)"));
}

TEST_F(RestartTest, EachRunHasAStateOfItsOwnThatGoesWithIt) {
  SetRevived("exit 5");
  const std::string killed = options_.state_dir + "/run-of-another";
  std::filesystem::create_directory(killed);
  for (int run = 0; run < 2; ++run) {
    const LaunchResult result = RunScript(absl::StrCat("cat ", StateOfShard(0), "/pid"));
    EXPECT_EQ(result.exit_code, 0) << result.explanation;
  }
  using Directory = std::filesystem::directory_iterator;
  EXPECT_EQ(std::distance(Directory(options_.state_dir), Directory()), 1);
  EXPECT_TRUE(std::filesystem::exists(killed));
}

TEST_F(RestartTest, AFileForAggregatorsElsewhereIsForNoneOfTheRuns) {
  SetRevived("echo listening on fake:7; echo config=$SIGNPOST_CONFIG >$dir/revived");
  const std::string dir = StateOfShard(0);
  setenv("SIGNPOST_CONFIG", "elsewhere.yaml", 1);
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", dir, "/pid); cat ", dir, "/revived"));
  unsetenv("SIGNPOST_CONFIG");
  EXPECT_EQ(result.exit_code, 0) << result.explanation;
  EXPECT_THAT(OutputOfRank(0), ElementsAre("config="));
}

TEST_F(RestartTest, FailsWhenAnAggregatorKeepsEnding) {
  SetRevived("echo why >&2; exit 5");
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", StateOfShard(0), "/pid); ", kWait));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.explanation, StartsWith("aggregator 0 failed first: exit code 5"));
  EXPECT_THAT(result.explanation, HasSubstr("[aggregator 0] why"));
  ASSERT_EQ(restarts_.size(), 10u);
  EXPECT_EQ(restarts_[9], "aggregator 0 failed: exit code 5; started again (restart 10)");
  ExpectStateIsLeft(result);
}

TEST_F(RestartTest, FailsWhenAnAggregatorComesBackElsewhere) {
  SetRevived("echo listening on fake:8");
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", StateOfShard(0), "/pid); ", kWait));
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.explanation, HasSubstr("fake:8"));
  ExpectStateIsLeft(result);
}

TEST_F(RestartTest, FailsWhenAnAggregatorDoesNotComeBackInTime) {
  SetRevived("exec tail -f /dev/null");
  options_.aggregator_start_timeout = absl::Seconds(2);  // the first start has to meet it
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", StateOfShard(0), "/pid); ", kWait));
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.explanation, HasSubstr("the aggregators did not come up within 2s"));
  ExpectStateIsLeft(result);
}

TEST_F(RestartTest, FailsWhenANodesAggregatorDoesNotComeBackInTime) {
  SetRevived(kWait);
  options_.aggregator_start_timeout = absl::Seconds(2);
  options_.per_node = 1;
  options_.node_command = {"sh", "-c", absl::StrCat("echo listening on x; ", kWait)};
  const LaunchResult result =
      RunScript(absl::StrCat("kill -KILL $(cat ", StateOfShard(0), "/pid); ", kWait));
  EXPECT_THAT(result.explanation, HasSubstr("the aggregators did not come up within 2s"));
  ExpectStateIsLeft(result);
}

TEST_F(RestartTest, FailsWhenAnAggregatorNeverCameUp) {
  options_.aggregator_command = {"sh", "-c", "exit 5"};
  const LaunchResult result = RunScript("echo started");
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.explanation, Not(HasSubstr("is left in")));  // it made none
  EXPECT_THAT(restarts_, IsEmpty());
}

TEST_F(LaunchTest, FailsWhenAnAggregatorSaysNothing) {
  options_.aggregator_command = {"sh", "-c", kWait};
  options_.aggregator_start_timeout = absl::Milliseconds(1);
  const LaunchResult result = RunScript("echo started");
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.explanation, HasSubstr("did not come up within 1ms"));
  EXPECT_THAT(OutputOfRank(0), IsEmpty());
}

TEST_F(LaunchTest, FailsWhenAnAggregatorSaysSomethingElse) {
  options_.aggregator_command = {"sh", "-c", absl::StrCat("echo hello; ", kWait)};
  const LaunchResult result = RunScript("echo started");
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.explanation, HasSubstr("aggregator 0 began with 'hello'"));
}

TEST_F(LaunchTest, StopsAtTheTimeoutAndNamesTheRanksThatStillRan) {
  options_.workers = 2;
  options_.timeout = absl::Milliseconds(300);
  const LaunchResult result = RunScript(absl::StrCat("[ $SIGNPOST_RANK = 0 ] && exit 0; ", kWait));
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.explanation, HasSubstr("stopped after 300ms"));
  EXPECT_THAT(result.explanation, HasSubstr("rank 1"));
}

TEST_F(LaunchTest, LetsRanksFinishWhenInterrupted) {
  options_.workers = 2;
  // Rank 1 interrupts the launch, its parent.
  const LaunchResult result = RunScript(absl::StrCat(
      "trap 'echo drained; exit 0' TERM; echo ready; [ $SIGNPOST_RANK = 1 ] && kill -INT $PPID; ",
      kWaitForTraps));
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.explanation, HasSubstr("interrupted"));
  EXPECT_THAT(OutputOfRank(1), ElementsAre("ready", "drained"));
}

TEST_F(LaunchTest, KillsAtTheSecondInterrupt) {
  options_.grace = absl::InfiniteDuration();
  const LaunchResult result =
      RunScript(absl::StrCat("trap 'kill -INT $PPID' TERM; kill -INT $PPID; ", kWaitForTraps));
  EXPECT_EQ(result.exit_code, 75);
}

TEST_F(LaunchTest, KillsRanksThatDoNotEndInTime) {
  options_.grace = absl::Milliseconds(1);
  const LaunchResult result =
      RunScript("trap '' TERM; kill -TERM $PPID; while :; do tail -f /dev/null; done");
  EXPECT_EQ(result.exit_code, 75);
}

TEST_F(LaunchTest, CountsNoTimeInWhichItStoodStillItself) {
  options_.grace = absl::Seconds(5);
  // Its ranks may have stood still too.
  RunScript(
      absl::StrCat("trap 'kill -STOP $PPID; sleep 8; kill -CONT $PPID; sleep 1; echo saved; "
                   "exit 0' TERM; kill -INT $PPID; ",
                   kWaitForTraps));
  EXPECT_THAT(OutputOfRank(0), ElementsAre("saved"));
}

TEST_F(LaunchTest, StopsAggregatorsOnlyAfterTheRanksHaveEnded) {
  options_.aggregator_command = {
      "sh", "-c",
      absl::StrCat("trap 'echo stopped; exit 0' TERM; echo listening on fake:1; ", kWaitForTraps)};
  std::vector<std::string> order;
  options_.on_line = [&](const OutputLine& line) { order.emplace_back(line.text); };
  RunScript(absl::StrCat("trap 'echo drained; exit 0' TERM; kill -INT $PPID; ", kWaitForTraps));
  EXPECT_THAT(order, ElementsAre("drained", "stopped"));
}

// Of a process that is gone and waited for, not even a zombie is left.
bool IsGone(const std::string& pid_line) {
  pid_t pid = 0;
  EXPECT_TRUE(absl::SimpleAtoi(pid_line, &pid)) << pid_line;
  return kill(pid, 0) == -1 && errno == ESRCH;
}

TEST_F(LaunchTest, LeavesNoChildOfARankBehind) {
  EXPECT_EQ(RunScript("tail -f /dev/null & echo $!").exit_code, 0);
  ASSERT_EQ(OutputOfRank(0).size(), 1u);
  EXPECT_TRUE(IsGone(OutputOfRank(0)[0]));
}

TEST_F(LaunchTest, LeavesNotEvenADaemonBehind) {
  // The rank ends once the daemon is there: a fifo says so.
  const LaunchResult result = RunScript(
      "mkfifo $TEST_TMPDIR/started;"
      "setsid sh -c 'echo $$ > $TEST_TMPDIR/started; exec tail -f /dev/null' &"
      "read pid < $TEST_TMPDIR/started; echo $pid");
  EXPECT_EQ(result.exit_code, 0);
  ASSERT_EQ(OutputOfRank(0).size(), 1u);
  EXPECT_TRUE(IsGone(OutputOfRank(0)[0]));
}

TEST_F(LaunchTest, GoesOnWithoutRanksThatFailWhileEnoughAreLeft) {
  options_.workers = 3;
  options_.round_deadline = absl::Milliseconds(1500);
  options_.min_workers = 2;
  const LaunchResult survived = RunScript(
      "test $SIGNPOST_MIN_WORKERS/$SIGNPOST_ROUND_DEADLINE = 2/1.5s || exit 9; "
      "test $SIGNPOST_RANK != 1 || exit 5; sleep 1");
  EXPECT_EQ(survived.exit_code, 0) << survived.explanation;
  ASSERT_EQ(restarts_.size(), 1);
  EXPECT_THAT(restarts_[0],
              AllOf(StartsWith("rank 1 failed"), HasSubstr("the others go on without it")));

  // The last to end may be the one that fails.
  EXPECT_EQ(RunScript("test $SIGNPOST_RANK != 1 || { sleep 1; exit 5; }").exit_code, 0);
  ASSERT_EQ(restarts_.size(), 2);
  EXPECT_THAT(restarts_[1], HasSubstr("the others have finished"));

  const LaunchResult failed = RunScript(std::string("test $SIGNPOST_RANK = 0 || exit 5; ") + kWait);
  EXPECT_EQ(failed.exit_code, 5);
}

TEST_F(LaunchTest, StartsARankThatFailsAgain) {
  options_.workers = 3;
  options_.round_deadline = absl::Seconds(1);
  options_.min_workers = 2;
  options_.worker_restarts = 2;
  const std::string marks = testing::TempDir() + "/rank1.";
  const LaunchResult survived =
      RunScript(absl::StrCat("test $SIGNPOST_RANK = 1 || { sleep 1; exit 0; }; "
                             "for i in 1 2; do test -e ",
                             marks, "$i || { touch ", marks, "$i; exit 5; }; done"));
  EXPECT_EQ(survived.exit_code, 0) << survived.explanation;
  ASSERT_EQ(restarts_.size(), 2);
  EXPECT_THAT(restarts_[1],
              AllOf(StartsWith("rank 1 failed"), HasSubstr("started again (restart 2)")));

  restarts_.clear();
  EXPECT_EQ(RunScript("test $SIGNPOST_RANK != 1 || exit 5; sleep 1").exit_code, 0);
  ASSERT_EQ(restarts_.size(), 3);
  EXPECT_THAT(restarts_[2], HasSubstr("the others go on without it"));
}

TEST_F(LaunchTest, StopsARankThatWasStartedAgainTooLate) {
  options_.workers = 3;
  options_.round_deadline = absl::Seconds(1);
  options_.min_workers = 2;
  options_.worker_restarts = 1;
  options_.grace = absl::Milliseconds(500);
  const std::string mark = testing::TempDir() + "/late";
  const LaunchResult result =
      RunScript(absl::StrCat("test $SIGNPOST_RANK = 1 || { sleep 1; exit 0; }; "
                             "test -e ",
                             mark, " || { touch ", mark, "; exit 5; }; ", kWait));
  EXPECT_EQ(result.exit_code, 0) << result.explanation;
  ASSERT_EQ(restarts_.size(), 2);
  EXPECT_EQ(restarts_[1],
            "rank 1 was stopped: it was started again, but the others had finished 500ms ago, and "
            "the job with them");
}

// Nodes' workers are scripts too.
class NodeLaunchTest : public LaunchTest {
 protected:
  NodeLaunchTest() {
    options_.workers = 4;
    options_.per_node = 2;
    options_.node_command = {
        "sh", "-c",
        // In one write: behind the first line, ranks may have ended before the second.
        absl::StrCat("trap 'echo stopped; exit 0' TERM; "
                     "printf 'listening on %s\\n%s %s %s\\n' ${1#--listen=} "
                     "$SIGNPOST_RANK/$SIGNPOST_WORLD_SIZE $2 $SIGNPOST_AGGREGATORS; ",
                     kWaitForTraps),
        "fake"};
  }
};

TEST_F(NodeLaunchTest, TellsRanksTheirNodesWorkerAndThatWhoItIs) {
  const LaunchResult result = RunScript("echo $SIGNPOST_RANK/$SIGNPOST_WORLD_SIZE $SIGNPOST_NODE");
  EXPECT_EQ(result.exit_code, 0) << result.explanation;
  for (uint32_t node = 0; node < 2; ++node) {
    const std::vector<std::string>& lines = output_[{"node", node}];
    EXPECT_THAT(lines, ElementsAre(absl::StrCat(node, "/2 --processes=2 fake:0/1"), "stopped"));
    for (const uint32_t rank : {2 * node, 2 * node + 1}) {
      EXPECT_THAT(OutputOfRank(rank),
                  ElementsAre(AllOf(StartsWith(absl::StrCat(rank, "/4 unix:/")),
                                    testing::EndsWith(absl::StrCat("/", node)))));
    }
  }
}

TEST_F(NodeLaunchTest, TellsNodesTheirGpu) {
  options_.node_gpu = 3;
  options_.node_command = {"sh", "-c", "echo listening on x; echo $@; exit 3", "fake"};
  EXPECT_EQ(RunScript(kWait).exit_code, 3);
  const std::vector<std::string> of_both = {
      output_[{"node", 0}].empty() ? "" : output_[{"node", 0}][0],
      output_[{"node", 1}].empty() ? "" : output_[{"node", 1}][0]};
  // The first to end may end the other before it says so.
  EXPECT_THAT(of_both, testing::Contains(testing::EndsWith("--processes=2 --gpu=3")));
}

TEST_F(NodeLaunchTest, StopsNodesAfterTheRanksAndAggregatorsAfterThose) {
  options_.aggregator_command = {
      "sh", "-c",
      absl::StrCat("trap 'echo the last; exit 0' TERM; echo listening on fake:1; ", kWaitForTraps)};
  std::vector<std::string> order;
  options_.on_line = [&](const OutputLine& line) {
    if (!absl::StrContains(line.text, "--processes")) order.emplace_back(line.text);
  };
  options_.workers = 2;
  RunScript("echo done");
  EXPECT_THAT(order, ElementsAre("done", "done", "stopped", "the last"));
}

TEST_F(NodeLaunchTest, StartsRanksThatFailAgain) {
  options_.worker_restarts = 1;
  const std::string mark = testing::TempDir() + "/failed.";
  // None ends before all have failed.
  const LaunchResult survived = RunScript(absl::StrCat(
      "test -e ", mark, "$SIGNPOST_RANK || { touch ", mark, "$SIGNPOST_RANK; exit 5; }; ",
      "until test $(ls ", mark, "* | wc -l) = 4; do sleep 0.01; done"));
  EXPECT_EQ(survived.exit_code, 0) << survived.explanation;
  EXPECT_EQ(restarts_.size(), 4);
  const LaunchResult failed = RunScript("exit 5");
  EXPECT_EQ(failed.exit_code, 5);
}

TEST_F(NodeLaunchTest, StopsWhenANodesWorkerEnds) {
  options_.node_command = {"sh", "-c", "echo listening on x; exit 3"};
  const LaunchResult result = RunScript(kWait);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.explanation, ContainsRegex("node [01] failed first: exit code 3"));
  options_.node_command = {"sh", "-c", "echo no; exit 3"};
  EXPECT_THAT(RunScript(kWait).explanation, HasSubstr("instead of 'listening on unix:PATH'"));
}

TEST(PrintFailure, WritesOneLineToStandardError) {
  testing::internal::CaptureStderr();
  PrintFailure("aggregator 1 failed");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "signpost: aggregator 1 failed\n");
}

TEST(PrintPrefixed, NamesTheRankAndKeepsTheStreamsApart) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  PrintPrefixed({.index = 2, .text = "loss 2.3"});
  PrintPrefixed({.index = 3, .is_error = true, .text = "oops"});
  PrintPrefixed({.role = Role::kAggregator, .index = 1, .text = "note"});
  PrintPrefixed({.role = Role::kNode, .index = 0, .text = "line"});
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "[rank 2] loss 2.3\n");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[rank 3] oops\n[aggregator 1] note\n[node 0] line\n");
}

}  // namespace
}  // namespace signpost::cli
