// Ranks that save together, in one directory: what keeps one of them from it, and who else saves
// there.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/proxy.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "server/server.h"
#include "storage/disk.h"
#include "tests/checkpoint_job.h"
#include "tests/cluster.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/memory_disk.h"
#include "tests/status_is.h"
#include "worker/grpc_channel.h"
#include "worker/resume_state.h"

namespace signpost::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using enum absl::StatusCode;

TEST(Checkpoint, ARankThatNeverComesIsNamedOnAllOthersSoonEnoughForItsNextStep) {
  JobOptionsForTest job = {.workers = 3};
  job.worker.exchange_timeout = absl::Seconds(6);
  Cluster cluster({});
  MemoryDisk disk;
  OnEachWorker(cluster, job, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank != 2) {
      const absl::Status status = worker.Checkpoint(disk);
      EXPECT_THAT(
          status,
          StatusIs(kAborted,
                   HasSubstr("lacks the part of rank 2, which has gone on to the next step")));
      EXPECT_THAT(MessageOf(status), HasSubstr("one that all workers see"));
    }
    EXPECT_EQ(worker.Step(replica.Gradients(), {job.rates}).status(), absl::OkStatus());
  });
  EXPECT_TRUE(CheckpointsIn(disk).empty());
}

TEST(Checkpoint, ARankThatComesLateIsWaitedForAsLongAsInAStep) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.exchange_timeout = absl::Seconds(8);
  Cluster cluster({});
  MemoryDisk disk;
  OnEachWorker(cluster, job, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank == 1) absl::SleepFor(absl::Milliseconds(4500));  // as one that validates
    EXPECT_EQ(worker.Checkpoint(disk), absl::OkStatus());
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

// Through which a rank hears something else about the job.
class StatusChannel final : public ForwardingChannel {
 public:
  using Change = std::function<void(JobStatus& status)>;
  StatusChannel(std::unique_ptr<Channel> inner, Change change)
      : ForwardingChannel(std::move(inner)), change_(std::move(change)) {}

  absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                        absl::Time deadline) override {
    absl::StatusOr<StatusResponse> response = ForwardingChannel::Status(request, deadline);
    if (response.ok() && response->jobs_size() == 1) change_(*response->mutable_jobs(0));
    return response;
  }

 private:
  const Change change_;
};

// As when an aggregator was started again; and where the rank that is missing is absent.
TEST(Checkpoint, OnlyWhoHasGoneOnToTheNextStepHasGoneOn) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.exchange_timeout = absl::Seconds(8);
  Cluster cluster({});
  MemoryDisk disk;
  int looks = 0;
  absl::Notification have_been_seen;
  const auto change = [&](JobStatus& status) {
    status.clear_waiting_for_ranks();
    status.add_waiting_for_ranks(0);
    status.set_step(looks % 2);
    if (status.step() == 1) status.add_absent_ranks(1);
    if (++looks == 2) have_been_seen.Notify();
  };
  const auto mislead = [&](uint32_t rank, WorkerOptions&, Channels& channels) {
    if (rank == 0) channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), change);
  };
  OnEachWorker(cluster, job, mislead, [&](uint32_t rank, Replica& replica, Worker& worker) {
    ASSERT_EQ(worker.Step(replica.Gradients(), {job.rates}).status(), absl::OkStatus());
    if (rank == 1) {
      EXPECT_TRUE(have_been_seen.WaitForNotificationWithTimeout(absl::Minutes(2)));
    }
    EXPECT_EQ(worker.Checkpoint(disk), absl::OkStatus());
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

JobOptionsForTest ElasticPair() {
  JobOptionsForTest job = {.workers = 2};
  job.worker.min_workers = 1;
  job.worker.round_deadline = absl::Milliseconds(200);
  job.worker.exchange_timeout = absl::Minutes(10);
  return job;
}

TEST(Checkpoint, DoesNotWaitForARankThatComesBack) {
  const JobOptionsForTest job = ElasticPair();
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification is_over;
  const auto mislead = [](uint32_t rank, WorkerOptions&, Channels& channels) {
    if (rank != 0) return;
    channels[0] = std::make_unique<StatusChannel>(
        std::move(channels[0]), [](JobStatus& status) { status.add_returning_ranks(1); });
  };
  OnEachWorker(cluster, job, mislead, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank == 1) return is_over.WaitForNotification();
    const absl::Status status = worker.Checkpoint(disk);
    EXPECT_THAT(status, StatusIs(kAborted, HasSubstr("part of rank 1, which comes back")));
    is_over.Notify();
  });
}

