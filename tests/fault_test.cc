// Workers that never come, stop, or bring another model: every other process gets an error that
// names them within its deadline, and nothing hangs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/exit_code.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "storage/disk.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/server_process.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(2);
// A deadline is kept if the call ends by then: asking whom the aggregator waits for may take 3 s
// more, and this machine may be busy.
const absl::Duration kLate = kTimeout + absl::Seconds(20);

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class FaultTest : public ::testing::TestWithParam<Transport> {
 protected:
  FaultTest() : cluster_({.transport = GetParam(), .aggregators = 2}) {
    job_.worker.join_timeout = kTimeout;
    job_.worker.exchange_timeout = kTimeout;
  }

  absl::StatusOr<std::unique_ptr<Worker>> Join(uint32_t rank, Replica& replica) {
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    return Worker::Join(options, job_.optimizer, replica.Parameters(), cluster_.Connect());
  }

  // Returns once `rank` is a member of the job at the first aggregator.
  void AwaitMember(uint32_t rank) {
    auto channels = cluster_.Connect();
    while (true) {
      auto status = channels[0]->Status({}, absl::Now() + absl::Seconds(30));
      ASSERT_TRUE(status.ok()) << status.status();
      for (const JobStatus& job : status->jobs()) {
        for (uint32_t joined : job.joined_ranks()) {
          if (joined == rank) return;
        }
      }
    }
  }

  JobOptionsForTest job_;
  Cluster cluster_;
};

TEST_P(FaultTest, AWorkerThatNeverJoinsIsNamedByAllOthers) {
  const absl::Time start = absl::Now();
  OnEachRank(job_.workers - 1, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker = Join(rank, replica);
    EXPECT_EQ(worker.status().code(), absl::StatusCode::kDeadlineExceeded) << worker.status();
    EXPECT_THAT(Message(worker.status()),
                AllOf(HasSubstr("waiting for rank 3"), HasSubstr("'test'")));
  });
  EXPECT_LT(absl::Now() - start, kLate);
}

TEST_P(FaultTest, AWorkerThatDiesIsNamedByAllOthers) {
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker = Join(rank, replica);
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < 3; ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job_.rates}).ok());
    }
    if (rank == 2) return;  // without leaving
    const absl::Time start = absl::Now();
    auto report = (*worker)->Step(replica.Gradients(), {job_.rates});
    EXPECT_EQ(report.status().code(), absl::StatusCode::kDeadlineExceeded) << report.status();
    EXPECT_THAT(Message(report.status()),
                AllOf(HasSubstr("step 3"), HasSubstr("waiting for rank 2")));
    EXPECT_LT(absl::Now() - start, kLate);
    // Parts of that step may have been taken: another one would take them twice.
    const absl::Status again = (*worker)->Step(replica.Gradients(), {job_.rates}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(again)) << again;
    EXPECT_THAT(Message(again), AllOf(HasSubstr("earlier step failed"), HasSubstr("rank 2")));
    // It is no mismatch: whoever starts the process again does well.
    EXPECT_EQ(ExitCodeOf(again), kExitTryAgain);
    EXPECT_EQ(ExitCodeOf((*worker)->SaveState().status()), kExitTryAgain);
  });
}

TEST_P(FaultTest, AWorkerThatIsInterruptedWaitsNoLongerAndTheOthersAreTold) {
  job_.workers = 2;
  job_.worker.exchange_timeout = absl::Minutes(10);
  absl::Notification has_left;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    int asked = 0;
    if (rank == 0) options.is_interrupted = [&asked] { return ++asked == 2; };
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), cluster_.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) has_left.WaitForNotificationWithTimeout(absl::Minutes(1));
    const absl::Status status = (*worker)->Step(replica.Gradients(), {job_.rates}).status();
    if (rank == 1) {
      EXPECT_THAT(Message(status), HasSubstr("rank 0 has left"));
      return;
    }
    EXPECT_EQ(status, absl::CancelledError("interrupted in step 0 of job 'test'"));
    EXPECT_EQ(asked, 2);
    EXPECT_TRUE((*worker)->Leave().ok());
    has_left.Notify();
  });
}

