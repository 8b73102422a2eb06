// Aggregators that die, or err, while a job is saved or resumed, and a rank that does.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "proto/payload.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "storage/disk.h"
#include "tests/checkpoint_job.h"
#include "tests/cluster.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/memory_disk.h"
#include "tests/status_is.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;
using enum absl::StatusCode;

// Aggregators that die at the wrong moment, over a real network and on a real disk.
class CheckpointRecoveryTest : public ::testing::Test {
 protected:
  CheckpointRecoveryTest()
      : state_dir_(absl::StrCat(::testing::TempDir(), "/state")),
        checkpoint_dir_(absl::StrCat(::testing::TempDir(), "/checkpoints")) {
    std::filesystem::remove_all(state_dir_);
    std::filesystem::remove_all(checkpoint_dir_);
    EXPECT_TRUE(MakeDirectory(checkpoint_dir_).ok());
    disk_ = OpenDirectory(checkpoint_dir_);
    job_.optimizer.warm_up_codec = BFLOAT16;
    expected_ = RunAnew(2, {.job = job_, .until = 12});
  }

  ClusterOptions WithState() const {
    return {.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir_};
  }

  const std::string state_dir_, checkpoint_dir_;
  JobOptionsForTest job_;
  std::unique_ptr<Disk> disk_;
  std::vector<End> expected_;
};

TEST_F(CheckpointRecoveryTest, AggregatorsKilledWhileACheckpointIsTakenChangeNothing) {
  {
    Cluster cluster(WithState());
    const auto ends = RunIn(cluster, {.job = job_,
                                      .until = 12,
                                      .checkpoint_after = {3, 9},
                                      .checkpoints = disk_.get(),
                                      .before_checkpoint = [&](uint32_t rank) {
                                        // The others are in it, and cannot end it without this one.
                                        if (rank != 1) return;
                                        cluster.Kill(0);
                                        cluster.Kill(1);
                                      }});
    EXPECT_EQ(ends, expected_);
  }
  EXPECT_EQ(RunAnew(3, {.job = job_, .until = 12, .resume_from = disk_.get()}), expected_);
}

// From then on answers are other numbers than the aggregator's.
class FalsifyingChannel final : public ForwardingChannel {
 public:
  FalsifyingChannel(std::unique_ptr<Channel> inner, const std::atomic<bool>& falsifies)
      : ForwardingChannel(std::move(inner)), falsifies_(falsifies) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    ForwardingChannel::Exchange(
        header, std::move(payload), deadline,
        [this, done = std::move(done)](absl::StatusOr<Answer> answer) mutable {
          if (falsifies_ && answer.ok() && answer->payload.size() > 0) {
            answer->payload.data()[0] ^= 1;
            answer->header.set_payload_crc32c(Crc32c(answer->payload.span()));
          }
          done(std::move(answer));
        });
  }

 private:
  const std::atomic<bool>& falsifies_;
};

// A rank that waits for the others offers its frames, and so finds it out.
TEST_F(CheckpointRecoveryTest, NoStepFollowsWhenAnAggregatorHasComeToAnotherResult) {
  job_.workers = 2;
  Cluster cluster(WithState());
  std::atomic<bool> falsifies = false;
  absl::Notification done;
  const auto falsify = [&](uint32_t rank, WorkerOptions&, Channels& channels) {
    for (std::unique_ptr<Channel>& channel : channels) {
      channel = std::make_unique<FalsifyingChannel>(std::move(channel), falsifies);
    }
  };
  OnEachWorker(cluster, job_, falsify, [&](uint32_t rank, Replica& replica, Worker& worker) {
    ASSERT_TRUE(worker.Step(replica.Gradients(), {job_.rates}).ok());
    if (rank == 0) return done.WaitForNotification();
    falsifies = true;
    const absl::Status status = worker.Checkpoint(*disk_);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    const absl::Status step = worker.Step(replica.Gradients(), {job_.rates}).status();
    EXPECT_THAT(step,
                StatusIs(kFailedPrecondition, HasSubstr("comes to another result than before")));
    done.Notify();
  });
}

