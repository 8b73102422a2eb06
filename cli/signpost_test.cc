// The program as its user has it: started, written to, interrupted.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "security/certificate.h"
#include "security/identity.h"
#include "security/tls_dir.h"

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kProgram[] = "cli/signpost";  // tests run where their data is

struct Outcome {
  int exit_code = 0;
  std::string output;  // both streams
};

// A program that runs in its own right, with both its streams into one pipe.
class Started {
 public:
  explicit Started(const std::string& shell_command)
      : stream_(popen(absl::StrCat("exec ", shell_command, " 2>&1").c_str(), "r")) {}
  ~Started() {
    if (stream_ != nullptr) End();
  }

  std::string ReadLine() {
    char line[4096];
    if (fgets(line, sizeof line, stream_) == nullptr) return "";
    return std::string(absl::StripSuffix(line, "\n"));
  }

  // Reads what is left and waits for the end.
  Outcome End() {
    Outcome outcome;
    for (int byte; (byte = fgetc(stream_)) != EOF;)
      outcome.output.push_back(static_cast<char>(byte));
    const int status = pclose(std::exchange(stream_, nullptr));
    outcome.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return outcome;
  }

 private:
  FILE* stream_;
};

Outcome RunProgram(const std::string& arguments) {
  return Started(absl::StrCat(kProgram, " ", arguments)).End();
}

// Writes its process number as the first line of the shell command's output.
std::string WithPid(const std::string& arguments) {
  return absl::StrCat("sh -c 'echo $$; exec ", kProgram, " ", arguments, "'");
}

pid_t ToPid(absl::string_view line) {
  pid_t pid = 0;
  EXPECT_TRUE(absl::SimpleAtoi(line, &pid)) << line;
  return pid;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream contents;
  contents << std::ifstream(path).rdbuf();
  return contents.str();
}

TEST(Signpost, ExplainsEachCommandWithAnExample) {
  const Outcome all = RunProgram("--help");
  EXPECT_EQ(all.exit_code, 0);
  EXPECT_THAT(all.output, Not(HasSubstr("demo-worker")));
  for (const char* command : {"demo", "run", "chaos", "bench", "codec", "aggregator", "worker",
                              "status", "checkpoint", "doctor", "config", "trace", "version"}) {
    EXPECT_THAT(all.output, HasSubstr(command));
    const Outcome one = RunProgram(absl::StrCat(command, " --help"));
    EXPECT_EQ(one.exit_code, 0);
    EXPECT_THAT(one.output,
                AllOf(HasSubstr("Example"), HasSubstr(absl::StrCat("signpost ", command))));
  }
}

TEST(Signpost, ShowsItsHelpToWhoGivesNoCommand) {
  const Outcome outcome = RunProgram("");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("Subcommands:"));
}

TEST(Signpost, RefusesUnknownFlagsWithASuggestion) {
  const Outcome outcome = RunProgram("demo --freze-step 3");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output,
              HasSubstr("unknown flag '--freze-step'; did you mean '--freeze-step'?"));
}

TEST(Signpost, RefusesUnknownCommandsWithASuggestion) {
  const Outcome outcome = RunProgram("statsu");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("unknown command 'statsu'; did you mean 'status'?"));
}

TEST(Help, OfACommandIsThereInBothOrders) {
  for (const std::string command : {"", "run ", "cert init "}) {
    const Outcome help = RunProgram(absl::StrCat("help ", command));
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_EQ(help.output, RunProgram(absl::StrCat(command, "--help")).output);
  }
}

TEST(Signpost, FailsWhenItsOutputIsLost) {
  // A short answer, a long one, and one of CLI11's.
  for (const char* command : {"version", "k8s render", "run --help"}) {
    const Outcome outcome =
        Started(absl::StrCat("sh -c '", kProgram, " ", command, " >/dev/full'")).End();
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_EQ(outcome.output,
              "signpost: cannot write to standard output: No space left on device\n");
  }
  // A run's output is no answer: what it was for may be done.
  EXPECT_EQ(
      Started(absl::StrCat("sh -c '", kProgram, " run -- echo hello >/dev/full'")).End().exit_code,
      0);
}

TEST(Signpost, SaysWhyItCannotLookAtAPath) {
  const std::string long_name(300, 'x');
  for (const std::string& command :
       {absl::StrCat("cert init ", long_name), absl::StrCat("run --trace ", long_name, " -- true"),
        absl::StrCat("trace merge out ", long_name), absl::StrCat("trace summary ", long_name),
        absl::StrCat("doctor --state-dir ", long_name)}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, HasSubstr("xxx")) << command;
    EXPECT_THAT(outcome.output, HasSubstr("File name too long")) << command;
  }
}

TEST(Signpost, SaysWhyItCannotReadOrWriteAndThatItIsTheCallersMistake) {
  const std::string file = testing::TempDir() + "/no-directory";
  std::ofstream(file) << "x";
  for (const std::string& command :
       {absl::StrCat("cert init ", file, "/x"), absl::StrCat("k8s render --output ", file, "/x"),
        absl::StrCat("checkpoint inspect ", file), absl::StrCat("trace summary ", file, "/x")}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr(file), HasSubstr("Not a directory"))) << command;
  }
}

TEST(Demo, SaysWhereThePythonPackageIsToBeHad) {
  const Outcome outcome = RunProgram("demo --torch --output " + testing::TempDir());
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("'./signpost demo --torch' builds one"));
}

TEST(Signpost, TellsItsVersionsInTwoWays) {
  const Outcome command = RunProgram("version");
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_THAT(command.output,
              AllOf(StartsWith("signpost "), HasSubstr("gRPC"), HasSubstr("kernels")));
  EXPECT_EQ(RunProgram("--version").output, command.output);
}

