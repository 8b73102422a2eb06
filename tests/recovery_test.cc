// Aggregators that end and are started again while a job runs over gRPC: no worker notices, and not
// a bit is different. The simulator (tests/simulation) has the rare orders of events; this is the
// real server, network and disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/simulated_gpu.h"
#include "proto/exit_code.h"
#include "server/server.h"
#include "storage/disk.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"

namespace signpost::testing {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

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

class RecoveryOfTest : public RecoveryTest, public ::testing::WithParamInterface<NamedOptimizer> {};

TEST_P(RecoveryOfTest, KillingEachShardAtThreeStepsChangesNothing) {
  JobOptionsForTest job = Job();
  job.optimizer = GetParam().options;
  UseExampleCodec(job.worker);
  const auto expected = TrainUndisturbed(job);
  kernels::cuda::SimulatedGpu gpu(/*seed=*/1);
  job.gpu_of = [&](uint32_t rank) { return rank == 1 ? &gpu : nullptr; };
  uint32_t restarts = 0;
  Cluster cluster(WithState());
  const auto results =
      Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        if (rank != 0) return;
        // In the warm-up, at the freeze and in rounds after it, with 0/1 Adam in a local interval.
        // The others are in the next step.
        if (step == 2 || step == 5 || step == 15) {
          cluster.Kill(0);
          cluster.Kill(1);
          ++restarts;
        }
      });
  EXPECT_EQ(restarts, 3);
  EXPECT_EQ(results, expected);
}

constexpr LambOptions kLamb;
// Steps 0, 1 and 3 update the variance; 6, 7, 9, 13 and 17 end intervals.
constexpr ZeroOneOptions kZeroOne = {
    .var_update_scaler = 1, .local_step_scaler = 2, .local_step_clipper = 4};
// As DeepSpeed has it 6, 7, 9, 11, 14 and 17 end them.
constexpr ZeroOneOptions kZeroOneAsDeepSpeed = {
    .var_update_scaler = 1, .local_step_scaler = 2, .local_step_clipper = 3};

constexpr auto NameOf = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(Each, RecoveryOfTest,
                         ::testing::ValuesIn(EachOptimizerWithEachCodec(6, kZeroOne)), NameOf);

INSTANTIATE_TEST_SUITE_P(
    Other, RecoveryOfTest,
    ::testing::Values(
        NamedOptimizer{"OneBitAdamWithARefreshedVariance",
                       {.freeze_step = 6, .variance_refresh_interval = 3}},
        NamedOptimizer{"OneBitAdamInFp32WithAVarianceRefreshedInInt8",
                       {.freeze_step = 6,
                        .codec = FLOAT32,
                        .variance_codec = INT8,
                        .variance_refresh_interval = 3}},
        NamedOptimizer{"Adam", {}},
        NamedOptimizer{
            "OneBitLambInFp32WithARefreshedVariance",
            {.freeze_step = 6, .codec = FLOAT32, .variance_refresh_interval = 3, .lamb = kLamb}},
        NamedOptimizer{"Lamb", {.lamb = kLamb}},
        NamedOptimizer{"OneBitAdamAsDeepSpeed",
                       {.bias_correction = false,
                        .freeze_step = 6,
                        .variance_floor = 0,
                        .as_deepspeed = true}},
        NamedOptimizer{"ZeroOneAdamAsDeepSpeed",
                       {.bias_correction = false,
                        .freeze_step = 6,
                        .variance_floor = 0,
                        .zero_one = kZeroOneAsDeepSpeed,
                        .as_deepspeed = true}}),
    NameOf);

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

// Of this process to that port.
int ConnectionsTo(const std::string& target) {
  int port = 0, connections = 0;
  EXPECT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port));
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    sockaddr_in6 peer = {};  // of an IPv4 socket too the port is there
    socklen_t size = sizeof peer;
    const int fd = std::atoi(entry.path().filename().c_str());
    const bool is_connected = getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
    if (is_connected && ntohs(peer.sin6_port) == port) ++connections;
  }
  return connections;
}

