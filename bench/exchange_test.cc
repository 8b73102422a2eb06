// Exchanges as they are measured, with the program itself as worker and aggregator.

#include "bench/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "bench/costs.h"
#include "bench/hosts.h"
#include "bench/leftovers.h"
#include "bench/line_process.h"
#include "bench/plain_memory.h"
#include "bench/scale.h"
#include "client/session_options.h"
#include "storage/temporary_directory.h"

namespace signpost::bench {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

ExchangeOptions SmallExchange(const std::string& mode, Codec codec) {
  ExchangeOptions options;
  options.program = "cli/signpost";  // tests run where their data is
  options.workers = 2;
  options.shards = 2;
  options.ranks = {{.mode = mode, .codec = codec, .parameters = 50'000}};
  options.turns = 2;
  options.exchanges = 2;
  return options;
}

// Of three exchanges, by a program whose processes exchange nothing, and say what they took: by
// mode, or a peer's name, what each rank says in each turn, the first of which does not count.
// Ranks of packed frames are at work for 10 ms of each exchange; those of steps hold 32 MiB, and
// aggregators 48.
ExchangeOptions PretendedExchange(const std::string& mode, const std::string& answers) {
  ExchangeOptions options = SmallExchange(mode, ONE_BIT);
  options.exchanges = 3;
  options.program = ::testing::TempDir() + "/program.py";
  options.peers_script = options.program;
  std::ofstream(options.program) << R"(#!/usr/bin/python3 -SE
import os, sys, time
if sys.argv[1] == "aggregator":
    held = b"x" * (48 << 20)
    print("listening on 127.0.0.1:1", flush=True)
    sys.exit(sys.stdin.read())
mode = sys.argv[sys.argv.index("--peer" if "--peer" in sys.argv else "--mode") + 1]
if os.environ.get("SIGNPOST_TLS_DIR"):
    mode += ", mTLS"
threads = sys.argv[-1] if "--threads" in sys.argv else os.environ["SIGNPOST_THREADS"]
answers = )" << answers << R"(.get(mode, ["1 1 1"] * 3)
held = b"x" * (32 << 20) if mode == "step" else b""
print("ready", flush=True)
for turn in range(len(answers)):
    if not sys.stdin.readline():
        break
    end = time.process_time() + 3 * (0.05 if turn == 0 else 0.01)
    while mode == "frames" and time.process_time() < end:
        pass
    print(answers[turn], flush=True)
sys.stdin.read()
)";
  chmod(options.program.c_str(), 0700);
  return options;
}

// A program whose command lines a shell script sees before it runs "cli/signpost \"$@\"".
std::string ProgramBehind(const std::string& script) {
  const std::string path = ::testing::TempDir() + "/program.sh";
  std::ofstream(path) << "#!/bin/sh\n" << script << "\nexec cli/signpost \"$@\"\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

// A number that was a process's and is nobody's now.
pid_t GonePid() {
  const pid_t pid = fork();
  if (pid == 0) _exit(0);
  waitpid(pid, nullptr, 0);
  return pid;
}

TEST(Exchange, EachKindTakesTime) {
  for (const auto& [mode, codec] : {std::pair{"frames", ONE_BIT},
                                    {"frames", FLOAT32},
                                    {"mean", ONE_BIT},
                                    {"mean", BFLOAT16},
                                    {"step", ONE_BIT},
                                    {"step", FLOAT32}}) {
    SCOPED_TRACE(mode);
    const absl::StatusOr<Figures> figures = MeasureExchange(SmallExchange(mode, codec));
    ASSERT_TRUE(figures.ok()) << figures.status();
    EXPECT_EQ(figures->figures(0).unit(), "s");
    EXPECT_GT(figures->figures(0).least(), 0);
    EXPECT_GT(figures->figures(0).bound(), 0) << "what plain TCP takes";
    EXPECT_GT(figures->figures(0).of_bound(), 0);
  }
}

TEST(Exchange, AStepIsHeldAgainstTheMemoryOfOneMachineToo) {
  const absl::StatusOr<Figures> figures = MeasureExchange(SmallExchange("step", ONE_BIT));
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->figures_size(), 3);
  const Figure& step = figures->figures(2);
  EXPECT_EQ(step.name(), "optimizer step, one-bit: on one machine");
  EXPECT_EQ(step.value(), figures->figures(0).value());
  EXPECT_GT(step.bound(), 0);
  EXPECT_GT(step.of_bound(), 0);
}

TEST(Exchange, EachOptimizerHasSteps) {
  for (const auto& [optimizer, name] :
       {std::pair{StepOptimizer::kAdam, "optimizer step, one-bit"},
        {StepOptimizer::kLamb, "optimizer step, OneBitLamb, one-bit"},
        {StepOptimizer::kZeroOneAdam, "optimizer step, ZeroOneAdam, one-bit"}}) {
    ExchangeOptions options = SmallExchange("step", ONE_BIT);
    options.ranks[0].optimizer = optimizer;
    const absl::StatusOr<Figures> figures = MeasureExchange(options);
    ASSERT_TRUE(figures.ok()) << figures.status();
    EXPECT_EQ(figures->figures(0).name(), name);
    EXPECT_GT(figures->figures(0).least(), 0);
  }
  EXPECT_EQ(StepsPerExchange({.mode = "step", .optimizer = StepOptimizer::kZeroOneAdam}), 16);
  EXPECT_EQ(StepsPerExchange({.mode = "step"}), 1);
  EXPECT_EQ(StepsPerExchange({.mode = "mean", .optimizer = StepOptimizer::kZeroOneAdam}), 1);
}

TEST(Exchange, TheFirstTurnDoesNotCount) {
  const std::string answers = R"({"frames": ["900 900 900", "1 9 2", "4 0.5 4"],
                                  "tcp": ["900 900 900", "1 1 1", "1 1 1"]})";
  const absl::StatusOr<Figures> figures = MeasureExchange(PretendedExchange("frames", answers));
  ASSERT_TRUE(figures.ok()) << figures.status();
  const Figure& time = figures->figures(0);
  EXPECT_DOUBLE_EQ(time.value(), (2 + 4) / 2.0);
  EXPECT_EQ(time.least(), 0.5) << "of all exchanges";
  EXPECT_EQ(time.most(), 9);
  EXPECT_EQ(time.bound(), 1);
  EXPECT_DOUBLE_EQ(time.of_bound(), (1 / 2.0 + 1 / 4.0) / 2);
}