TEST(Aggregator, SaysWhereItListensAndDrainsAtSigterm) {
  Started aggregator(WithPid("aggregator"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  EXPECT_THAT(line, StartsWith("listening on 127.0.0.1:"));
  EXPECT_THAT(line, Not(testing::EndsWith(":0")));
  kill(pid, SIGTERM);
  const Outcome outcome = aggregator.End();
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.output, "");
}

// Writes the file, and returns its path.
std::string WriteConfig(const std::string& text) {
  const std::string path = testing::TempDir() + "/job.yaml";
  std::ofstream(path) << text;
  return path;
}

TEST(Aggregator, TakesFromAFileWhatItsFlagsDoNotSay) {
  const std::string path =
      WriteConfig("aggregator: {listen: \"127.0.0.1:99999\", metrics-listen: \"127.0.0.1:0\"}\n");
  Started aggregator(WithPid(absl::StrCat("aggregator --listen=127.0.0.1:0 --config=", path)));
  const pid_t pid = ToPid(aggregator.ReadLine());
  EXPECT_THAT(aggregator.ReadLine(), StartsWith("listening on 127.0.0.1:"));
  EXPECT_THAT(aggregator.ReadLine(), StartsWith("metrics on 127.0.0.1:"));
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
}

TEST(Aggregator, RefusesAFileWithAnUnknownKey) {
  const std::string path = WriteConfig("aggregator:\n  listne: a:1\n");
  const Outcome outcome = RunProgram("aggregator --config " + path);
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr(path + ":2: unknown key 'listne' in section aggregator; "
                                               "did you mean 'listen'?"));
}

TEST(Run, ConfiguresItsAggregatorsItselfAndHandsTheFileToRanks) {
  const std::string path = WriteConfig("run: {workers: 2}\naggregator: {listen: nowhere}\n");
  const Outcome outcome =
      RunProgram(absl::StrCat("run --config ", path, " -- sh -c 'echo has $SIGNPOST_CONFIG'"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[rank 0] has " + path + "\n"),
                                    HasSubstr("[rank 1] has " + path + "\n")));
}

TEST(Config, DocumentsAllKeys) {
  const Outcome keys = RunProgram("config keys");
  EXPECT_EQ(keys.exit_code, 0);
  EXPECT_THAT(keys.output, HasSubstr("| `metrics-listen` |"));
  EXPECT_TRUE(absl::StrContains(ReadFile("docs/configuration.md"), keys.output))
      << "the tables of docs/configuration.md are what `signpost config keys` prints:\n"
      << keys.output;
}

TEST(Config, ExplainsTheExampleOfItsDocumentation) {
  const std::string explain = "config explain --config docs/job.yaml";
  const Outcome both = RunProgram(explain);
  EXPECT_EQ(both.exit_code, 0);
  EXPECT_THAT(both.output, AllOf(HasSubstr("docs/job.yaml:"), HasSubstr("OneBitAdam"),
                                 Not(HasSubstr("not complete"))));
  const Outcome command = RunProgram(explain + " aggregator --shard 1/2");
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_THAT(command.output,
              AllOf(HasSubstr("--shard"), HasSubstr("0.0.0.0:4000"), Not(HasSubstr("job  "))));
}

TEST(Config, ExplainsAHelpfulErrorAndExitsAsTheCommandWould) {
  EXPECT_EQ(RunProgram("config explain aggregator --lsten a:1").exit_code, 64);
  EXPECT_EQ(RunProgram("config explain aggregator --help").exit_code, 0);
  EXPECT_EQ(RunProgram("config").exit_code, 64);
}

TEST(Aggregator, RefusesOtherHostsUnlessToldOtherwise) {
  const Outcome outcome = RunProgram("aggregator --listen 0.0.0.0:0");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--insecure-i-understand"));

  Started aggregator(WithPid("aggregator --listen 0.0.0.0:0 --insecure-i-understand"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  EXPECT_THAT(aggregator.ReadLine(), StartsWith("warning: plain text at 0.0.0.0:0"));
  EXPECT_THAT(aggregator.ReadLine(), StartsWith("listening on 0.0.0.0:"));
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
}

TEST(Aggregator, WantsTokensWithMtlsAndAllRulesOnly) {
  const std::string jwks = "aggregator --token-jwks /nowhere";
  Outcome outcome = RunProgram(jwks);
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("tokens need an issuer"));
  const std::string rules =
      " --token-issuer iss --token-audience aud --token-subject system:serviceaccount:a:b";
  outcome = RunProgram(jwks + rules);
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--tls-dir"));
  outcome = RunProgram("aggregator" + rules);
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("no JWKS file"));
}

TEST(Status, SaysWhatARankIsWithAWorkerForEachNode) {
  EXPECT_THAT(RunProgram("status --help").output, HasSubstr("a rank here is a node"));
}

TEST(Status, ShowsNoTokenInPlainText) {
  const Outcome outcome = RunProgram("status --aggregators 127.0.0.1:1 --token-file /nowhere");
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("the token in /nowhere would travel in plain text"));
}

TEST(Aggregator, SaysInOneLineThatItsPortIsTaken) {
  Started first(WithPid("aggregator"));
  const pid_t pid = ToPid(first.ReadLine());
  const std::string line = first.ReadLine();
  const std::string address(absl::StripPrefix(line, "listening on "));
  const Outcome second = RunProgram(absl::StrCat("aggregator --listen ", address));
  EXPECT_EQ(second.exit_code, 69);
  EXPECT_THAT(second.output,
              StartsWith(absl::StrCat("signpost aggregator: cannot listen on ", address)));
  EXPECT_EQ(std::count(second.output.begin(), second.output.end(), '\n'), 1) << second.output;
  kill(pid, SIGTERM);
}