TEST(Checkpoint, WaitsForARankThatLosesItsConnectionWhileItValidates) {
  const JobOptionsForTest job = ElasticPair();
  const auto server = *Server::Start({});
  cli::Proxy proxy(server->port());
  MemoryDisk disk;
  absl::Mutex mutex;
  bool may_come = false;
  // Rank 1 comes once it is known again that it lives, or rank 0 waits no more.
  const auto let_rank_1_come = [&](bool may) {
    const absl::MutexLock lock(&mutex);
    may_come = may_come || may;
  };
  const auto change = [&](const JobStatus& status) {
    let_rank_1_come(proxy.connections() > 1 && status.disconnected_ranks().empty());
  };
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    const std::string direct = absl::StrCat("127.0.0.1:", server->port());
    Channels channels;
    channels.push_back(ConnectToAggregator(rank == 0 ? direct : proxy.target(), FailureTimeout()));
    if (rank == 0) channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), change);
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    const absl::Status step = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    ASSERT_TRUE(step.ok()) << step;
    if (rank == 1) {
      proxy.Reset();
      const absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&may_come));
    }
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
    let_rank_1_come(true);
  });
  EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
}

// As where the network is slow, or an aggregator was started again.
TEST(Checkpoint, DoesNotTakeARankForEndedThatHasNoConnectionInSomeLooks) {
  const JobOptionsForTest job = ElasticPair();
  Cluster cluster({});
  MemoryDisk disk;
  int looks = 0;
  absl::Notification have_been_seen;
  const auto mislead = [&](uint32_t rank, WorkerOptions&, Channels& channels) {
    if (rank != 0) return;
    channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), [&](JobStatus& status) {
      if (++looks % 4 != 0) status.add_disconnected_ranks(1);
      if (looks == 8) have_been_seen.Notify();
    });
  };
  OnEachWorker(cluster, job, mislead, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank == 1) {
      EXPECT_TRUE(have_been_seen.WaitForNotificationWithTimeout(absl::Minutes(2)));
    }
    const absl::Status status = worker.Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
  });
  EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
}

TEST(Checkpoint, ARankThatComesTooLateIsToldAtOnce) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.exchange_timeout = absl::Seconds(4);
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification is_given_up;
  const auto be_patient = [](uint32_t rank, WorkerOptions& options, Channels&) {
    if (rank == 1) options.exchange_timeout = absl::Minutes(2);
  };
  OnEachWorker(cluster, job, be_patient, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank == 1) is_given_up.WaitForNotification();
    const absl::Status status = worker.Checkpoint(disk);
    EXPECT_THAT(status, StatusIs(kDeadlineExceeded, HasSubstr("lacks the part of rank 1")));
    if (rank == 0) is_given_up.Notify();
  });
  EXPECT_TRUE(CheckpointsIn(disk).empty());
}