TEST(Exchange, StepsBetweenSynchronisationsShareAnExchange) {
  ExchangeOptions options =
      PretendedExchange("step", R"({"step": ["32 32 32"] * 3, "tcp": ["8 8 8"] * 3})");
  options.ranks[0].optimizer = StepOptimizer::kZeroOneAdam;
  absl::StatusOr<Figures> figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_EQ(figures->figures(0).value(), 32 / 16.0);
  EXPECT_EQ(figures->figures(0).most(), 32 / 16.0);
  EXPECT_EQ(figures->figures(0).bound(), 8 / 16.0);
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  options.rate = "1gbit";
  figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_DOUBLE_EQ(figures->figures(0).bound(), LinkBound(options.ranks[0], 2, 2, 1e9) / 16);
}

TEST(Exchange, ProcessorTimeIsForEachByteThatEitherSideSends) {
  const absl::StatusOr<Figures> figures = MeasureExchange(PretendedExchange("frames", "{}"));
  ASSERT_TRUE(figures.ok()) << figures.status();
  const Figure& time = figures->figures(1);
  EXPECT_EQ(time.name(), "packed frames, one-bit: processor time");
  // Of two workers 10 ms each, for what they send and what they are sent.
  const double wanted = 2 * 0.01 / (2 * 2 * 50'000 * (1 + 32.0 / 4096) / 8 / 1e9);
  EXPECT_GE(time.least(), wanted);
  EXPECT_LT(time.most(), 3 * wanted) << "with all else that the processes do";
}

TEST(Exchange, MemoryIsThatOfWorkersAndAggregators) {
  const absl::StatusOr<Figures> figures = MeasureExchange(PretendedExchange("step", "{}"));
  ASSERT_TRUE(figures.ok()) << figures.status();
  const Figure& memory = figures->figures(1);
  EXPECT_EQ(memory.name(), "optimizer step, one-bit: memory of all");
  const double held = 2 * (32 + 48) * 1048576 / 1e9;
  EXPECT_GE(memory.value(), held);
  EXPECT_LT(memory.value(), held + 4 * 0.032) << "with what Python takes";
}

TEST(Exchange, SeveralKindsTakeTurnsWithAPeer) {
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.ranks.push_back(options.ranks[0]);
  options.ranks[1].mode = "mean";
  options.peers = {"sleeper"};
  options.python = "/bin/sh";
  options.threads = 3;
  options.peers_script = ::testing::TempDir() + "/peer.sh";
  FILE* const script = fopen(options.peers_script.c_str(), "w");
  fputs(
      "test \"$*\" = '--peer sleeper --parameters 50000 --threads 3' || exit 1\n"
      "test \"$OMP_NUM_THREADS\" = 3 || exit 1\n"
      "test \"$WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME\" = '2 127.0.0.1 lo' || exit 1\n"
      "echo ready; while read n; do echo \"100 100.$RANK\"; done",
      script);
  fclose(script);
  const absl::StatusOr<Figures> figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->figures_size(), 4);
  EXPECT_EQ(figures->figures(0).peer(), "sleeper");
  EXPECT_GT(figures->figures(0).times_faster(), 1);
  EXPECT_THAT(figures->figures(1).name(), HasSubstr("processor time"));
  EXPECT_EQ(figures->figures(2).peer(), "sleeper");
  EXPECT_EQ(figures->figures(3).name(), "sleeper");
  EXPECT_EQ(figures->figures(3).peer(), "gradients to mean, one-bit");
  EXPECT_LT(figures->figures(3).times_faster(), 1);
  EXPECT_DOUBLE_EQ(figures->figures(3).value(), (100 + 100.1) / 2) << "that of the slowest rank";
}