TEST(Aggregator, SaysInItsSecondLineWhereItsMetricsAre) {
  Started aggregator(WithPid("aggregator --metrics-listen 127.0.0.1:0"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  EXPECT_THAT(aggregator.ReadLine(), StartsWith("listening on 127.0.0.1:"));
  const std::string line = aggregator.ReadLine();
  EXPECT_THAT(line, StartsWith("metrics on 127.0.0.1:"));
  EXPECT_THAT(line, Not(testing::EndsWith(":0")));
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
}

// Rank 0 of a small training with the aggregator at `address`, as a shell command.
std::string Rank(int rank, const std::string& address, int world_size) {
  return absl::StrCat(
      "env SIGNPOST_AGGREGATORS=", address, " SIGNPOST_JOB=small SIGNPOST_RANK=", rank,
      " SIGNPOST_WORLD_SIZE=", world_size, " ", kProgram,
      " demo-worker --hidden 8 --layers 1 --steps 2 --results ", testing::TempDir());
}

TEST(Worker, SaysAtOnceThatItTalksToAMetricsPort) {
  Started aggregator(WithPid("aggregator --metrics-listen 127.0.0.1:0"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  aggregator.ReadLine();
  const std::string line = aggregator.ReadLine();
  const std::string metrics(absl::StripPrefix(line, "metrics on "));
  Started worker(Rank(0, metrics, /*world_size=*/1));
  const Outcome outcome = worker.End();  // and not after a minute
  EXPECT_EQ(outcome.exit_code, 64) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat(metrics, " answers in HTTP/1")));
  EXPECT_THAT(RunProgram(absl::StrCat("status --aggregators ", metrics)).output,
              HasSubstr("--metrics-listen"));
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
}

TEST(Status, LooksAgainAndAgainUntilItIsInterrupted) {
  Started aggregator(WithPid("aggregator"));
  const pid_t aggregator_pid = ToPid(aggregator.ReadLine());
  const std::string listening = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(listening, "listening on "));
  Started status(WithPid(absl::StrCat("status --watch --interval 100ms --aggregators ", address)));
  const pid_t pid = ToPid(status.ReadLine());
  for (int look = 0; look < 3; ++look) {
    EXPECT_THAT(status.ReadLine(), testing::MatchesRegex("[0-9][0-9]:[0-9][0-9]:[0-9][0-9]"));
    EXPECT_EQ(status.ReadLine(), "no jobs");
  }
  kill(pid, SIGINT);
  EXPECT_EQ(status.End().exit_code, 0);
  kill(aggregator_pid, SIGTERM);

  EXPECT_EQ(RunProgram("status --aggregators a:1 --interval 1s").exit_code, 64);
  EXPECT_EQ(RunProgram("status --aggregators a:1 --watch --json").exit_code, 64);
  EXPECT_EQ(RunProgram("status --aggregators a:1 --watch --interval 1ms").exit_code, 64);
}

TEST(Aggregator, ListensOnAUnixSocket) {
  char directory[] = "/tmp/signpost-XXXXXX";  // a socket's path is short
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string address = absl::StrCat("unix:", directory, "/socket");
  Started aggregator(WithPid(absl::StrCat("aggregator --listen ", address)));
  const pid_t pid = ToPid(aggregator.ReadLine());
  EXPECT_EQ(aggregator.ReadLine(), absl::StrCat("listening on ", address));
  EXPECT_EQ(RunProgram(absl::StrCat("status --aggregators ", address)).output, "no jobs\n");
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
  rmdir(directory);
}

TEST(Status, WatchesATrainingAsTheStatusPageDoes) {
  Started aggregator(WithPid("aggregator"));
  const pid_t aggregator_pid = ToPid(aggregator.ReadLine());
  const std::string listening = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(listening, "listening on "));
  // Longer than anybody watches.
  Started training(
      absl::StrCat("sh -c 'echo $$; exec ",
                   absl::StrReplaceAll(Rank(0, address, /*world_size=*/1),
                                       {{"--steps 2", "--steps 1000000000 --freeze-step 3"}}),
                   "'"));
  const pid_t training_pid = ToPid(training.ReadLine());
  Started status(WithPid(absl::StrCat("status --watch --interval 100ms --aggregators ", address)));
  const pid_t pid = ToPid(status.ReadLine());
  // The momentum is known from the first one-bit step on, rates from the second look on.
  std::string header, row;
  for (int line = 0; line < 3000; ++line) {
    std::string next = status.ReadLine();
    if (!absl::StartsWith(next, "small ")) {
      header = std::move(next);
      continue;
    }
    row = std::move(next);
    if (absl::StrContains(header, "MOMENTUM NORM") && !absl::StrContains(row, " - ")) break;
  }
  for (const char* column : {"STEPS/s", "JOINED", "WAITING FOR", "RECEIVED/s", "SENT/s",
                             "COMPRESSION", "ERROR NORM", "MOMENTUM NORM", "LATE", "SKIPPED"}) {
    EXPECT_THAT(header, HasSubstr(column));
  }
  EXPECT_THAT(row, testing::ContainsRegex(" 1/1 .* [0-9.]+ [kMG]?B .* [0-9.]+x  *[0-9.e-]+  "
                                          "*[0-9.e-]+  *0  *0$"));
  kill(pid, SIGINT);
  EXPECT_EQ(status.End().exit_code, 0);
  const Outcome once = RunProgram(absl::StrCat("status --aggregators ", address));
  EXPECT_THAT(once.output, HasSubstr("COMPRESSION  ERROR NORM  MOMENTUM NORM  REFUSED"));
  kill(training_pid, SIGKILL);
  kill(aggregator_pid, SIGKILL);
}

// Where a node's worker may listen. Its directory goes with this object.
class SocketPath {
 public:
  SocketPath() { EXPECT_NE(mkdtemp(directory_), nullptr); }
  ~SocketPath() { rmdir(directory_); }
  std::string address() const { return absl::StrCat("unix:", directory_, "/worker"); }

 private:
  char directory_[24] = "/tmp/signpost-XXXXXX";  // a socket's path is short
};

TEST(Worker, TrainsForAProcessAndEndsAtSigterm) {
  Started aggregator(WithPid("aggregator"));
  const pid_t aggregator_pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  const std::string aggregators(absl::StripPrefix(line, "listening on "));
  const SocketPath socket;
  Started worker(WithPid(absl::StrCat("worker --processes 1 --rank 0 --world-size 1 --listen ",
                                      socket.address(), " --aggregators ", aggregators)));
  const pid_t pid = ToPid(worker.ReadLine());
  EXPECT_EQ(worker.ReadLine(), absl::StrCat("listening on ", socket.address()));
  const std::string rank = Rank(0, /*address=*/"unused:1", /*world_size=*/1);
  const Outcome trained =
      Started(absl::StrCat("env SIGNPOST_NODE=", socket.address(), " ", rank)).End();
  EXPECT_EQ(trained.exit_code, 0) << trained.output;
  const Outcome second =
      RunProgram(absl::StrCat("worker --processes 1 --rank 0 --world-size 1 ", "--listen ",
                              socket.address(), " --aggregators x:1"));
  EXPECT_EQ(second.exit_code, 75);
  EXPECT_THAT(second.output, HasSubstr(absl::StrCat("process ", pid, " does")));
  kill(pid, SIGTERM);
  EXPECT_EQ(worker.End().exit_code, 0);
  kill(aggregator_pid, SIGTERM);
}

