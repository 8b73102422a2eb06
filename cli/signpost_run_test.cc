// The program as its user has it, in what trains: `run` and `chaos`, and the workers of the demo.

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/started_program.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Run, ConfiguresItsAggregatorsItselfAndHandsTheFileToRanks) {
  const std::string path = WriteConfig("run: {workers: 2}\naggregator: {listen: nowhere}\n");
  const Outcome outcome =
      RunProgram(absl::StrCat("run --config ", path, " -- sh -c 'echo has $SIGNPOST_CONFIG'"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[rank 0] has " + path + "\n"),
                                    HasSubstr("[rank 1] has " + path + "\n")));
}

TEST(Run, PrefixesWhatRanksWrite) {
  const Outcome outcome =
      RunProgram("run -n 2 --aggregators 2 -- sh -c 'echo hello; echo $SIGNPOST_AGGREGATORS'");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("[rank 0] hello\n"));
  EXPECT_THAT(outcome.output, HasSubstr("[rank 1] hello\n"));
  EXPECT_THAT(outcome.output,
              testing::ContainsRegex("\\[rank 1\\] 127.0.0.1:[0-9]+,127.0.0.1:[0-9]+\n"));
}

TEST(Run, WritesItsTraceToNoFifo) {
  const std::string fifo = testing::TempDir() + "/trace-fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const Outcome outcome = RunProgram(absl::StrCat("run --trace ", fifo, " -- echo started"));
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr(absl::StrCat("the trace cannot be written to ", fifo,
                                           ", which is neither a file nor a link to one")),
                    Not(HasSubstr("started"))));
}

// With a path that is short enough for sockets; it goes with this object.
class ShortDirectory {
 public:
  ShortDirectory() { EXPECT_NE(mkdtemp(path_), nullptr); }
  ~ShortDirectory() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_; }
  bool IsEmpty() const { return std::filesystem::is_empty(path_); }

 private:
  char path_[24] = "/tmp/signpost-XXXXXX";
};

TEST(Run, KeepsItsCertificatesInTmpdirWhereSocketsCanBe) {
  const ShortDirectory place;
  const std::string far = place.path() + "/" + std::string(80, 'x');
  std::filesystem::create_directory(far);
  for (const auto& [tmpdir, expected] : {std::pair(place.path(), place.path()), {far, "/tmp"}}) {
    const Outcome outcome = Started(absl::StrCat("env TMPDIR=", tmpdir, " ", kProgram,
                                                 " run -- sh -c 'echo $SIGNPOST_TLS_DIR'"))
                                .End();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, StartsWith(absl::StrCat("[rank 0] ", expected, "/signpost-run-")));
  }
  const Outcome none =
      Started(absl::StrCat("env TMPDIR=/nowhere ", kProgram, " run -- echo started")).End();
  EXPECT_EQ(none.exit_code, 64);
  EXPECT_THAT(none.output, HasSubstr("/nowhere/signpost-run-XXXXXX: No such file or directory"));
}

TEST(Run, EndsInOrderWhenNobodyReadsItsOutput) {
  for (const char* command : {"run -n 2 -- yes", "chaos -n 2 -- yes"}) {
    const ShortDirectory place;
    const Outcome outcome =
        Started(absl::StrCat("sh -c '{ TMPDIR=", place.path(), " ", kProgram, " ", command,
                             "; echo code $? >&2; } | head -n 1'"))
            .End();
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr("whoever read the output is gone"), HasSubstr("code 75\n")));
    EXPECT_TRUE(place.IsEmpty()) << command;
  }
}

TEST(Run, WritesItsTraceThoughNobodyReadsWhatItSays) {
  const ShortDirectory place;
  const std::string trace = absl::StrCat(place.path(), "/trace.json");
  const Outcome outcome =
      Started(absl::StrCat("sh -c '{ TMPDIR=", place.path(), " ", kProgram, " run --trace ", trace,
                           " -- yes 2>&1; echo code $? >&2; } | head -n 1'"))
          .End();
  EXPECT_THAT(outcome.output, HasSubstr("code 75\n"));
  EXPECT_TRUE(std::filesystem::exists(trace));
}