TEST(Exchange, OursAreComparedWithTheFirstPeerAndEachPeerWithWhatDoesTheSame) {
  ExchangeOptions options = PretendedExchange(
      "frames", R"({"frames": ["1 1 1", "2 2 2", "4 4 4"], "mean": ["1 1 1", "4 4 4", "16 16 16"],
                    "a": ["1 1 1", "10 10 10", "40 40 40"],
                    "b": ["1 1 1", "40 40 40", "16 16 16"]})");
  options.peers = {"a", "b"};
  absl::StatusOr<Figures> figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->figures_size(), 4);
  EXPECT_EQ(figures->figures(3).peer(), "packed frames, one-bit") << "there is nothing else";
  EXPECT_DOUBLE_EQ(figures->figures(3).times_faster(), (2 / 40.0 + 4 / 16.0) / 2);
  options.ranks.push_back(options.ranks[0]);
  options.ranks[1].mode = "mean";
  figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->figures_size(), 5);
  const Figure& frames = figures->figures(0);
  EXPECT_EQ(frames.peer(), "a");
  EXPECT_DOUBLE_EQ(frames.times_faster(), (10 / 2.0 + 40 / 4.0) / 2);
  const Figure& mean = figures->figures(2);
  EXPECT_EQ(mean.peer(), "a");
  EXPECT_DOUBLE_EQ(mean.times_faster(), (10 / 4.0 + 40 / 16.0) / 2);
  EXPECT_EQ(figures->figures(3).name(), "a");
  EXPECT_EQ(figures->figures(3).peer(), "gradients to mean, one-bit");
  EXPECT_DOUBLE_EQ(figures->figures(3).times_faster(), (4 / 10.0 + 16 / 40.0) / 2);
  EXPECT_EQ(figures->figures(4).name(), "b");
  EXPECT_DOUBLE_EQ(figures->figures(4).times_faster(), (4 / 40.0 + 16 / 16.0) / 2);
}

TEST(Exchange, APeersRanksHaveAsManyThreadsAsOurs) {
  for (const uint32_t workers : {1, 2}) {
    for (const uint32_t threads : {0, 5}) {
      ExchangeOptions options = PretendedExchange(
          "mean",
          R"({"mean": [" ".join([threads] * 3)] * 3, "teller": [" ".join([threads] * 3)] * 3})");
      options.peers = {"teller"};
      options.workers = workers;
      options.threads = threads;
      const absl::StatusOr<Figures> figures = MeasureExchange(options);
      ASSERT_TRUE(figures.ok()) << figures.status();
      const uint32_t wanted = threads > 0 ? threads : ShareOfProcessors(workers);
      EXPECT_EQ(figures->figures(0).value(), wanted);
      EXPECT_EQ(figures->figures(1).name(), "teller");
      EXPECT_EQ(figures->figures(1).value(), wanted);
    }
  }
}

TEST(Exchange, WithMtlsIsComparedWithPlainText) {
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.tls = true;
  const absl::StatusOr<Figures> figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->figures_size(), 4);
  EXPECT_EQ(figures->figures(0).peer(), "");
  EXPECT_THAT(figures->figures(2).name(), HasSubstr(", mTLS"));
  EXPECT_EQ(figures->figures(2).peer(), "plain text");
  EXPECT_GT(figures->figures(2).times_faster(), 0);
}