TEST(Checkpoint, WhatKeepsARankFromSavingIsToldOnAllAtOnceAndTrainingGoesOn) {
  JobOptionsForTest job = {.workers = 3};
  job.worker.exchange_timeout = absl::Minutes(5);
  struct Failure {
    const char* file;
    uint32_t culprit;
  };
  for (const Failure& failure : {Failure{"rank-1.tmp", 1}, Failure{"rank-2.sum.tmp", 2},
                                 Failure{"parameters.tmp", 0}, Failure{"manifest.tmp", 0}}) {
    SCOPED_TRACE(failure.file);
    Cluster cluster({});
    MemoryDisk disk;
    disk.FillUpFor(failure.file);
    absl::Notification others_try_again;
    disk.OnWrite([&, parts = 0](const std::string& name) mutable {
      if (absl::EndsWith(name, "rank-0.tmp") && ++parts == 2) others_try_again.Notify();
    });
    absl::Barrier* const all_failed = new absl::Barrier(static_cast<int>(job.workers));
    OnEachWorker(cluster, job, [&](uint32_t rank, Replica& replica, Worker& worker) {
      const absl::Status status = worker.Checkpoint(disk);
      EXPECT_THAT(status, StatusIs(kResourceExhausted, HasSubstr("cannot write")));
      if (rank != failure.culprit) {
        EXPECT_THAT(MessageOf(status),
                    HasSubstr(absl::StrCat("rank ", failure.culprit, " could not save step")));
      }
      // Once there is room what was told of the call before counts no more.
      if (all_failed->Block()) delete all_failed;
      disk.FillUpFor("");
      if (rank == 1) others_try_again.WaitForNotification();
      EXPECT_EQ(worker.Checkpoint(disk), absl::OkStatus());
      EXPECT_TRUE(worker.Step(replica.Gradients(), {job.rates}).ok());
    });
    EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
    for (const auto& [name, contents] : disk.Files()) {
      EXPECT_FALSE(absl::EndsWith(name, ".failed")) << name;
    }
  }
}

// A disk would be full of them before long.
TEST(Checkpoint, InDirectoriesThatNotAllSeeTheLeftoversOfTheOneBeforeGoOnAllRanks) {
  JobOptionsForTest job = {.workers = 3};
  job.worker.exchange_timeout = absl::Seconds(4);
  Cluster cluster({});
  MemoryDisk disk_of_0, disk_of_others;
  ASSERT_TRUE(Replace(disk_of_others, "step-000000000000-0123456789abcdef/rank-1", {"torn"}).ok());
  ASSERT_TRUE(Replace(disk_of_others, "step-000000000000-0123456789abcdef/rank-11", {"its"}).ok());
  OnEachWorker(cluster, job, [&](uint32_t rank, Replica& replica, Worker& worker) {
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = worker.Checkpoint(rank == 0 ? disk_of_0 : disk_of_others);
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      ASSERT_EQ(worker.Step(replica.Gradients(), {job.rates}).status(), absl::OkStatus());
    }
  });
  const auto names_in = [](const MemoryDisk& disk) {
    std::vector<std::string> names;
    for (const auto& [name, contents] : disk.Files()) names.push_back(name);
    return names;
  };
  EXPECT_THAT(names_in(disk_of_0),
              ElementsAre(HasSubstr("step-000000000001"), HasSubstr("step-000000000001"),
                          EndsWith("/rank-0.failed"), HasSubstr("step-000000000001")));
  EXPECT_THAT(names_in(disk_of_others),
              ElementsAre(EndsWith("/rank-11"), EndsWith("/rank-1"), EndsWith("/rank-1.sum"),
                          EndsWith("/rank-2"), EndsWith("/rank-2.sum")));
}

// Who writes into parameters on some ranks only has two models from then on.
TEST(Checkpoint, RanksWithOtherParametersAreNamedOnAllAndNothingIsSaved) {
  JobOptionsForTest job = {.workers = 3};
  for (const bool is_local : {false, true}) {
    job.optimizer = {.freeze_step = 2};
    if (is_local) job.optimizer.zero_one = {.local_step_scaler = 1, .local_step_clipper = 4};
    Cluster cluster({});
    MemoryDisk disk;
    OnEachWorker(cluster, job, [&](uint32_t rank, Replica& replica, Worker& worker) {
      while (worker.steps() < 3 || worker.is_synchronised() == is_local) {
        replica.gradient = GradientOf(rank, worker.steps(), replica.values.size());
        ASSERT_TRUE(worker.Step(replica.Gradients(), {job.rates}).ok());
      }
      if (rank == 1) replica.values[5] += 1;
      const absl::Status status = worker.Checkpoint(disk);
      if (is_local) {
        EXPECT_TRUE(status.ok()) << "its values are its own between synchronisations: " << status;
        return;
      }
      EXPECT_THAT(status, StatusIs(kFailedPrecondition,
                                   HasSubstr("the parameters of rank 1 are not those of rank 0")));
    });
    EXPECT_EQ(CheckpointsIn(disk).empty(), !is_local);
  }
}

