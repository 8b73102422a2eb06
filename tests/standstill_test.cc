// All of a job stands still at once, as in `docker pause` or while its machine is moved, for longer
// than anybody waits for anybody else: it goes on as if nothing had been.

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/demo/worker_result.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "tests/server_process.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

// How long the others are waited for, which a busy machine must not need; and what is longer.
constexpr char kPatience[] = "7s";
constexpr absl::Duration kStandstill = absl::Seconds(10);

// An aggregator that is quick to give connections up, and two ranks of a small training.
class StandstillTest : public ::testing::Test {
 protected:
  // `environment` is what its process has beside the job's.
  std::unique_ptr<ProgramProcess> Start(uint32_t rank, const std::string& environment = "") {
    return std::make_unique<ProgramProcess>(
        absl::StrCat("demo-worker --hidden 8 --layers 1 --steps 20 --results ", directory_),
        absl::StrCat("SIGNPOST_JOB=job SIGNPOST_WORLD_SIZE=2 SIGNPOST_FAILURE_TIMEOUT=1s "
                     "SIGNPOST_AGGREGATORS=",
                     aggregator_.target(), " SIGNPOST_RANK=", rank, " ", environment));
  }

  // Returns when the aggregator waits for rank 1, and for nobody else.
  void AwaitWaitingForRank1() {
    const auto channel = ConnectToAggregator(aggregator_.target(), FailureTimeout());
    while (true) {
      const absl::StatusOr<StatusResponse> status =
          channel->Status({}, SteadyNow() + absl::Seconds(30));
      ASSERT_TRUE(status.ok()) << status.status();
      if (status->jobs_size() != 1) continue;
      const auto& ranks = status->jobs(0).waiting_for_ranks();
      if (std::vector<uint32_t>(ranks.begin(), ranks.end()) == std::vector<uint32_t>{1}) return;
    }
  }

  // With all processes of the job, of which others may have stopped before.
  void StandStill(const std::vector<ProgramProcess*>& ranks) {
    aggregator_.Signal(SIGSTOP);
    for (ProgramProcess* rank : ranks) rank->Signal(SIGSTOP);
    absl::SleepFor(kStandstill);
    aggregator_.Continue();
    for (ProgramProcess* rank : ranks) rank->Continue();
  }

  // The CRC-32C of each rank's parameters at the end.
  std::vector<uint32_t> Results() const {
    std::vector<uint32_t> results;
    for (const uint32_t rank : {0, 1}) {
      const auto result = demo::ReadResult(absl::StrCat(directory_, "/rank-", rank));
      EXPECT_TRUE(result.ok()) << result.status();
      results.push_back(result.ok() ? result->parameters_crc32c : 0);
    }
    return results;
  }

  std::vector<uint32_t> Undisturbed() {
    const auto first = Start(0), second = Start(1);
    EXPECT_EQ(first->End(), 0);
    EXPECT_EQ(second->End(), 0);
    return Results();
  }

  // Rank 1 stops in the middle of a step, for which rank 0 waits; then all others stop.
  std::vector<uint32_t> StandStillInAStep(const std::string& environment) {
    const auto first = Start(0, environment);
    const auto second =
        Start(1, absl::StrCat(environment, " SIGNPOST_FAILPOINT=worker.sending=stop@10"));
    second->AwaitStop();
    AwaitWaitingForRank1();
    StandStill({first.get()});
    second->Continue();
    EXPECT_EQ(first->End(), 0);
    EXPECT_EQ(second->End(), 0);
    return Results();
  }

  const std::string directory_ = [] {
    std::string directory = absl::StrCat(::testing::TempDir(), "/standstill");
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
    return directory;
  }();
  ServerProcess aggregator_{"aggregator --failure-timeout 1s"};
};

TEST_F(StandstillTest, LongerThanTheExchangeTimeoutChangesNoBit) {
  const std::vector<uint32_t> expected = Undisturbed();
  EXPECT_EQ(StandStillInAStep(absl::StrCat("SIGNPOST_EXCHANGE_TIMEOUT=", kPatience)), expected);
}

TEST_F(StandstillTest, LongerThanTheRoundDeadlineMakesNobodyLate) {
  const std::vector<uint32_t> expected = Undisturbed();
  EXPECT_EQ(
      StandStillInAStep(absl::StrCat("SIGNPOST_MIN_WORKERS=1 SIGNPOST_ROUND_DEADLINE=", kPatience)),
      expected);
}

TEST_F(StandstillTest, LongerThanTheJoinTimeoutEndsNoJoin) {
  const auto first = Start(0, absl::StrCat("SIGNPOST_JOIN_TIMEOUT=", kPatience));
  AwaitWaitingForRank1();
  StandStill({first.get()});
  const auto second = Start(1);
  EXPECT_EQ(first->End(), 0);
  EXPECT_EQ(second->End(), 0);
}

// A process of a node whose worker is not there.
class ProcessWithoutWorker : public ProgramProcess {
 public:
  // Returns when it says that it waits.
  explicit ProcessWithoutWorker(const std::string& node)
      : ProgramProcess(
            "demo-worker --hidden 8 --layers 1 --steps 2 2>&1",
            absl::StrCat("SIGNPOST_JOB=job SIGNPOST_WORLD_SIZE=1 SIGNPOST_RANK=0 SIGNPOST_NODE=",
                         node, " SIGNPOST_JOIN_TIMEOUT=", kPatience)) {
    const std::string line = ReadLine();
    EXPECT_NE(line.find("waiting for the worker of this node"), std::string::npos) << line;
  }
};

TEST_F(StandstillTest, LongerThanTheJoinTimeoutEndsNoWaitForTheWorkerOfANode) {
  char socket_directory[] = "/tmp/standstill.XXXXXX";  // its path has to be a short one
  ASSERT_NE(mkdtemp(socket_directory), nullptr);
  const std::string node = absl::StrCat("unix:", socket_directory, "/worker");
  {
    ProcessWithoutWorker process(node);
    StandStill({&process});
    ServerProcess worker(absl::StrCat("worker --processes 1 --rank 0 --world-size 1 --listen ",
                                      node, " --aggregators ", aggregator_.target()));
    EXPECT_EQ(process.End(), 0);
  }
  std::filesystem::remove_all(socket_directory);
}

}  // namespace
}  // namespace signpost::testing