TEST(Run, TellsRanksTheFailureTimeout) {
  EXPECT_THAT(
      RunProgram("run --failure-timeout 1500ms -- sh -c 'echo $SIGNPOST_FAILURE_TIMEOUT'").output,
      HasSubstr("[rank 0] 1.5s\n"));
}

TEST(Run, EndsWithTheCodeOfTheRankThatFailedFirst) {
  const Outcome outcome = RunProgram(
      "run -n 3 -- sh -c '[ $SIGNPOST_RANK = 1 ] || exec tail -f /dev/null; echo bad; exit 42'");
  EXPECT_EQ(outcome.exit_code, 42);
  EXPECT_THAT(outcome.output,
              HasSubstr("rank 1 failed first: exit code 42. Its last lines:\n[rank 1] bad\n"));
}

TEST(Run, SaysWhichOfTwoFlagsIsMissing) {
  EXPECT_THAT(RunProgram("run -n 4 --round-deadline 0s --min-workers 3 -- true").output,
              HasSubstr("--min-workers needs a --round-deadline above 0s"));
  EXPECT_THAT(RunProgram("k8s render --round-deadline 1s").output,
              HasSubstr("--round-deadline needs --min-workers above 0"));
  EXPECT_THAT(RunProgram("run -n 4 --round-deadline 1s -- true").output,
              HasSubstr("--round-deadline needs --min-workers above 0"));
}

TEST(Run, NeedsACommand) {
  for (const char* arguments : {"run -n 2", "run -n 2 --"}) {
    const Outcome outcome = RunProgram(arguments);
    EXPECT_EQ(outcome.exit_code, 64);
    EXPECT_THAT(outcome.output, HasSubstr("COMMAND is missing"));
  }
  EXPECT_EQ(RunProgram("version -- sh").exit_code, 64);
}

TEST(Run, HandsFlagsBehindTheDashesToTheCommand) {
  EXPECT_THAT(RunProgram("run -- echo --help -n 7 [a,b] -- x").output,
              HasSubstr("[rank 0] --help -n 7 [a,b] -- x\n"));
}

TEST(Run, EndsAtItsTimeoutAndKillsAfterItsGrace) {
  const absl::Time start = absl::Now();
  const Outcome outcome = RunProgram(
      "run --timeout 100ms --grace 1ms -- "
      "sh -c 'trap \"\" TERM; while :; do tail -f /dev/null; done'");
  EXPECT_EQ(outcome.exit_code, 75);
  EXPECT_THAT(outcome.output, HasSubstr("stopped after 100ms"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));  // which the grace is if not told otherwise
}

TEST(Run, DrainsAtCtrlC) {
  Started run(
      WithPid("run -n 2 -- sh -c \"trap \\\"echo drained; exit 0\\\" TERM; echo ready; "
              "while :; do tail -f /dev/null & wait; done\""));
  const pid_t pid = ToPid(run.ReadLine());
  EXPECT_THAT(run.ReadLine(), HasSubstr("ready"));
  EXPECT_THAT(run.ReadLine(), HasSubstr("ready"));
  kill(pid, SIGINT);
  const Outcome outcome = run.End();
  EXPECT_EQ(outcome.exit_code, 75);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[rank 0] drained"), HasSubstr("[rank 1] drained"),
                                    HasSubstr("interrupted")));
}