TEST(Checkpoint, ThatRank0StillWritesTheParametersIsWhatOthersSay) {
  JobOptionsForTest job = {.workers = 2};
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification given_up;
  disk.OnWrite([&](const std::string& name) {
    if (absl::StrContains(name, "parameters")) given_up.WaitForNotification();
  });
  const auto hurry = [](uint32_t rank, WorkerOptions& options, Channels&) {
    if (rank == 1) options.exchange_timeout = absl::Seconds(4);
  };
  OnEachWorker(cluster, job, hurry, [&](uint32_t rank, Replica& replica, Worker& worker) {
    const absl::Status status = worker.Checkpoint(disk);
    if (rank == 0) {
      EXPECT_TRUE(status.ok()) << status;
      return;
    }
    given_up.Notify();
    EXPECT_THAT(status, StatusIs(kDeadlineExceeded, HasSubstr("step 0 is not committed after 4s")));
  });
  EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
}

// Writes down until when a worker is ready to wait for its Leave.
class LeaveNotingChannel final : public ForwardingChannel {
 public:
  LeaveNotingChannel(std::unique_ptr<Channel> inner, absl::Time& deadline)
      : ForwardingChannel(std::move(inner)), deadline_(deadline) {}

  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    deadline_ = deadline;
    return ForwardingChannel::Leave(request, deadline);
  }

 private:
  absl::Time& deadline_;
};

TEST(Checkpoint, AWorkerThatIsInterruptedInOneLeavesInAHurry) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.exchange_timeout = absl::Minutes(10);
  Cluster cluster({});
  MemoryDisk disk;
  const absl::Time start = SteadyNow();
  absl::Time deadline;
  const auto interrupt = [&](uint32_t rank, WorkerOptions& options, Channels& channels) {
    if (rank == 1) return;
    options.is_interrupted = [] { return true; };
    channels[0] = std::make_unique<LeaveNotingChannel>(std::move(channels[0]), deadline);
  };
  OnEachWorker(cluster, job, interrupt, [&](uint32_t rank, Replica& replica, Worker& worker) {
    if (rank == 1) return;  // it does not save
    EXPECT_TRUE(absl::IsCancelled(worker.Checkpoint(disk)));
    EXPECT_TRUE(worker.Leave().ok());
    EXPECT_GT(deadline, start);
    EXPECT_LT(deadline, SteadyNow() + absl::Minutes(1));
  });
}

// Two optimizers of a program, say, which were given the same directory.
TEST(Checkpoint, OfAnotherModelIsNotReplaced) {
  JobOptionsForTest job;
  MemoryDisk disk;
  RunAndSave(1, job, /*until=*/6, disk);
  const std::map<std::string, std::string> before = disk.Files();
  job.tensors[1] = 9;
  RunAnew(1, {.job = job, .until = 1, .after_join = [&](uint32_t rank, Worker& worker) {
                const absl::Status status = worker.Checkpoint(disk);
                EXPECT_THAT(
                    status,
                    StatusIs(kFailedPrecondition,
                             ContainsRegex("is of another job: tensor 1 is .*9. here but")));
              }});
  EXPECT_EQ(disk.Files(), before);
}

class EpochEndingChannel final : public ForwardingChannel {
 public:
  EpochEndingChannel(std::unique_ptr<Channel> inner, const bool& is_over)
      : ForwardingChannel(std::move(inner)), is_over_(is_over) {}

  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override {
    if (is_over_) return TryAgain(absl::FailedPreconditionError("its epoch is over"));
    return ForwardingChannel::ReadError(request, deadline);
  }

