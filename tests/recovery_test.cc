// Aggregators that end and are started again while a job runs over gRPC: no worker notices, and not
// a bit is different. The simulator (tests/simulation) has the rare orders of events; this is the
// real server, network and disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/job.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

JobOptionsForTest Job() {
  JobOptionsForTest job;
  job.steps = 24;
  job.optimizer.freeze_step = 6;
  return job;
}

class RecoveryTest : public ::testing::Test {
 protected:
  RecoveryTest() : state_dir_(absl::StrCat(::testing::TempDir(), "/state")) {
    std::filesystem::remove_all(state_dir_);
  }

  ClusterOptions WithState() const {
    return {.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir_};
  }

  static std::vector<std::vector<float>> TrainUndisturbed(const JobOptionsForTest& job) {
    Cluster cluster({.aggregators = 2});
    return Train(cluster, job);
  }

  const std::string state_dir_;
};

TEST_F(RecoveryTest, KillingEachShardAtThreeStepsChangesNothing) {
  const JobOptionsForTest job = Job();
  const auto expected = TrainUndisturbed(job);
  uint32_t restarts = 0;
  Cluster cluster(WithState());
  const auto results =
      Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        if (rank != 0) return;
        // In the warm-up, at the freeze and in one-bit rounds. The others are in the next step.
        if (step == 2 || step == 5 || step == 15) {
          cluster.Kill(0);
          cluster.Kill(1);
          ++restarts;
        }
      });
  EXPECT_EQ(restarts, 3);
  EXPECT_EQ(results, expected);
}

TEST_F(RecoveryTest, KillsWhileEverybodyIsInTheMiddleOfAStepChangeNothing) {
  const JobOptionsForTest job = Job();
  const auto expected = TrainUndisturbed(job);
  Cluster cluster(WithState());
  absl::Mutex mutex;
  int slowest = 0;
  int steps_of_rank[8] = {};
  std::thread killer([&] {
    for (const int step : {1, 4, 7, 11, 16, 20}) {
      {
        absl::MutexLock lock(&mutex);
        const auto is_there = [&] { return slowest >= step; };
        mutex.Await(absl::Condition(&is_there));
      }
      cluster.Kill(step % 2);
    }
  });
  const auto results =
      Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        absl::MutexLock lock(&mutex);
        steps_of_rank[rank] = step;
        slowest = *std::min_element(steps_of_rank, steps_of_rank + job.workers);
      });
  killer.join();
  EXPECT_EQ(results, expected);
}

TEST_F(RecoveryTest, ARollingRestartChangesNothing) {
  const JobOptionsForTest job = Job();
  const auto expected = TrainUndisturbed(job);
  Cluster cluster(WithState());
  const auto results =
      Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        if (rank != 0) return;
        if (step == 3 || step == 12) cluster.Restart(0);
        if (step == 13) cluster.Restart(1);
      });
  EXPECT_EQ(results, expected);
}

TEST_F(RecoveryTest, NothingIsLeftBehindWhenTheJobIsOver) {
  {
    Cluster cluster(WithState());
    Train(cluster, Job());
    cluster.Restart(0);  // what has been forgotten is removed by then
  }
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat(state_dir_, "/0"))) {
    EXPECT_NE(entry.path().extension(), ".snapshot") << entry.path();
  }
}

TEST_F(RecoveryTest, TwoServersCannotServeOneStateDirectory) {
  ServerOptions options;
  options.state_dir = state_dir_;
  auto first = Server::Start(options);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = Server::Start(options).status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr("another process serves"));
  first->reset();
  EXPECT_TRUE(Server::Start(options).ok());
}

TEST_F(RecoveryTest, AJobWhoseStateIsLostIsRefusedAndNotSilentlyReset) {
  const JobOptionsForTest job = Job();
  Cluster cluster(WithState());
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    absl::Status status;
    for (int step = 0; step < 4 && status.ok(); ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      status = (*worker)->Step(replica.Gradients(), {job.rates}).status();
      if (rank == 0 && step == 1) {
        cluster.Kill(1, [this] { std::filesystem::remove_all(absl::StrCat(state_dir_, "/1")); });
      }
    }
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 of 2"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("not here"));
  });
}

}  // namespace
}  // namespace signpost::testing