TEST(Run, StopsAfterAWholeStepAtSigtermAndSaysTryAgain) {
  Started run(WithPid(absl::StrCat("run -n 2 --aggregators 2 -- ", Training())));
  const pid_t pid = ToPid(run.ReadLine());
  EXPECT_THAT(run.ReadLine(), StartsWith("[rank 0] step 1000 "));
  kill(pid, SIGTERM);
  const Outcome outcome = run.End();
  EXPECT_EQ(outcome.exit_code, 75);
  // One of them may have left a step before the other, which was to go on with it.
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[rank 0] signpost demo-worker: asked to stop"),
                                    HasSubstr("[rank 1] signpost demo-worker: asked to stop"),
                                    HasSubstr("interrupted")));
}

TEST(Run, EndsWithTryAgainWhenARankIsStopped) {
  Started run(absl::StrCat(kProgram, " run -- sh -c 'echo $$; exec ", Training(), "'"));
  const std::string line = run.ReadLine();
  const pid_t rank = ToPid(absl::StripPrefix(line, "[rank 0] "));
  EXPECT_THAT(run.ReadLine(), StartsWith("[rank 0] step 1000 "));
  kill(rank, SIGTERM);
  const Outcome outcome = run.End();
  EXPECT_EQ(outcome.exit_code, 75);
  EXPECT_THAT(outcome.output, HasSubstr("rank 0 failed first: exit code 75"));
}

TEST(DemoWorker, EndsWithTryAgainAtSigtermWhileItWaitsForAnAggregator) {
  Started worker(absl::StrCat(
      "env SIGNPOST_AGGREGATORS=127.0.0.1:1 SIGNPOST_JOB=j SIGNPOST_RANK=0 SIGNPOST_WORLD_SIZE=2 ",
      WithPid("demo-worker --hidden 8 --layers 1")));
  const pid_t pid = ToPid(worker.ReadLine());
  EXPECT_THAT(worker.ReadLine(), HasSubstr("127.0.0.1:1"));  // whom it waits for
  kill(pid, SIGTERM);
  EXPECT_EQ(worker.End().exit_code, 75);
}

// The child of a process whose command has this argument; 0: there is none.
pid_t ChildWithArgument(pid_t parent, const std::string& argument) {
  std::ifstream children(absl::StrCat("/proc/", parent, "/task/", parent, "/children"));
  for (pid_t child; children >> child;) {
    const std::string command = ReadFile(absl::StrCat("/proc/", child, "/cmdline"));
    if (absl::StrContains(command, argument)) return child;
  }
  return 0;
}

TEST(Run, GoesOnWhenAnAggregatorWithStateIsKilled) {
  const std::string state = testing::TempDir() + "/state";
  Started run(WithPid(absl::StrCat("run -n 2 --aggregators 2 --failure-timeout 1s --state-dir ",
                                   state, " -- ", Training(/*steps=*/4000))));
  const pid_t pid = ToPid(run.ReadLine());
  EXPECT_THAT(run.ReadLine(), StartsWith("[rank 0] step 200 "));
  const pid_t aggregator = ChildWithArgument(pid, "--shard=1/2");
  ASSERT_NE(aggregator, 0);
  kill(aggregator, SIGKILL);
  const Outcome outcome = run.End();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("signpost: aggregator 1 failed: killed by SIGKILL; "
                                              "started again (restart 1)\n"),
                                    HasSubstr("[rank 0] step 4000 ")));
}

std::string ParametersOf(const std::string& results) {
  const std::string result = ReadFile(results + "/rank-0");
  const size_t at = result.find("parameters_crc32c");
  EXPECT_NE(at, std::string::npos) << result;
  return result.substr(at, result.find('\n', at) - at);
}