TEST_F(RecoveryTest, SeveralConnectionsToEachShardChangeNothingNorDoKillsThen) {
  JobOptionsForTest job = Job();
  job.worker.chunk_elements = 16;  // several for each connection
  const auto expected = TrainUndisturbed(job);
  ClusterOptions options = WithState();
  options.connections = 3;
  Cluster cluster(options);
  const auto results =
      Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
        if (rank != 0) return;
        if (step == 4 || step == 14) {
          for (const std::string& target : cluster.targets()) {
            EXPECT_EQ(ConnectionsTo(target), 3 * job.workers) << step;
          }
        }
        if (step == 5 || step == 9) cluster.Kill(step % 2);
      });
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

// What a job whose aggregator comes back without what it had written down ends with.
class LostStateTest : public RecoveryTest {
 protected:
  // Trains, takes a checkpoint after step 8, loses shard 1's state after step 15, and ends.
  // Returns what each rank is told.
  std::vector<absl::Status> TrainUntilLost(Cluster& cluster, const JobOptionsForTest& job,
                                           const std::function<void()>& lose) {
    std::vector<absl::Status> told(job.workers);
    std::vector<std::unique_ptr<Replica>> replicas(job.workers);
    std::vector<std::unique_ptr<Worker>> workers(job.workers);
    OnEachRank(job.workers, [&](uint32_t rank) {
      replicas[rank] = std::make_unique<Replica>(job, rank);
      Replica& replica = *replicas[rank];
      workers[rank] = Join(cluster, job, rank, replica);
      for (int step = 0; step < job.steps && told[rank].ok(); ++step) {
        if (step == 8) {
          const absl::Status saved = workers[rank]->Checkpoint(*checkpoints_);
          EXPECT_TRUE(saved.ok()) << saved;
        }
        replica.gradient = GradientOf(rank, step, replica.values.size());
        told[rank] = workers[rank]->Step(replica.Gradients(), {job.rates}).status();
        if (rank == 0 && step == 15) cluster.Kill(1, lose);
      }
    });
    for (const std::unique_ptr<Worker>& worker : workers) EXPECT_TRUE(worker->Leave().ok());
    return told;
  }

  // Goes on from the checkpoint in the same aggregators, to the end.
  std::vector<std::vector<float>> Resume(Cluster& cluster, const JobOptionsForTest& job) {
    std::vector<std::vector<float>> results(job.workers);
    OnEachRank(job.workers, [&](uint32_t rank) {
      Replica replica(job, rank);
      auto worker = Join(cluster, job, rank, replica, checkpoints_.get());
      EXPECT_EQ(worker->steps(), 8);
      for (int step = 8; step < job.steps; ++step) {
        replica.gradient = GradientOf(rank, step, replica.values.size());
        EXPECT_TRUE(worker->Step(replica.Gradients(), {job.rates}).ok());
      }
      results[rank] = replica.values;
    });
    return results;
  }

  static std::unique_ptr<Worker> Join(Cluster& cluster, const JobOptionsForTest& job, uint32_t rank,
                                      Replica& replica, Disk* resume_from = nullptr) {
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect(),
                               {.checkpoints = resume_from});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }

  const std::string lost_ = state_dir_ + "/1";
  const std::unique_ptr<Disk> checkpoints_ = [this] {
    EXPECT_TRUE(MakeDirectory(state_dir_ + "/checkpoints").ok());
    return OpenDirectory(state_dir_ + "/checkpoints");
  }();
};

TEST_F(LostStateTest, OfALostVolumeAllWorkersAreToldAndTheNewestCheckpointGoesOnWithTheSameBits) {
  const JobOptionsForTest job = Job();
  const auto expected = TrainUndisturbed(job);
  Cluster cluster(WithState());
  const auto told = TrainUntilLost(cluster, job, [&] { std::filesystem::remove_all(lost_); });
  for (const absl::Status& status : told) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_EQ(ExitCodeOf(status), 65);
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 of 2"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("Has it lost its volume"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("from its newest checkpoint"));
  }
  EXPECT_EQ(Resume(cluster, job), expected);
}