 private:
  const bool& is_over_;
};

// Two runs of the same model that save in one directory: one takes it over, and whoever finds that
// it has been taken stops.
class SharedDirectoryTest : public ::testing::Test {
 protected:
  struct Run {
    Cluster cluster = Cluster({});
    bool is_over = false;
    JobOptionsForTest job;
    std::unique_ptr<Replica> replica;
    std::unique_ptr<Worker> worker;
  };

  Run& Begin(const std::string& name, const ResumeFrom& from = {}) {
    Run& run = runs_.emplace_back();
    run.job.worker.job = name;
    run.job.workers = run.job.worker.world_size = 1;
    run.replica = std::make_unique<Replica>(run.job, 0);
    Channels channels = run.cluster.Connect();
    channels[0] = std::make_unique<EpochEndingChannel>(std::move(channels[0]), run.is_over);
    auto worker = Worker::Join(run.job.worker, run.job.optimizer, run.replica->Parameters(),
                               std::move(channels), from);
    EXPECT_TRUE(worker.ok()) << worker.status();
    run.worker = *std::move(worker);
    return run;
  }

  absl::Status StepAndSave(Run& run) {
    std::vector<float>& gradient = run.replica->gradient;
    gradient = GradientOf(0, static_cast<int>(run.worker->steps()), run.replica->values.size());
    EXPECT_TRUE(run.worker->Step(run.replica->Gradients(), {run.job.rates}).ok());
    return run.worker->Checkpoint(disk_);
  }

  MemoryDisk disk_;
  std::list<Run> runs_;
};

TEST_F(SharedDirectoryTest, WhoeverHasSavedThereIsToldOfTheOtherRunByName) {
  Run& first = Begin("lr-1");
  Run& second = Begin("lr-2");
  EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  EXPECT_EQ(StepAndSave(second), absl::OkStatus()) << "the first may have ended";
  const std::map<std::string, std::string> before = disk_.Files();
  const absl::Status status = StepAndSave(first);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_FALSE(IsTryAgain(status));
  EXPECT_THAT(MessageOf(status),
              ContainsRegex("checkpoint step-000000000001-.*, of job 'lr-2', has come "
                            "after this run's: another run saves here"));
  EXPECT_EQ(disk_.Files(), before);
  EXPECT_EQ(StepAndSave(second), absl::OkStatus());
}

// The slower one's are gone when it comes, and the faster one's are not.
TEST_F(SharedDirectoryTest, OfOneThatSavesMoreOftenTheOtherIsNoticedByIt) {
  Run& slow = Begin("slow");
  Run& fast = Begin("fast");
  EXPECT_EQ(StepAndSave(slow), absl::OkStatus());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(fast), absl::OkStatus());
  EXPECT_EQ(StepAndSave(slow), absl::OkStatus());
  EXPECT_THAT(MessageOf(StepAndSave(fast)), HasSubstr("of job 'slow', has come after"));
}

// One whose processes have been replaced is told what it would be told without the directory.
TEST_F(SharedDirectoryTest, ThatItsEpochIsOverComesFirst) {
  Run& first = Begin("a");
  EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  EXPECT_EQ(StepAndSave(Begin("a")), absl::OkStatus());
  first.is_over = true;
  const absl::Status status = StepAndSave(first);
  EXPECT_TRUE(IsTryAgain(status)) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr("its epoch is over"));
}

TEST_F(SharedDirectoryTest, RunsThatComeOneAfterTheOtherAreNotInEachOthersWay) {
  Run& first = Begin("a");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  for (const ResumeFrom& from : {ResumeFrom{.checkpoints = &disk_}, ResumeFrom()}) {
    Run& next = Begin("a", from);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(next), absl::OkStatus());
  }
}

}  // namespace
}  // namespace signpost::testing