TEST(Chaos, BreaksEverythingAndChangesNothing) {
  const std::string quiet = testing::TempDir() + "/quiet", broken = testing::TempDir() + "/broken";
  for (const std::string& directory : {quiet, broken}) mkdir(directory.c_str(), 0700);
  const auto training = [](const std::string& results) {
    return absl::StrCat(
        " -n 2 -- ", kProgram,
        " demo-worker --hidden 8 --layers 1 --batch 1 --steps 600 --freeze-step 100 "
        "--results ",
        results);
  };
  EXPECT_EQ(RunProgram("run" + training(quiet)).exit_code, 0);
  const Outcome outcome = RunProgram(
      "chaos --every 50ms --pause 20ms --faults kill,stop,reset,stall --failure-timeout 1s "
      "--aggregators 2" +
      training(broken));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* fault :
       {": kill aggregator ", ": stop aggregator ", ": reset aggregator ", ": stall aggregator "}) {
    EXPECT_THAT(outcome.output, HasSubstr(fault));
  }
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr(" closes rounds again, "),
                    HasSubstr("[rank 0] signpost: rank 0: waiting for aggregator 127.0.0.1:"),
                    testing::ContainsRegex("chaos: [0-9]+ faults \\([0-9]+ kill, .* in the median"),
                    HasSubstr("The job ended with exit code 0\n")));
  EXPECT_THAT(outcome.output, Not(HasSubstr(": kill aggregator 1")))
      << "it has no part in a job of one chunk";
  EXPECT_EQ(ParametersOf(broken), ParametersOf(quiet));
}

// Waits for the end of any process, by a descriptor of it.
void WaitUntilGone(pid_t pid) {
  pollfd descriptor = {static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), POLLIN, 0};
  if (descriptor.fd < 0) return;  // gone already
  EXPECT_EQ(poll(&descriptor, 1, /*timeout_ms=*/30000), 1)
      << "process " << pid << " is still there";
  close(descriptor.fd);
}

// The checksum that rank 0 ends with.
std::string ChecksumIn(const std::string& output) {
  const std::string words = "the parameters' CRC-32C is ";
  const size_t found = output.find(words);
  return found == std::string::npos ? "" : output.substr(found + words.size(), 8);
}

// What stands behind `name` in the results of rank 0.
double FigureOf(const std::string& results, const std::string& name) {
  std::istringstream result(ReadFile(results + "/rank-0"));
  std::string word;
  double figure = -1;
  while (figure < 0 && result >> word) {
    if (word == name) result >> figure;
  }
  return figure;
}

TEST(DemoWorker, ItsLinesHaveAllItsTimeAndNoBytesOfCheckpoints) {
  const std::string results = testing::TempDir() + "/lines";
  mkdir(results.c_str(), 0700);
  const Outcome outcome = RunProgram(absl::StrCat(
      "run -n 2 -- ", kProgram, " demo-worker --hidden 64 --batch 8 --steps 40 --freeze-step 10 ",
      "--checkpoint-every 1 --checkpoint-dir ", results, "/checkpoints --results ", results));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  double ms = 0, last_step = 0, ratio = 0;
  const std::vector<std::string> lines = absl::StrSplit(outcome.output, '\n');
  for (const std::string& line : lines) {
    double step, ms_a_step;
    if (std::sscanf(line.c_str(), "[rank 0] step %lf  loss %*f  %lf ms (", &step, &ms_a_step) < 2) {
      continue;
    }
    ms += ms_a_step * (step - last_step);
    last_step = step;
    const size_t rest = line.find(")  ");
    ASSERT_NE(rest, std::string::npos) << line;
    std::sscanf(line.c_str() + rest, ")  %lfx fewer bytes", &ratio);
  }
  EXPECT_EQ(last_step, 40);
  EXPECT_GT(ms, 0.8e3 * FigureOf(results, "seconds")) << outcome.output;
  EXPECT_GT(ratio, 10) << "a checkpoint has more bytes than a one-bit step";
}