TEST(Exchange, WithMtlsItIsAsManyTimesFasterAsThePairsAre) {
  ExchangeOptions options = PretendedExchange(
      "frames",
      R"({"frames": ["1 1 1", "2 2 2", "4 4 4"], "frames, mTLS": ["1 1 1", "4 4 4", "16 16 16"]})");
  options.tls = true;
  const absl::StatusOr<Figures> figures = MeasureExchange(options);
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_EQ(figures->figures(2).peer(), "plain text");
  EXPECT_DOUBLE_EQ(figures->figures(2).times_faster(), (2 / 4.0 + 4 / 16.0) / 2);
}

TEST(Exchange, WhatEndsIsNamed) {
  ExchangeOptions options = SmallExchange("frames", BFLOAT16);
  absl::Status status = MeasureExchange(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--mode frames"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("ended with exit code 64"));
  options = SmallExchange("frames", ONE_BIT);
  options.program = "/bin/echo";
  status = MeasureExchange(options).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("an aggregator says 'aggregator"));
}

TEST(Exchange, AnAggregatorThatEndsIsNamedAtOnce) {
  ExchangeOptions options = SmallExchange("mean", ONE_BIT);
  options.program = ProgramBehind(
      "case \"$*\" in aggregator*1/2) (sleep 2; kill -KILL $$) >/dev/null 2>&1 & esac");
  options.turns = 1'000'000;
  const absl::Time start = absl::Now();
  const absl::Status status = MeasureExchange(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--shard 1/2' was killed by SIGKILL"));
  EXPECT_LT(absl::Now() - start, absl::Minutes(1)) << "for which a rank tries";
}

TEST(Exchange, SaysForWhomItWaitsAndNotForLong) {
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.program = ProgramBehind(
      "case \"$2 $SIGNPOST_RANK\" in 'rank 1') echo ready; read line; kill -STOP $$; esac");
  options.exchanges = 1000;
  options.longest_silence = absl::Seconds(10);
  options.patience = absl::Seconds(1);
  options.ranks[0].mode = "memory";  // none needs the others
  ::testing::internal::CaptureStderr();
  const absl::Status status = MeasureExchange(options).status();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--chunk-elements 0' in 10s"));
  EXPECT_THAT(said, ContainsRegex("no answer for 1s from '.*': waiting for .*rank 1 .process "
                                  "[0-9]+, stopped"));
  const std::vector<std::string> around_it = absl::StrSplit(said, ", stopped");
  EXPECT_EQ(around_it.size(), 2) << "it is said once";
}

// Which would be over new connections then.
TEST(Exchange, AProcessThatDoesNotComeToAnswerIsNotDisconnected) {
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  const std::string file = ::testing::TempDir() + "/timeouts";
  std::filesystem::remove(file);
  options.program = ProgramBehind("echo $1 $SIGNPOST_FAILURE_TIMEOUT >>" + file);
  const absl::Status status = MeasureExchange(options).status();
  EXPECT_TRUE(status.ok()) << status;
  std::ostringstream timeouts;
  timeouts << std::ifstream(file).rdbuf();
  EXPECT_EQ(timeouts.str(), "aggregator 10m\naggregator 10m\nbench 10m\nbench 10m\nbench 10m\n");
}

TEST(Exchange, WhatWasKilledLeavesNothingForLong) {
  const std::string gone = TemporaryPrefix(NamePrefix(GonePid())) + "-abcdef";
  const std::string of_another = TemporaryPrefix(NamePrefix(getppid())) + "-abcdef";
  std::filesystem::create_directories(gone + "/certificates");
  std::filesystem::create_directory(of_another);
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.program = "/bin/echo";
  EXPECT_FALSE(MeasureExchange(options).ok());
  EXPECT_FALSE(std::filesystem::exists(gone));
  EXPECT_TRUE(std::filesystem::remove(of_another)) << "that process runs";
}

TEST(Exchange, WhatHasNoRoomIsNotStarted) {
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.ranks.push_back(options.ranks[0]);
  options.ranks[1].mode = "mean";
  options.peers = {"sleeper"};
  const double payloads = 2 * (1 + 32.0 / 4096) / 8;
  const double plain_tcp = 2 * payloads;
  EXPECT_NEAR(LeastMemory(options),
              9 * 5e6 + 50'000 * ((2 * payloads + 4) + (2 * 8 + 4) + 2 * 4 + plain_tcp), 1);
  options.ranks = {{.mode = "step", .codec = FLOAT32, .parameters = 50'000}};
  // What changes a step's bytes in place has room for half of them.
  const auto plain_memory = [&] {
    return static_cast<uint64_t>(*StepBytes(options.ranks[0], 2) / 2);
  };
  EXPECT_EQ(LeastMemory(options), 8 * 5e6 + 50'000 * (2 * 12 + 2 * 4 + 2 * 8) + plain_memory());
  options.ranks[0].optimizer = StepOptimizer::kLamb;
  EXPECT_EQ(LeastMemory(options), 8 * 5e6 + 50'000 * (2 * 12 + 2 * 4 + 2 * 8) + plain_memory())
      << "no freeze";
  options.ranks[0].optimizer = StepOptimizer::kZeroOneAdam;
  EXPECT_EQ(LeastMemory(options), 7 * 5e6 + 50'000 * (2 * 20 + 2 * 4 + 2 * 8));
  options.ranks[0].codec = ONE_BIT;
  EXPECT_NEAR(LeastMemory(options), 7 * 5e6 + 50'000 * ((2 * 24 + 4) + 2 * 4 + plain_tcp), 1);
  options.ranks[0].optimizer = StepOptimizer::kLamb;
  EXPECT_NEAR(LeastMemory(options),
              8 * 5e6 + 50'000 * ((2 * 16 + 4) + 2 * 4 + plain_tcp) + plain_memory(), 1);
  options.ranks[0] = {.mode = "step", .codec = FLOAT32, .parameters = 50'000};
  options.rate = "1gbit";
  EXPECT_EQ(LeastMemory(options), 7 * 5e6 + 50'000 * (2 * 12 + 2 * 4) + plain_memory())
      << "no plain TCP";
  options.ranks[0].parameters = uint64_t{1} << 59;
  EXPECT_EQ(LeastMemory(options), 1e18) << "more than a number of 64 bits counts";
  options.program = "/nowhere";
  options.workers = 100'000;
  options.ranks[0].parameters = 1'000'000'000;
  const absl::Status status = MeasureExchange(options).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("fewer --workers or --parameters"));
}

TEST(Exchange, TheBusierOfLinksIsTheBound) {
  const RankOptions rank = {.parameters = 340'000'000};  // 168 chunks
  const double bits = 340e6 * (1 + 32.0 / 4096);
  EXPECT_DOUBLE_EQ(LinkBound(rank, 4, 4, 1e9), bits / 1e9);
  EXPECT_DOUBLE_EQ(LinkBound(rank, 4, 8, 1e9), bits / 1e9) << "a worker's";
  EXPECT_DOUBLE_EQ(LinkBound(rank, 4, 2, 1e9), 2 * bits / 1e9) << "an aggregator's";
  const RankOptions dense = {.codec = FLOAT32, .parameters = 340'000'000};
  EXPECT_DOUBLE_EQ(LinkBound(dense, 4, 4, 1e9), 10.88);
}

TEST(Exchange, TheBusiestLinkIsThatOfTheAggregatorWithMostChunks) {
  const auto bits = [](double parameters) { return parameters * (1 + 32.0 / 4096); };
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 780'000}, 4, 4, 1e8), 4 * bits(780'000) / 1e8)
      << "one chunk: a lone aggregator has all of four workers'";
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 1'000'000}, 4, 4, 1e9), 4 * bits(500'000) / 1e9)
      << "two chunks: two aggregators have one each";
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 1'000'000}, 1, 4, 1e9), bits(1'000'000) / 1e9)
      << "a worker's";
  // Of eight chunks.
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 4'000'000}, 5, 5, 1e8), 5 * 2 * bits(500'000) / 1e8);
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 4'000'000}, 4, 3, 1e8), 4 * 3 * bits(500'000) / 1e8);
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 4'000'000}, 4, 4, 1e8), bits(4'000'000) / 1e8);
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 780'000, .chunk_elements = 65'536}, 4, 4, 1e8),
                   bits(780'000) / 1e8)
      << "twelve chunks";
  EXPECT_DOUBLE_EQ(LinkBound({.parameters = 1'000'000'000}, 4, 4, 1e9),
                   4 * bits(1e9) * 120 / 479 / 1e9)
      << "479 chunks";
}

TEST(Exchange, TheBoundIsTheBusiestLinkThatIsPlayed) {
  for (const uint64_t parameters : {50'000, 780'000, 1'000'000, 4'000'000, 25'000'000}) {
    for (const uint32_t workers : {1, 3, 4, 8}) {
      for (const uint32_t shards : {1, 2, 3, 5, 8}) {
        const Cluster cluster = {
            .link_bits_per_s = 1e9, .workers = workers, .shards = shards, .chunk_elements = 0};
        EXPECT_DOUBLE_EQ(
            LinkBound({.parameters = parameters}, workers, shards, 1e9),
            PlayExchange(cluster, parameters, OneBitCosts(), MeasuredTransportCosts()).link_s)
            << parameters << " parameters, " << workers << " workers, " << shards << " shards";
      }
    }
  }
}

TEST(Exchange, BehindLinksItTakesWhatTheyTake) {
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  ExchangeOptions options = SmallExchange("frames", FLOAT32);
  options.ranks[0].parameters = 2'200'000;  // four chunks, two for each shard
  options.rate = "50mbit";
  options.turns = 1;
  options.exchanges = 1;
  ::testing::internal::CaptureStderr();
  const absl::StatusOr<Figures> figures = MeasureExchange(options);
  const std::string said = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(figures.ok()) << figures.status();
  const bool may_choose_cubic = std::system(
                                    "unshare --net sh -c 'echo cubic "
                                    ">/proc/sys/net/ipv4/tcp_congestion_control'") == 0;
  EXPECT_EQ(absl::StrContains(said, "does not let network namespaces choose cubic"),
            !may_choose_cubic);
  EXPECT_THAT(said, Not(HasSubstr("plain text"))) << "nobody is on the hosts' network";
  const Figure& time = figures->figures(0);
  EXPECT_DOUBLE_EQ(time.bound(), 2'200'000 * 32 / 50e6);
  // Each of the four links on the way lets 256 KiB through at once.
  const double free = 4 * 262144 * 8 / 50e6;
  EXPECT_GT(time.value(), time.bound() - free);
  EXPECT_EQ(std::system("ip netns list | grep -q signpost-bench-$PPID-"), 256) << "they are gone";
}

TEST(Exchange, SaysWhenWhatAnIdleLinkLetsThroughIsMuchOfATurn) {
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  ExchangeOptions options = SmallExchange("frames", ONE_BIT);
  options.rate = "50mbit";
  options.turns = 1;
  ::testing::internal::CaptureStderr();
  const absl::StatusOr<Figures> figures = MeasureExchange(options);
  const std::string said = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_THAT(said, HasSubstr("lets 256 KiB through at once, more than a tenth of what it carries "
                              "in a turn (2 exchanges of 13 KB)"));
}

TEST(Exchange, BehindLinksWhatFailsIsHeard) {
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  ExchangeOptions options = SmallExchange("frames", BFLOAT16);
  options.rate = "50mbit";
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(MeasureExchange(options).ok());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("there are no exchanges of frames as bf16"));
}

TEST(Hosts, TakeDownThoseOfProcessesThatAreGone) {
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  const std::string gone = NamePrefix(GonePid()) + "-switch";
  const std::string of_another = NamePrefix(getppid()) + "-switch";
  for (const std::string& name : {gone, of_another}) {
    ASSERT_EQ(std::system(absl::StrCat("ip netns add ", name).c_str()), 0);
  }
  EXPECT_TRUE(Hosts::Create(1, "1gbit").ok());
  EXPECT_EQ(std::system(absl::StrCat("ip netns list | grep -q ", gone).c_str()), 256);
  EXPECT_EQ(std::system(absl::StrCat("ip netns delete ", of_another).c_str()), 0)
      << "that process runs";
}

// As a terminal sends it: to the shells that make and delete the namespaces as well.
TEST(Hosts, AreTakenDownHoweverOftenTheyAreInterrupted) {
  if (!Hosts::Create(1, "1gbit").ok()) GTEST_SKIP() << "no network namespaces with tbf here";
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    const InterruptScope scope;
    pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
    const bool is_made = Hosts::Create(4, "1gbit").ok();
    _exit(is_made ? 0 : 1);
  }
  pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    kill(-child, SIGINT);
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(status, 0) << "what was made in between is whole";
  const std::string list = absl::StrCat("ip netns list | grep -q signpost-bench-", child, "-");
  EXPECT_EQ(std::system(list.c_str()), 256) << "they are gone";
}

}  // namespace
}  // namespace signpost::bench