TEST(Worker, NamesWhatIsMissingOrWrong) {
  const SocketPath socket;
  const std::map<std::string, std::string> good = {{"--listen", socket.address()},
                                                   {"--processes", "2"},
                                                   {"--rank", "0"},
                                                   {"--world-size", "2"},
                                                   {"--aggregators", "x:1"}};
  // Another value for a flag; none: without it.
  const auto with = [&](const std::string& changed, const std::string& value) {
    std::string arguments = "worker";
    for (const auto& [flag, usual] : good) {
      const std::string& given = flag == changed ? value : usual;
      if (!given.empty()) absl::StrAppend(&arguments, " ", flag, " ", given);
    }
    const Outcome outcome = RunProgram(arguments);
    EXPECT_EQ(outcome.exit_code, 64) << arguments;
    return outcome.output;
  };
  for (const auto& [flag, value] : good) EXPECT_THAT(with(flag, ""), HasSubstr(flag));
  EXPECT_THAT(with("--rank", "2"), HasSubstr("worker 2 of 2"));
  EXPECT_THAT(with("--processes", "0"), HasSubstr("--processes"));
  EXPECT_THAT(with("--aggregators", "elsewhere"),
              HasSubstr("--aggregators: 'elsewhere' should be HOST:PORT"));
  EXPECT_THAT(with("--listen", "127.0.0.1:4000"), HasSubstr("wanted unix:PATH"));
}

TEST(Worker, SaysWhyItCannotTrainOnAGpu) {
  const SocketPath socket;
  const std::string arguments =
      absl::StrCat("worker --listen ", socket.address(),
                   " --processes 1 --rank 0 --world-size 1 --aggregators x:1 --gpu ");
  const Outcome none = RunProgram(absl::StrCat(arguments, "99"));
  EXPECT_EQ(none.exit_code, 64) << none.output;
  EXPECT_THAT(none.output, testing::ContainsRegex("--gpu: .*(--config=cuda|GPU 99)"));
  EXPECT_EQ(RunProgram(absl::StrCat(arguments, "-1")).exit_code, 64);
  EXPECT_EQ(RunProgram("run -n 2 --node-gpu 0 -- true").exit_code, 64);
}

TEST(Worker, KeepsItsLimitAndTakesItsRankFromTheEnvironment) {
  const SocketPath socket;
  Started worker(absl::StrCat("env SIGNPOST_RANK=1 SIGNPOST_WORLD_SIZE=2 SIGNPOST_AGGREGATORS=x:1 ",
                              WithPid(absl::StrCat("worker --processes 1 --max-parameters 10 ",
                                                   "--listen ", socket.address()))));
  const pid_t pid = ToPid(worker.ReadLine());
  worker.ReadLine();
  const std::string node = absl::StrCat("env SIGNPOST_NODE=", socket.address(), " ");
  const Outcome large = Started(absl::StrCat(node, Rank(1, "x:1", /*world_size=*/2))).End();
  EXPECT_EQ(large.exit_code, 64);
  EXPECT_THAT(large.output, HasSubstr("takes 10 (--max-parameters)"));
  const Outcome other = Started(absl::StrCat(node, Rank(0, "x:1", /*world_size=*/2))).End();
  EXPECT_EQ(other.exit_code, 64);
  EXPECT_THAT(other.output, HasSubstr("does not belong to this node, 1 of 2"));
  kill(pid, SIGTERM);
  EXPECT_EQ(worker.End().exit_code, 0);
}

// Which a cluster is to try again until the certificate is renewed.
TEST(Signpost, EndsWithTryAgainWhereACertificateIsOutOfDate) {
  const std::string directory = testing::TempDir() + "/out_of_date";
  const auto authority = signpost::Authority::Make("Test", absl::Hours(1));
  const auto aggregator = signpost::Identity::Parse("spiffe://signpost/aggregator");
  const auto files = authority->Issue(*aggregator, -absl::Seconds(1));
  ASSERT_TRUE(signpost::WriteTlsDir(directory, *files).ok());
  for (const char* command :
       {"aggregator --listen 127.0.0.1:0", "probe --aggregators 127.0.0.1:1"}) {
    const Outcome outcome = RunProgram(absl::StrCat(command, " --tls-dir ", directory));
    EXPECT_EQ(outcome.exit_code, 75) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("was valid until"));
  }
}

TEST(Aggregator, KeepsTheLimitsThatItIsGiven) {
  for (const char* limit : {"max-workers=1", "max-parameters=1", "max-message-bytes=1024"}) {
    Started aggregator(WithPid(absl::StrCat("aggregator --", limit)));
    const pid_t pid = ToPid(aggregator.ReadLine());
    const std::string line = aggregator.ReadLine();
    const Outcome worker =
        Started(Rank(0, std::string(absl::StripPrefix(line, "listening on ")), /*world_size=*/2))
            .End();
    EXPECT_EQ(worker.exit_code, 64) << limit;
    EXPECT_THAT(worker.output,
                HasSubstr(absl::StrCat("--", std::string(limit, strcspn(limit, "=")))));
    kill(pid, SIGKILL);
  }
}

TEST(Aggregator, TakesNoMoreJobsThanItIsTold) {
  Started aggregator(WithPid("aggregator --max-jobs=1"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(line, "listening on "));
  Started first(Rank(0, address, /*world_size=*/2));
  while (!absl::StrContains(RunProgram("status --aggregators " + address).output, "1/2")) {
  }
  const Outcome second =
      Started(absl::StrReplaceAll(Rank(0, address, /*world_size=*/1), {{"JOB=small", "JOB=other"}}))
          .End();
  EXPECT_EQ(second.exit_code, 75);  // until the first has ended
  EXPECT_THAT(second.output, HasSubstr("--max-jobs"));
  Started other(Rank(1, address, /*world_size=*/2));
  EXPECT_EQ(other.End().exit_code, 0);
  EXPECT_EQ(first.End().exit_code, 0);
  kill(pid, SIGTERM);
}

TEST(Aggregator, RefusesALimitThatIsNone) {
  for (const char* limit :
       {"max-jobs", "max-workers", "max-parameters", "max-frames", "max-message-bytes",
        "max-connections", "max-connections-per-peer", "max-receive-bytes", "max-held-bytes"}) {
    for (const char* none : {"0", "-1", "''"}) {
      const Outcome outcome = RunProgram(absl::StrCat("aggregator --", limit, " ", none));
      EXPECT_EQ(outcome.exit_code, 64) << limit << " " << none;
      EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("--", limit, ": '")));
    }
  }
  EXPECT_THAT(RunProgram("aggregator --max-message-bytes 1").output,
              HasSubstr("'1' is too little for a frame"));
  EXPECT_EQ(RunProgram("worker --max-parameters 0").exit_code, 64);
}