TEST_F(LostStateTest, IsNotTakenForAJobThatOthersHaveLeft) {
  JobOptionsForTest job = Job();
  job.workers = 1;
  Cluster cluster(WithState());
  Replica replica(job, 0);
  const auto worker = Join(cluster, job, 0, replica);
  EXPECT_EQ(worker->Outlook(), JobOutlook::kGoesOn);
  cluster.Kill(1, [&] { std::filesystem::remove_all(lost_); });
  const absl::Status told = worker->Step(replica.Gradients(), {job.rates}).status();
  EXPECT_TRUE(absl::IsDataLoss(told)) << told;
  EXPECT_EQ(worker->Outlook(), JobOutlook::kGoesOn);
}

class LeaveCountingChannel final : public ForwardingChannel {
 public:
  LeaveCountingChannel(std::unique_ptr<Channel> inner, std::atomic<int>& leaves)
      : ForwardingChannel(std::move(inner)), leaves_(leaves) {}

  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    ++leaves_;
    return ForwardingChannel::Leave(request, deadline);
  }

 private:
  std::atomic<int>& leaves_;
};

TEST_F(LostStateTest, OfAVolumeThatWasRolledBackAllWorkersAreToldAndLeaveAtOnce) {
  JobOptionsForTest job = Job();
  job.workers = 2;
  Cluster cluster({.transport = Transport::kGrpc, .state_dir = state_dir_});
  const std::string volume = state_dir_ + "/0", earlier = state_dir_ + "/earlier";
  std::atomic<int> leaves = 0;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(
        std::make_unique<LeaveCountingChannel>(std::move(cluster.Connect()[0]), leaves));
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    absl::Status told;
    for (int step = 0; step < job.steps && told.ok(); ++step) {
      // While nobody writes there. The other rank waits for this one meanwhile.
      if (rank == 0 && step == 1) {
        cluster.Kill(0, [&] { std::filesystem::copy(volume, earlier); });
      }
      if (rank == 0 && step == 20) {
        cluster.Kill(0, [&] {
          std::filesystem::remove_all(volume);
          std::filesystem::copy(earlier, volume);
        });
      }
      told = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    }
    EXPECT_TRUE(absl::IsDataLoss(told)) << told;
    EXPECT_EQ(ExitCodeOf(told), 65);
    EXPECT_THAT(std::string(told.message()), HasSubstr("older state than it had promised to keep"));
    const absl::Status left = (*worker)->Leave();
    EXPECT_TRUE(absl::IsDataLoss(left)) << left;
  });
  EXPECT_LE(leaves, 2 * 3);
}

TEST_F(LostStateTest, OfAJobThatIsGivenUpLikewise) {
  const JobOptionsForTest job = Job();
  const auto expected = TrainUndisturbed(job);
  ClusterOptions options = WithState();
  options.allow_error_reset = true;
  Cluster cluster(options);
  const auto told = TrainUntilLost(cluster, job, [&] {
    for (const auto& entry : std::filesystem::directory_iterator(lost_)) {
      if (entry.path().extension() == ".snapshot") std::filesystem::resize_file(entry.path(), 9);
    }
  });
  for (const absl::Status& status : told) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--allow-error-reset has given it up"));
  }
  const auto status = cluster.Connect()[1]->Status({}, absl::Now() + absl::Seconds(10));
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_THAT(status->warnings(), Contains(HasSubstr("is given up")));
  EXPECT_THAT(status->warnings(), Each(Not(HasSubstr(lost_)))) << "peers need no paths";
  EXPECT_EQ(Resume(cluster, job), expected);
}

}  // namespace
}  // namespace signpost::testing