TEST_F(CheckpointRecoveryTest, AggregatorsKilledAroundTheRestoringRoundChangeNothing) {
  RunAndSave(2, job_, /*until=*/7, *disk_);
  Cluster cluster(WithState());
  const auto ends = RunIn(cluster, {.job = job_,
                                    .until = 12,
                                    .resume_from = disk_.get(),
                                    .after_join = [&](uint32_t rank, Worker& worker) {
                                      if (rank != 2) return;
                                      cluster.Kill(0);
                                      cluster.Kill(1);
                                    }});
  EXPECT_EQ(ends, expected_);
}

// Frames that go nowhere until their process dies.
class LostFrames {
 public:
  void Add(Channel::ExchangeDone done) {
    absl::MutexLock lock(&mutex_);
    if (is_dead_) return done(absl::UnknownError("dead"));
    waiting_.push_back(std::move(done));
  }
  void Die() {
    absl::MutexLock lock(&mutex_);
    is_dead_ = true;
    for (Channel::ExchangeDone& done : waiting_) done(absl::UnknownError("dead"));
  }

 private:
  absl::Mutex mutex_;
  bool is_dead_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Channel::ExchangeDone> waiting_ ABSL_GUARDED_BY(mutex_);
};

// Of a process that dies, and so does not leave.
class DyingChannel final : public ForwardingChannel {
 public:
  DyingChannel(std::unique_ptr<Channel> inner, LostFrames* lost)
      : ForwardingChannel(std::move(inner)), lost_(lost) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    if (lost_ != nullptr) return lost_->Add(std::move(done));
    ForwardingChannel::Exchange(header, std::move(payload), deadline, std::move(done));
  }
  absl::Status Leave(const LeaveRequest&, absl::Time) override {
    return absl::UnknownError("dead");
  }

 private:
  LostFrames* const lost_;  // null: none are
};

// It dies when the first shard has all errors back, and the second waits for it.
TEST(Checkpoint, WhoseErrorsGoBackWhileARankIsStartedAnewIsToBeResumedAgain) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.exchange_timeout = absl::Minutes(5);
  MemoryDisk disk;
  RunAndSave(1, job, /*until=*/6, disk);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const auto resume = [&](uint32_t rank, Channels channels) {
    Replica replica(job, rank);
    return Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels),
                        {.checkpoints = &disk})
        .status();
  };
  LostFrames lost;
  std::thread death([&] {
    const auto channels = cluster.Connect();
    JobStatus status;
    while (status.chunks() == 0 || status.rounds_closed() < status.chunks()) {
      const auto response = channels[0]->Status({}, SteadyNow() + absl::Seconds(30));
      ASSERT_TRUE(response.ok()) << response.status();
      if (response->jobs_size() > 0) status = response->jobs(0);
    }
    lost.Die();
  });
  OnEachRank(job.workers, [&](uint32_t rank) {
    Channels channels = cluster.Connect();
    for (uint32_t shard = 0; shard < channels.size() && rank == 1; ++shard) {
      channels[shard] =
          std::make_unique<DyingChannel>(std::move(channels[shard]), shard == 1 ? &lost : nullptr);
    }
    absl::Status status = resume(rank, std::move(channels));
    if (rank == 0) {
      EXPECT_TRUE(IsTryAgain(status)) << status;
      EXPECT_THAT(MessageOf(status), HasSubstr("is over"));
    }
    // As whoever starts it again, also while the aggregator takes the one before to be there.
    do {
      status = resume(rank, cluster.Connect());
    } while (absl::IsAlreadyExists(status) || IsTryAgain(status));
    EXPECT_TRUE(status.ok()) << status;
  });
  death.join();
}

}  // namespace
}  // namespace signpost::testing