TEST_P(FaultTest, ACallAfterLeavingIsADefectOfWhoMakesIt) {
  job_.workers = 1;
  Replica replica(job_, 0);
  auto worker =
      Worker::Join(replica.Options(), job_.optimizer, replica.Parameters(), cluster_.Connect());
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE((*worker)->Leave().ok());
  for (const absl::Status& status : {(*worker)->Step(replica.Gradients(), {job_.rates}).status(),
                                     (*worker)->BeginStep({job_.rates}),
                                     (*worker)->Checkpoint(*OpenDirectory(::testing::TempDir())),
                                     (*worker)->SaveState().status()}) {
    EXPECT_EQ(ExitCodeOf(status), kExitBadConfiguration) << status;
    EXPECT_THAT(Message(status), HasSubstr("this rank, 0, has left job 'test'"));
  }
}

// Under the same name, at the same aggregators, with nobody told of the end.
TEST(AggregatorFault, AJobWhoseWorkersDieCanBeStartedAgainAtOnce) {
  const JobOptionsForTest job;
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  for (int start = 0; start < 3; ++start) {
    OnEachRank(job.workers, [&](uint32_t rank) {
      Replica replica(job, rank);
      WorkerOptions options = job.worker;
      options.rank = rank;
      options.world_size = job.workers;
      const auto join = [&] {
        return Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
      };
      auto worker = join();
      // Until the connections of the worker before are closed.
      const absl::Time deadline = absl::Now() + absl::Minutes(1);
      while (absl::IsAlreadyExists(worker.status()) && absl::Now() < deadline) worker = join();
      ASSERT_TRUE(worker.ok()) << worker.status();
      replica.gradient = GradientOf(rank, /*step=*/0, replica.values.size());
      ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job.rates}).ok());
    });
  }
}

// The second aggregator has no part in it: it would not know that the processes of the first start
// have all been replaced.
TEST(AggregatorFault, AJobOfOneChunkIsJoinedAtOneShardAndStartsAgainIfAllDie) {
  JobOptionsForTest job;
  job.worker.chunk_elements = 512;
  job.worker.min_workers = 2;
  job.worker.round_deadline = absl::Milliseconds(100);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const auto channels = cluster.Connect();
  const auto jobs_of = [&](uint32_t shard) {
    const auto status = channels[shard]->Status({}, absl::Now() + absl::Seconds(30));
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() ? status->jobs() : StatusResponse().jobs();
  };
  const auto all_are_gone = [&] {
    const auto jobs = jobs_of(0);
    return jobs.size() == 1 && jobs[0].disconnected_ranks_size() == static_cast<int>(job.workers);
  };
  for (int start = 0; start < 2; ++start) {
    OnEachRank(job.workers, [&](uint32_t rank) {
      Replica replica(job, rank);
      auto worker =
          Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), cluster.Connect());
      ASSERT_TRUE(worker.ok()) << worker.status();
      EXPECT_FALSE((*worker)->returned());
      EXPECT_TRUE((*worker)->Step(replica.Gradients(), {job.rates}).ok());
    });
    EXPECT_EQ(jobs_of(1).size(), 0);
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    while (!all_are_gone() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  }
}

TEST_P(FaultTest, AStartThatFailsAtOneShardDoesNotBlockTheNext) {
  job_.workers = 1;
  Replica replica(job_, /*rank=*/0);
  std::vector<std::unique_ptr<Channel>> channels = cluster_.Connect();
  channels[1] = std::move(cluster_.Connect()[0]);  // which is not shard 1
  EXPECT_TRUE(absl::IsFailedPrecondition(
      Worker::Join(job_.worker, job_.optimizer, replica.Parameters(), std::move(channels))
          .status()));
  auto worker = Join(/*rank=*/0, replica);
  EXPECT_TRUE(worker.ok()) << worker.status();
}