TEST(Signpost, RefusesAFlagThatIsEmpty) {
  for (const char* command : {"aggregator --state-dir ''", "run --state-dir '' -- true",
                              "cert init certificates-of-none --job ''"}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, HasSubstr(" is empty; give it a value, or leave it out"));
  }
}

TEST(Cert, ADirectoryThatIsRenewedKeepsItsIdentity) {
  const std::string directory = ::testing::TempDir() + "/renewed";
  ASSERT_EQ(RunProgram("cert init --trust-domain corp.example --job bert " + directory).exit_code,
            0);
  const std::string issue = absl::StrCat("cert issue ", directory, " --to ", directory);
  Outcome renewed = RunProgram(issue + "/worker --days 30");
  EXPECT_EQ(renewed.exit_code, 0);
  EXPECT_THAT(renewed.output, HasSubstr("spiffe://corp.example/worker/bert, until"));
  renewed = RunProgram(issue + "/aggregator");
  EXPECT_THAT(renewed.output, HasSubstr("spiffe://corp.example/aggregator, until"));
  for (const char* other :
       {"/aggregator --role worker", "/worker --job gpt", "/worker --trust-domain signpost"}) {
    const Outcome refused = RunProgram(issue + other);
    EXPECT_EQ(refused.exit_code, 64) << other;
    EXPECT_THAT(refused.output, HasSubstr(": give another directory, or without --role"));
  }
  EXPECT_THAT(RunProgram("cert show " + directory + "/worker").output,
              HasSubstr("spiffe://corp.example/worker/bert"));
  EXPECT_THAT(RunProgram(issue + "/new --role observer").output,
              HasSubstr("spiffe://signpost/observer, until"));
}

TEST(Cert, ADirectoryThatTrustsMoreAuthoritiesGoesOnToDoSo) {
  const std::string directory = ::testing::TempDir() + "/two_authorities";
  for (const char* authority : {"/old", "/new"}) {
    ASSERT_EQ(RunProgram(absl::StrCat("cert init ", directory, authority)).exit_code, 0);
  }
  const std::string both =
      ReadFile(directory + "/old/ca/ca.crt") + ReadFile(directory + "/new/ca/ca.crt");
  std::ofstream(directory + "/old/worker/ca.crt") << both;
  const Outcome renewed =
      RunProgram(absl::StrCat("cert issue ", directory, "/new --to ", directory, "/old/worker"));
  EXPECT_EQ(renewed.exit_code, 0) << renewed.output;
  EXPECT_EQ(ReadFile(directory + "/old/worker/ca.crt"), both);
  EXPECT_EQ(RunProgram(absl::StrCat("cert show ", directory, "/old/worker")).exit_code, 0);
}

TEST(Cert, KeysThatAreNoneOfItsOwnStay) {
  const std::string directory = ::testing::TempDir() + "/foreign_keys";
  ASSERT_EQ(RunProgram("cert init " + directory).exit_code, 0);
  const std::string web = directory + "/web";
  std::filesystem::create_directory(web);
  std::ofstream(web + "/tls.key") << "a web server's";
  Outcome refused = RunProgram(absl::StrCat("cert issue ", directory, " --to ", web));
  EXPECT_EQ(refused.exit_code, 64);
  EXPECT_THAT(refused.output, HasSubstr("has a tls.key, and is no TLS directory of Signpost"));
  EXPECT_EQ(ReadFile(web + "/tls.key"), "a web server's");

  const std::string key = ReadFile(directory + "/worker/tls.key");
  std::filesystem::rename(directory + "/ca", directory + "/kept_elsewhere");
  refused = RunProgram("cert init " + directory);
  EXPECT_EQ(refused.exit_code, 64);
  EXPECT_THAT(refused.output,
              HasSubstr("tls.key is there already, and its authority is elsewhere"));
  EXPECT_EQ(ReadFile(directory + "/worker/tls.key"), key);

  const std::string none = ::testing::TempDir() + "/none";
  EXPECT_EQ(RunProgram("cert init --job nlp/bert " + none).exit_code, 64);
  EXPECT_FALSE(std::filesystem::exists(none));
}

TEST(Cert, ADirectoryMayBeNamedWithASlashBehindIt) {
  const std::string directory = ::testing::TempDir() + "/with_slash";
  ASSERT_EQ(RunProgram("cert init " + directory).exit_code, 0);
  const mode_t before = umask(S_IWOTH);
  const Outcome issued =
      RunProgram(absl::StrCat("cert issue ", directory, " --to ", directory, "/more/"));
  umask(before);
  EXPECT_EQ(issued.exit_code, 0) << issued.output;
}

TEST(Aggregator, GivesJobsNoMoreThanTheGraceWhenItDrains) {
  Started aggregator(WithPid("aggregator --drain-grace 0s"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(line, "listening on "));
  Started worker(Rank(0, address, /*world_size=*/2));
  std::string status;
  do {
    status = RunProgram("status --aggregators " + address).output;
  } while (!absl::StrContains(status, "1/2"));
  EXPECT_THAT(status, HasSubstr("rank 1 for"));

  const absl::Time start = absl::Now();
  kill(pid, SIGTERM);
  EXPECT_EQ(aggregator.End().exit_code, 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));  // which it is if not told otherwise

  // The worker, which had not begun, waits for the next one.
  Started next(WithPid("aggregator --drain-grace 0s --listen " + address));
  const pid_t next_pid = ToPid(next.ReadLine());
  Started other(Rank(1, address, /*world_size=*/2));
  EXPECT_EQ(worker.End().exit_code, 0);
  EXPECT_EQ(other.End().exit_code, 0);
  kill(next_pid, SIGTERM);
  EXPECT_EQ(next.End().exit_code, 0);
}