TEST(Checkpoint, AJobGoesOnFromItsNewestAndDamageIsNamed) {
  const std::string directory = absl::StrCat(testing::TempDir(), "/checkpoints");
  const std::string worker = absl::StrCat(
      kProgram, " demo-worker --hidden 8 --layers 1 --batch 2 --steps 12 --freeze-step 4");
  const std::string saving =
      absl::StrCat(worker, " --checkpoint-every 3 --checkpoint-dir ", directory);
  const Outcome quiet = RunProgram(absl::StrCat("run -n 2 -- ", worker));
  ASSERT_EQ(quiet.exit_code, 0) << quiet.output;
  ASSERT_NE(ChecksumIn(quiet.output), "");
  const Outcome saved = RunProgram(absl::StrCat("run -n 2 -- ", saving));
  EXPECT_EQ(ChecksumIn(saved.output), ChecksumIn(quiet.output)) << saved.output;

  const Outcome inspected = RunProgram(absl::StrCat("checkpoint inspect ", directory));
  EXPECT_EQ(inspected.exit_code, 0);
  EXPECT_THAT(inspected.output, AllOf(HasSubstr("step-000000000012"), HasSubstr("(newest)"),
                                      HasSubstr("step-000000000009"), HasSubstr("freeze_step=4"),
                                      Not(HasSubstr("step-000000000006"))));
  EXPECT_EQ(RunProgram(absl::StrCat("checkpoint verify ", directory)).exit_code, 0);

  // The newest is damaged, so that there are steps left to take.
  Started(absl::StrCat("sh -c 'printf x | dd conv=notrunc bs=1 seek=200 of=$(echo ", directory,
                       "/step-000000000012-*/rank-1)'"))
      .End();
  const Outcome verified = RunProgram(absl::StrCat("checkpoint verify ", directory));
  EXPECT_EQ(verified.exit_code, 65);
  EXPECT_THAT(verified.output, AllOf(HasSubstr("rank-1 is damaged: the CRC-32C of section 1"),
                                     HasSubstr("is whole: 4 files")));
  const Outcome resumed =
      RunProgram(absl::StrCat("run -n 2 --aggregators 3 -- ", saving, " --resume"));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_THAT(resumed.output, AllOf(HasSubstr("passed over a checkpoint"),
                                    HasSubstr("step 9  going on from step-000000000009-")));
  EXPECT_EQ(ChecksumIn(resumed.output), ChecksumIn(quiet.output)) << resumed.output;
  EXPECT_EQ(RunProgram(absl::StrCat("checkpoint verify ", directory)).exit_code, 0)
      << "what was damaged is gone";
}

TEST(Run, TakesItsRanksAlongWhenItIsKilled) {
  Started run(WithPid("run -- sh -c \"echo \\$\\$; exec tail -f /dev/null\""));
  const pid_t pid = ToPid(run.ReadLine());
  const std::string line = run.ReadLine();
  const pid_t rank = ToPid(absl::StripPrefix(line, "[rank 0] "));
  kill(pid, SIGKILL);
  EXPECT_EQ(run.End().exit_code, 128 + SIGKILL);
  WaitUntilGone(rank);
}

TEST(Demo, ComparesTwoTrainingsAndWritesItsFigures) {
  const std::string output = testing::TempDir() + "/demo";
  const std::string json = output + "/figures.json";
  std::filesystem::remove_all(output);  // which it makes
  const Outcome outcome = RunProgram(absl::StrCat(
      "demo --steps 20 --freeze-step 4 --workers 2 --aggregators 2 --hidden 32 --layers 1 --batch 4"
      " --output ",
      output, " --json ", json));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("Adam: 2 workers, 2 aggregators, 20 steps\n"),
                                    HasSubstr("1-bit Adam: 2 workers, 2 aggregators, 20 steps\n"),
                                    HasSubstr("  step 20  loss"), HasSubstr("validation loss")));
  EXPECT_THAT(outcome.output, Not(HasSubstr("[rank")));
  EXPECT_THAT(ReadFile(json),
              AllOf(HasSubstr("\"replicas_identical\": true"), HasSubstr("\"steps\": 20")));
  EXPECT_THAT(ReadFile(output + "/loss.csv"), HasSubstr("\nonebit,20,"));
  EXPECT_THAT(ReadFile(output + "/loss.svg"), HasSubstr("<svg"));
}

}  // namespace
}  // namespace signpost::cli