TEST_P(FaultTest, OtherParameterGroupsAreRefusedBeforeReplicasDiverge) {
  job_.workers = 2;
  absl::Mutex mutex;
  int refused = 0;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    std::vector<Parameter> parameters = replica.Parameters();
    parameters[rank].group = 1;
    auto worker = Worker::Join(options, job_.optimizer, parameters, cluster_.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    GroupRates other = job_.rates;
    other.learning_rate *= 2;
    const absl::Status status = (*worker)->Step(replica.Gradients(), {job_.rates, other}).status();
    EXPECT_FALSE(status.ok());
    absl::MutexLock lock(&mutex);
    if (absl::IsFailedPrecondition(status)) ++refused;
  });
  EXPECT_GE(refused, 1) << "whoever came second";
}

TEST_P(FaultTest, AnotherModelsLayoutIsRefusedByTensorAndNamedByAllOthers) {
  OnEachRank(job_.workers, [&](uint32_t rank) {
    JobOptionsForTest job = job_;
    if (rank == 1) job.tensors[3] = 250;
    if (rank != 0) AwaitMember(0);  // rank 0 defines the job
    Replica replica(job, rank);
    auto worker = Join(rank, replica);
    if (rank == 1) {
      EXPECT_EQ(worker.status().code(), absl::StatusCode::kFailedPrecondition) << worker.status();
      EXPECT_THAT(Message(worker.status()), AllOf(HasSubstr("rank 1"), HasSubstr("'tensor3'"),
                                                  HasSubstr("[250]"), HasSubstr("[300]")));
      return;
    }
    EXPECT_EQ(worker.status().code(), absl::StatusCode::kDeadlineExceeded) << worker.status();
    EXPECT_THAT(Message(worker.status()),
                AllOf(HasSubstr("waiting for rank 1"), HasSubstr("'tensor3'")));
  });
}

TEST_P(FaultTest, AnotherOptionIsRefusedByName) {
  struct Variant {
    std::string name;
    std::function<void(JobOptionsForTest&, Replica&)> change;
  };
  const Variant variants[] = {
      {"gamma", [](auto& job, auto&) { job.worker.gamma = 1.2f; }},
      {"block_elements", [](auto& job, auto&) { job.worker.block_elements = 32; }},
      {"chunk_elements", [](auto& job, auto&) { job.worker.chunk_elements = 128; }},
      {"freeze_step=6", [](auto& job, auto&) { job.optimizer.freeze_step = 6; }},
      {"parameters", [](auto&, Replica& replica) { replica.values[3] += 1; }},
      {"world size", [](auto& job, auto&) { job.workers = 3; }},
  };
  std::thread first([this] {
    Replica replica(job_, 0);
    EXPECT_FALSE(Join(0, replica).ok());
  });
  AwaitMember(0);
  for (const Variant& variant : variants) {
    JobOptionsForTest job = job_;
    Replica replica(job, 1);
    variant.change(job, replica);
    WorkerOptions options = job.worker;
    options.rank = 1;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster_.Connect());
    EXPECT_EQ(worker.status().code(), absl::StatusCode::kFailedPrecondition)
        << variant.name << ": " << worker.status();
    EXPECT_THAT(Message(worker.status()), HasSubstr(variant.name));
  }
  first.join();
}

TEST_P(FaultTest, AnotherLearningRateIsRefusedBeforeReplicasDiverge) {
  job_.workers = 2;
  absl::Mutex mutex;
  int refused = 0;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker = Join(rank, replica);
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job_.rates}).ok());
    const std::vector<float> before = replica.values;
    GroupRates rates = job_.rates;
    if (rank == 1) rates.learning_rate *= 0.5;
    const absl::Status status = (*worker)->Step(replica.Gradients(), {rates}).status();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(replica.values, before);
    absl::MutexLock lock(&mutex);
    if (absl::IsFailedPrecondition(status)) {
      ++refused;
      EXPECT_THAT(Message(status),
                  AllOf(HasSubstr("learning rates"), HasSubstr("rank 0"), HasSubstr("rank 1")));
    }
  });
  EXPECT_GE(refused, 1) << "whoever came second";
}