// An aggregator, and two ranks that exchange what they are told to.
class BenchJob {
 public:
  // Ranks have the flags, and the aggregator a state of this name.
  BenchJob(const std::string& name, const std::string& flags)
      : aggregator_(WithPid("aggregator --metrics-listen 127.0.0.1:0 --state-dir " +
                            testing::TempDir() + "/" + name)) {
    aggregator_pid_ = ToPid(aggregator_.ReadLine());
    const std::string address(absl::StripPrefix(aggregator_.ReadLine(), "listening on "));
    for (int rank = 0; rank < 2; ++rank) {
      const std::string lines = absl::StrCat(testing::TempDir(), "/to-", name, rank);
      EXPECT_EQ(mkfifo(lines.c_str(), 0600), 0);
      to_rank_[rank] = open(lines.c_str(), O_RDWR | O_CLOEXEC);
      ranks_.push_back(std::make_unique<Started>(absl::StrCat(
          "env SIGNPOST_AGGREGATORS=", address, " SIGNPOST_JOB=", name, " SIGNPOST_RANK=", rank,
          " SIGNPOST_WORLD_SIZE=2 ", kProgram, " bench rank ", flags, " <", lines)));
    }
    for (const auto& rank : ranks_) EXPECT_EQ(rank->ReadLine(), "ready");
  }
  ~BenchJob() {
    for (const int rank : to_rank_) close(rank);
    for (const auto& rank : ranks_) EXPECT_EQ(rank->End().exit_code, 0);
    kill(aggregator_pid_, SIGTERM);
  }

  void Exchange(int times) {
    const std::string line = absl::StrCat(times, "\n");
    for (const int rank : to_rank_) EXPECT_EQ(write(rank, line.data(), line.size()), line.size());
    for (const auto& rank : ranks_) EXPECT_THAT(rank->ReadLine(), HasSubstr(" "));
  }

  pid_t aggregator_pid() const { return aggregator_pid_; }

 private:
  Started aggregator_;
  pid_t aggregator_pid_ = 0;
  int to_rank_[2] = {};
  std::vector<std::unique_ptr<Started>> ranks_;
};

// Of all its threads so far.
absl::Duration CpuTime(pid_t pid) {
  clockid_t clock;
  timespec time = {};
  EXPECT_EQ(clock_getcpuclockid(pid, &clock), 0);
  EXPECT_EQ(clock_gettime(clock, &time), 0);
  return absl::DurationFromTimespec(time);
}

// Ranks that have exchanged something and hold their connections, with nothing to do.
TEST(Aggregator, CostsNothingWhileItsJobIsIdle) {
  BenchJob job("idle", "--mode step --parameters 100000");
  job.Exchange(5);
  const absl::Time start = absl::Now();
  const absl::Duration before = CpuTime(job.aggregator_pid());
  absl::SleepFor(absl::Seconds(3));  // what is measured is what it does meanwhile
  const absl::Duration idle = absl::Now() - start, used = CpuTime(job.aggregator_pid()) - before;
  EXPECT_LT(used, 0.005 * idle);  // a twenty-fifth of that was measured
}

// Pages that the kernel has given it so far: proc(5), minflt.
uint64_t PageFaults(pid_t pid) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(stat.rfind(')') + 2), ' ');  // from the third field on
  uint64_t faults = 0;
  EXPECT_TRUE(absl::SimpleAtoi(fields.at(7), &faults)) << stat;
  return faults;
}

TEST(Aggregator, KeepsTheMemoryThatItReceivesInto) {
  constexpr int kParameters = 4'000'000, kExchanges = 40;
  BenchJob job("receives", absl::StrCat("--mode mean --codec fp32 --parameters ", kParameters));
  job.Exchange(20);
  const uint64_t before = PageFaults(job.aggregator_pid());
  job.Exchange(kExchanges);
  const double received_pages = 2.0 * kExchanges * kParameters * sizeof(float) / getpagesize();
  // 1 to 10% were measured, and 37 to 51 of an aggregator that gives its memory back.
  EXPECT_LT(PageFaults(job.aggregator_pid()) - before, 0.2 * received_pages);
}

TEST(Aggregator, RefusesAShardThatIsNone) {
  for (const char* shard : {"2/2", "1", "-1/2", "0/0", "a/b", "0/1/2"}) {
    const Outcome outcome = RunProgram(absl::StrCat("aggregator --shard=", shard));
    EXPECT_EQ(outcome.exit_code, 64);
    EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("--shard is '", shard, "', wanted I/N")));
  }
}

TEST(Status, AsksAllAggregatorsAndCountsThoseThatAreNotThere) {
  Started aggregator(WithPid("aggregator --shard 0/2"));
  const pid_t pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(line, "listening on "));

  const Outcome up = RunProgram(absl::StrCat("status --aggregators ", address));
  EXPECT_EQ(up.exit_code, 0);
  EXPECT_EQ(up.output, "no jobs\n");
  const Outcome json = RunProgram(absl::StrCat("status --json --aggregators ", address));
  EXPECT_EQ(json.exit_code, 0);
  EXPECT_THAT(json.output, HasSubstr("\"shard_count\":2"));

  kill(pid, SIGTERM);
  aggregator.End();
  const Outcome down = RunProgram(absl::StrCat("status --timeout 1s --aggregators ", address));
  EXPECT_EQ(down.exit_code, 69);
  EXPECT_THAT(down.output, HasSubstr(absl::StrCat("no answer from aggregator ", address)));
}

TEST(Status, NamesARankThatHangs) {
  for (const char* place : {"worker.sending", "worker.answered"}) {
    Started aggregator(WithPid("aggregator"));
    const pid_t aggregator_pid = ToPid(aggregator.ReadLine());
    const std::string line = aggregator.ReadLine();
    const std::string address(absl::StripPrefix(line, "listening on "));
    Started well(Rank(0, address, /*world_size=*/2));
    Started stopped(absl::StrCat("sh -c 'echo $$; exec env SIGNPOST_FAILPOINT=", place, "=stop ",
                                 Rank(1, address, /*world_size=*/2), "'"));
    const pid_t pid = ToPid(stopped.ReadLine());
    EXPECT_EQ(stopped.ReadLine(), absl::StrCat("signpost: at failpoint ", place, ", pass 1"));
    std::string status;
    do {
      status = RunProgram("status --aggregators " + address).output;
    } while (!absl::StrContains(status, "rank 1 for"));
    EXPECT_THAT(status, Not(HasSubstr("rank 0")));
    kill(pid, SIGCONT);
    EXPECT_EQ(stopped.End().exit_code, 0);
    EXPECT_EQ(well.End().exit_code, 0);
    kill(aggregator_pid, SIGTERM);
  }
}