TEST_P(FaultTest, GradientsOfTheWrongSizeAreRefusedWithNothingSent) {
  job_.workers = 1;
  Replica replica(job_, 0);
  auto worker = Join(0, replica);
  ASSERT_TRUE(worker.ok()) << worker.status();
  auto gradients = replica.Gradients();
  --gradients[3].size;
  EXPECT_THAT(Message((*worker)->Step(gradients, {job_.rates}).status()),
              AllOf(HasSubstr("'tensor3'"), HasSubstr("299"), HasSubstr("300")));
  EXPECT_THAT(Message((*worker)->Step(replica.Gradients(), {}).status()), HasSubstr("group 0"));
  EXPECT_TRUE((*worker)->Step(replica.Gradients(), {job_.rates}).ok()) << "still at step 0";
}

INSTANTIATE_TEST_SUITE_P(Transports, FaultTest,
                         ::testing::Values(Transport::kLoopback, Transport::kGrpc),
                         [](const auto& info) {
                           return info.param == Transport::kGrpc ? "Grpc" : "Loopback";
                         });

// What a worker joins by that dies when the first shard has let it in.
class DyingChannel final : public ForwardingChannel {
 public:
  DyingChannel(std::unique_ptr<Channel> inner, bool joins)
      : ForwardingChannel(std::move(inner)), joins_(joins) {}

  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    if (!joins_) return absl::UnknownError("dead");
    return ForwardingChannel::Join(request, deadline, check_may_wait);
  }
  absl::Status Leave(const LeaveRequest&, absl::Time) override {
    return absl::UnknownError("dead");
  }

 private:
  const bool joins_;
};

// With min_workers, and without.
class BeginningFault : public ::testing::TestWithParam<uint32_t> {};

TEST_P(BeginningFault, WhoWaitsAtALaterShardForARankThatIsStartedAnewIsToTryAgain) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.min_workers = GetParam();
  if (GetParam() > 0) job.worker.round_deadline = absl::Seconds(1);
  job.worker.join_timeout = absl::Minutes(5);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const auto join = [&](uint32_t rank, std::vector<std::unique_ptr<Channel>> channels) {
    Replica replica(job, rank);
    return Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels))
        .status();
  };
  // As whoever starts it again, also while the aggregator takes the one before to be there.
  const auto join_until_it_may = [&](uint32_t rank) {
    absl::Status status;
    do {
      status = join(rank, cluster.Connect());
    } while (absl::IsAlreadyExists(status) || IsTryAgain(status));
    EXPECT_TRUE(status.ok()) << status;
  };
  OnEachRank(job.workers, [&](uint32_t rank) {
    if (rank == 1) {
      std::vector<std::unique_ptr<Channel>> channels;
      for (std::unique_ptr<Channel>& channel : cluster.Connect()) {
        channels.push_back(std::make_unique<DyingChannel>(std::move(channel), channels.empty()));
      }
      EXPECT_TRUE(absl::IsUnknown(join(rank, std::move(channels))));
    } else {
      const absl::Status status = join(rank, cluster.Connect());
      EXPECT_TRUE(IsTryAgain(status)) << status;
      EXPECT_THAT(Message(status), HasSubstr("is over"));
    }
    join_until_it_may(rank);
  });
}

INSTANTIATE_TEST_SUITE_P(MinWorkers, BeginningFault, ::testing::Values(0, 1),
                         ::testing::PrintToStringParamName());

TEST(AggregatorFault, AnAggregatorThatIsNotThereIsNamed) {
  JobOptionsForTest job;
  Replica replica(job, 0);
  job.worker.join_timeout = kTimeout;
  std::vector<std::unique_ptr<Channel>> channels;
  channels.push_back(ConnectToAggregator("127.0.0.1:1", FailureTimeout()));
  auto worker = Worker::Join(job.worker, job.optimizer, replica.Parameters(), std::move(channels));
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kUnavailable) << worker.status();
  EXPECT_THAT(Message(worker.status()), HasSubstr("127.0.0.1:1"));
}

TEST(AggregatorFault, AnAggregatorThatIsKilledIsLookedForUntilTheDeadlineAndNamed) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = kTimeout;
  ServerProcess aggregator("aggregator");
  absl::BlockingCounter stepping(job.workers);
  absl::Notification killed;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(ConnectToAggregator(aggregator.target(), FailureTimeout()));
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job.rates}).ok());
    stepping.DecrementCount();
    if (rank == 0) {
      stepping.Wait();
      aggregator.Signal(SIGKILL);
      killed.Notify();
    }
    killed.WaitForNotification();
    const absl::Time start = SteadyNow();
    const absl::Status status = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(Message(status), HasSubstr(aggregator.target()));
    EXPECT_GE(SteadyNow() - start, kTimeout);
  });
}

// A link that takes so long for each frame, one after the other.
class SlowLink final : public ForwardingChannel {
 public:
  SlowLink(std::unique_ptr<Channel> inner, absl::Duration frame_time)
      : ForwardingChannel(std::move(inner)), frame_time_(frame_time), thread_([this] { Run(); }) {}

  ~SlowLink() override {
    {
      absl::MutexLock lock(&mutex_);
      ends_ = true;
    }
    thread_.join();
  }

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    absl::MutexLock lock(&mutex_);
    frames_.push_back({header, std::move(payload), deadline, std::move(done)});
  }

 private:
  struct Frame {
    FrameHeader header;
    std::shared_ptr<const Payload> payload;
    absl::Time deadline;
    ExchangeDone done;
  };

  void Run() {
    const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return ends_ || !frames_.empty();
    };
    absl::MutexLock lock(&mutex_);
    while (true) {
      mutex_.Await(absl::Condition(&has_work));
      if (ends_) return;
      Frame frame = std::move(frames_.front());
      frames_.pop_front();
      mutex_.Unlock();
      absl::SleepFor(frame_time_);
      if (SteadyNow() < frame.deadline) {
        ForwardingChannel::Exchange(frame.header, std::move(frame.payload), frame.deadline,
                                    std::move(frame.done));
      } else {
        frame.done(absl::DeadlineExceededError("the link is slow"));
      }
      mutex_.Lock();
    }
  }

  const absl::Duration frame_time_;
  absl::Mutex mutex_;
  std::deque<Frame> frames_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The timeout is for what nobody answers, and not for all of a large model's bytes.
TEST(SlowLinkFault, AStepMayTakeLongerThanTheTimeoutAsLongAsAnswersCome) {
  JobOptionsForTest job;
  job.workers = 1;
  job.tensors = {480};  // 30 chunks, of which 8 are on their way at a time
  job.worker.chunk_elements = job.worker.block_elements;
  job.worker.exchange_timeout = kTimeout;
  Cluster cluster({});
  Replica replica(job, 0);
  auto channels = cluster.Connect();
  channels[0] = std::make_unique<SlowLink>(std::move(channels[0]), kTimeout / 12);
  auto worker = Worker::Join(job.worker, job.optimizer, replica.Parameters(), std::move(channels));
  ASSERT_TRUE(worker.ok()) << worker.status();
  const absl::Time start = absl::Now();
  const absl::Status status = (*worker)->Step(replica.Gradients(), {job.rates}).status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(absl::Now() - start, kTimeout * 2);
}

}  // namespace
}  // namespace signpost::testing