TEST(Status, NeedsToKnowWhomToAsk) {
  const Outcome outcome = RunProgram("status");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--aggregators HOST:PORT"));
  EXPECT_EQ(RunProgram("status --aggregators here").exit_code, 64);
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

// A worker that trains until it is stopped (20000 steps are some seconds), and shows early that it
// has begun.
std::string Training(int steps = 20000) {
  return absl::StrCat(kProgram, " demo-worker --hidden 8 --layers 1 --batch 1 --steps ", steps,
                      " --results ", testing::TempDir());
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

TEST(Aggregator, IsLeftByAWorkerThatIsStopped) {
  Started aggregator(WithPid("aggregator"));
  const pid_t aggregator_pid = ToPid(aggregator.ReadLine());
  const std::string line = aggregator.ReadLine();
  const std::string address(absl::StripPrefix(line, "listening on "));
  Started worker(absl::StrCat("sh -c 'echo $$; export SIGNPOST_AGGREGATORS=", address,
                              " SIGNPOST_JOB=long SIGNPOST_RANK=0 SIGNPOST_WORLD_SIZE=1; exec ",
                              Training(), "'"));
  const pid_t pid = ToPid(worker.ReadLine());
  EXPECT_THAT(worker.ReadLine(), StartsWith("step 1000 "));
  kill(pid, SIGTERM);
  const Outcome outcome = worker.End();
  EXPECT_EQ(outcome.exit_code, 75);
  EXPECT_THAT(outcome.output, testing::ContainsRegex("left the job after [0-9]+ of 20000 steps"));
  EXPECT_EQ(RunProgram(absl::StrCat("status --aggregators ", address)).output, "no jobs\n");
  kill(aggregator_pid, SIGTERM);
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

TEST(Chaos, RefusesFaultsThatThereAreNot) {
  const Outcome outcome = RunProgram("chaos --faults kill,explode -- true");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--faults: 'explode' is not a fault"));
}

TEST(Chaos, ListsTheFailpoints) {
  const Outcome outcome = RunProgram("chaos --list-failpoints");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("round.closed         a round's answer is made"));
}

TEST(Failpoint, OfAnotherNameIsRefusedAtTheStart) {
  const Outcome outcome =
      Started(absl::StrCat("env SIGNPOST_FAILPOINT=round.close=kill ", kProgram, " aggregator"))
          .End();
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("SIGNPOST_FAILPOINT: failpoint 'round.close=kill': there "
                                        "is no 'round.close', but there are: "));
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

TEST(Bench, PrintsATableAndWritesItAsJson) {
  const std::string file = testing::TempDir() + "/figures.json";
  const Outcome outcome = RunProgram(absl::StrCat(
      "bench exchange --workers 2 --parameters 20000 --turns 1 --exchanges 1 --json ", file));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("VALUE"), HasSubstr("packed frames, one-bit"),
                                    HasSubstr("gradients to mean, one-bit")));
  std::ostringstream json;
  json << std::ifstream(file).rdbuf();
  EXPECT_THAT(json.str(), AllOf(HasSubstr("\"name\": \"packed frames, one-bit\""),
                                HasSubstr("\"unit\": \"s\"")));
}

TEST(Bench, MeasuresKernels) {
  const Outcome outcome = RunProgram("bench kernels --elements 10000 --rounds 1");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("GB/s"), HasSubstr("OF BOUND")));
}

TEST(Bench, MeasuresWholeSteps) {
  const Outcome outcome = RunProgram(
      "bench step --workers 1 --aggregators 1 --codec fp32 --parameters 20000 --turns 1 "
      "--exchanges 1");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("optimizer step, fp32"));
}

TEST(Bench, PredictsWhetherOneBitPays) {
  const Outcome slow =
      RunProgram("bench predict --link 1gbit --parameters 340000000 --workers 8 --compute-ms 900");
  EXPECT_EQ(slow.exit_code, 0);
  EXPECT_THAT(slow.output, AllOf(HasSubstr("VALUE"), HasSubstr("one-bit"), HasSubstr("bf16")));
  EXPECT_THAT(slow.output, HasSubstr("340000000 parameters; 8 workers and 8 aggregators, each on a "
                                     "host of its own with 16 cores, 8 threads in each worker; "
                                     "links of 1000 Mbit/s\n"));
  EXPECT_THAT(slow.output, HasSubstr(", over a whole run "));
  const Outcome cheap = RunProgram(
      "bench predict --link 1gbit --parameters 340000000 --workers 8 --compute-ms 900 "
      "--warm-up-codec int8");
  EXPECT_EQ(cheap.exit_code, 0);
  EXPECT_THAT(cheap.output, HasSubstr("step with overlap, int8"));
  EXPECT_THAT(slow.output, Not(HasSubstr("int8")));
  const std::string file = absl::StrCat(::testing::TempDir(), "/predicted.json");
  EXPECT_EQ(RunProgram(absl::StrCat("bench predict --link 1gbit --compute-ms 900 --json ", file))
                .exit_code,
            0);
  EXPECT_THAT(ReadFile(file), HasSubstr("\"verdict\": \"one-bit "));
  const Outcome none =
      RunProgram(absl::StrCat("bench predict --link 1gbit --compute-ms 900 --kernels ", file));
  EXPECT_EQ(none.exit_code, 64);
  EXPECT_THAT(none.output, HasSubstr("is not what 'signpost bench kernels --json' writes: there is "
                                     "no 'compress, fp32' in Gelem/s"));
  const Outcome fast =
      RunProgram("bench predict --link 100gbit --parameters 100000 --workers 2 --compute-ms 900");
  EXPECT_THAT(fast.output, HasSubstr("does not pay"));
  EXPECT_EQ(RunProgram("bench predict --link 1gbit").exit_code, 64);
  const Outcome threads =
      RunProgram("bench predict --link 1gbit --compute-ms 900 --cores 2 --threads 3");
  EXPECT_EQ(threads.exit_code, 64);
  EXPECT_THAT(threads.output, HasSubstr("--threads is 3, and a host has --cores 2"));
}

TEST(Bench, PlaysAnExchangeOfManyWorkers) {
  const Outcome outcome =
      RunProgram("bench scale --link 10gbit --parameters 100000000 --workers 64");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("exchange, one-bit"), HasSubstr("OF BOUND"),
                                    HasSubstr("one-bit: the busiest link"),
                                    HasSubstr("one-bit: all of a host's cores")));
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  EXPECT_EQ(RunProgram("bench").exit_code, 64);
  EXPECT_EQ(RunProgram("bench exchange --codec int3").exit_code, 64);
  EXPECT_THAT(RunProgram("bench exchange --codec int3").output,
              HasSubstr("--codec: int3 not in {bf16,fp16,fp32,int4,int8,onebit}"));
  EXPECT_THAT(RunProgram("bench step --optimizer Adam").output,
              HasSubstr("--optimizer: Adam not in {OneBitAdam,OneBitLamb,ZeroOneAdam}"));
  for (const std::string file : {"/nowhere/at.all", "/", "/proc/version/"}) {
    const Outcome none = RunProgram(absl::StrCat("bench kernels --json ", file));  // at once
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--json: cannot write to '", file, "': ")));
    EXPECT_EQ(none.exit_code, 64);
  }
  const Outcome many = RunProgram("bench scale --link 10gbit --parameters 0.1B --workers 64");
  EXPECT_EQ(many.output,
            RunProgram("bench scale --link 10gbit --parameters 100000000 --workers 64").output);
  EXPECT_EQ(RunProgram("bench scale --link 10gbit --parameters 4.1M --workers 64").output,
            RunProgram("bench scale --link 10gbit --parameters 4100000 --workers 64").output);
  for (const std::string count : {"0", "-1", "many", "1.5", "25T", "1e30"}) {
    const Outcome none = RunProgram(absl::StrCat("bench exchange --parameters=", count));
    EXPECT_EQ(none.exit_code, 64);
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--parameters: '", count,
                                                    "' is no whole number above 0, like 25M")));
  }
  EXPECT_EQ(RunProgram("k8s render --parameters 340M").output,
            RunProgram("k8s render --parameters 340000000").output);
  EXPECT_EQ(RunProgram("bench predict --link 1Gbit --compute-ms 900").exit_code, 0);
  for (const char* negative : {"k8s render --parameters", "k8s render --workers",
                               "doctor --parameters", "demo-worker --steps", "demo --hidden"}) {
    const Outcome none = RunProgram(absl::StrCat(negative, " -1"));
    EXPECT_EQ(none.exit_code, 64) << negative;
    EXPECT_THAT(none.output, AllOf(HasSubstr("-1"), Not(HasSubstr("18446744073709551615"))));
  }
  const Outcome never = RunProgram("bench predict --link 1gbit --compute-ms nan");
  EXPECT_EQ(never.exit_code, 64);
  EXPECT_THAT(never.output, HasSubstr("--compute-ms: 'nan' is no number above 0"));
  for (const char* large :
       {"predict --link 1gbit --compute-ms 1e308", "scale --link 1gbit --workers 4294967295",
        "predict --link 1gbit --compute-ms 1 --workers 1000000",
        "scale --link 1gbit --parameters 1000000B --workers 64",
        "kernels --elements 999999999999999", "exchange --parameters 1000000000B"}) {
    const Outcome refused = RunProgram(absl::StrCat("bench ", large));
    EXPECT_EQ(refused.exit_code, 64) << large;
    EXPECT_THAT(refused.output, testing::ContainsRegex("at most 1e9|a job has 1 to|are free"));
  }
  EXPECT_THAT(RunProgram("bench kernels --elements 4095").output,
              HasSubstr("--elements is 4095; a block has 4096"));
  EXPECT_EQ(RunProgram("bench exchange --what frames --codec bf16").exit_code, 64);
  EXPECT_THAT(RunProgram("bench exchange --netns fast").output,
              HasSubstr("'fast' is no rate of a link"));
  const Outcome outcome = RunProgram("bench step --peers gloo-adamw");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("'./signpost bench ... --peers' builds one"));
  for (const auto& [python, why] : {std::pair{"/nowhere/python3", "No such file or directory"},
                                    {"no-such-python3", "No such file or directory"},
                                    {"/proc/version", "Permission denied"},
                                    {"/tmp", "Permission denied"}}) {
    const Outcome none =
        RunProgram(absl::StrCat("bench exchange --peers gloo-fp32 --python ", python));
    EXPECT_EQ(none.exit_code, 64) << python;
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--python: cannot run '", python, "': ", why)));
  }
  const Outcome unknown = RunProgram("bench exchange --peers gloo-fp32,nonsense");
  EXPECT_EQ(unknown.exit_code, 64);
  EXPECT_THAT(unknown.output,
              HasSubstr("--peers: nonsense not in {gloo-fp32,gloo-fp16,gloo-bf16,powersgd-1,"
                        "powersgd-2,mpi}, which exchange and take no steps"));
  const Outcome unlike = RunProgram("bench exchange --peers gloo-fp32,gloo-adamw");
  EXPECT_EQ(unlike.exit_code, 64);
  EXPECT_THAT(unlike.output, HasSubstr("--peers: gloo-adamw not in {gloo-fp32,"));
  EXPECT_THAT(RunProgram("bench step --peers gloo-fp32").output,
              HasSubstr("--peers: gloo-fp32 not in {gloo-adamw}, which take whole steps"));
}

TEST(Checkpoint, NeedsOneToExamine) {
  EXPECT_EQ(RunProgram(absl::StrCat("checkpoint verify ", testing::TempDir(), "/none")).exit_code,
            64);
  const Outcome wrong = RunProgram("checkpoint repair /tmp");
  EXPECT_EQ(wrong.exit_code, 64);
  EXPECT_THAT(wrong.output, HasSubstr("inspect"));
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

TEST(Demo, RefusesBadOptionsBeforeItTrains) {
  const struct {
    const char* arguments;
    const char* error;
  } kCases[] = {
      {"--steps 10 --freeze-step 10", "--freeze-step is 10, wanted 1 to 9"},
      {"--steps 1", "--steps is 1, wanted at least 2"},
      {"--workers 0", "--workers"},
      {"--hidden 0", "--hidden is 0"},
      {"--failure-timeout 1ms", "--failure-timeout"},
      {"--text /nowhere/at.all", "/nowhere/at.all"},
      {"--json /nowhere/at.all", "--json: cannot write to '/nowhere/at.all': No such file"},
      {"--output /proc/nowhere", "--output: cannot write to directory '/proc/nowhere'"},
  };
  for (const auto& bad : kCases) {
    const Outcome outcome = RunProgram(absl::StrCat("demo ", bad.arguments));
    EXPECT_EQ(outcome.exit_code, 64) << bad.arguments;
    EXPECT_THAT(outcome.output, HasSubstr(bad.error));
  }
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
