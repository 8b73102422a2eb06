// A worker whose process is gone, and another that takes its place while the others train on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/simulated_gpu.h"
#include "proto/try_again.h"
#include "tests/cluster.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kLostRank = 1;

double NormOf(absl::Span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

// Loses the first question for states, with its connection: the call is made again as it was.
class LosingChannel final : public ForwardingChannel {
 public:
  LosingChannel(std::unique_ptr<Channel> inner, std::atomic<int>& lost)
      : ForwardingChannel(std::move(inner)), lost_(lost) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    auto shared = std::make_shared<ExchangeDone>(std::move(done));
    const auto take = [this, header, payload, deadline, shared](absl::StatusOr<Answer> answer) {
      const bool is_question = answer.ok() && answer->header.codec() == FETCH;
      if (!is_question || has_lost_.exchange(true)) return (*shared)(std::move(answer));
      ++lost_;
      ForwardingChannel::Exchange(header, payload, deadline, [shared](absl::StatusOr<Answer> next) {
        (*shared)(std::move(next));
      });
    };
    ForwardingChannel::Exchange(header, payload, deadline, take);
  }

 private:
  std::atomic<int>& lost_;
  std::atomic<bool> has_lost_ = false;
};

// With a state directory for each aggregator, and without.
class ReturningWorkerTest : public ::testing::TestWithParam<bool> {
 protected:
  ReturningWorkerTest() {
    // Few rounds wait so long. On a busy machine ranks that are there take 100 ms for some steps.
    job_.worker.round_deadline = absl::Milliseconds(500);
    job_.worker.min_workers = 3;
    job_.worker.exchange_timeout = absl::Minutes(1);
    // Where a worker computes is its own affair: what one gives another takes.
    job_.gpu_of = [this](uint32_t rank) { return rank % 2 == 1 ? &gpu_ : nullptr; };
    ClusterOptions options = {.transport = Transport::kGrpc, .aggregators = 2};
    if (GetParam()) {
      options.state_dir = ::testing::TempDir() + "/returning";
      std::filesystem::remove_all(options.state_dir);
    }
    cluster_ = std::make_unique<Cluster>(options);
  }

  absl::StatusOr<std::unique_ptr<Worker>> Join(uint32_t rank, Replica& replica) {
    std::vector<std::unique_ptr<Channel>> channels = cluster_->Connect();
    for (auto& channel : channels) {
      if (!loses_questions_) continue;
      channel = std::make_unique<LosingChannel>(std::move(channel), lost_questions_);
    }
    return Worker::Join(replica.Options(), job_.optimizer, replica.Parameters(),
                        std::move(channels));
  }

  absl::Status Step(uint32_t rank, Replica& replica, Worker& worker) {
    replica.gradient = GradientOf(rank, static_cast<int>(worker.steps()), replica.values.size());
    replica.BeforeStep(worker);
    return worker.Step(replica.Gradients(), {job_.rates}).status();
  }

  void TakeSteps(uint32_t rank, Replica& replica, Worker& worker, uint64_t end) {
    while (worker.steps() < end) {
      const absl::Status status = Step(rank, replica, worker);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // Whether the worker, which is about to take a step, is at the end.
  bool IsAtTheEnd(const Worker& worker) {
    absl::MutexLock lock(&mutex_);
    newest_step_ = std::max(newest_step_, worker.steps());
    return HasFailure() || (worker.steps() >= end_ && worker.is_synchronised());
  }

  void BeginTheEnd() {
    absl::MutexLock lock(&mutex_);
    end_ = newest_step_ + 5;
  }

  void AwaitStepOfTheOthers(uint64_t step) {
    const auto is_there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return newest_step_ >= step; };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_there));
  }

  // Of the lost rank. However long it took to come back, the others train until then, and for some
  // steps more. One that a busy machine leaves far behind comes back once more.
  void TakeStepsToTheEnd(Replica& replica, std::unique_ptr<Worker> worker) {
    const uint64_t together_until = worker->steps() + steps_together_;
    while (!IsAtTheEnd(*worker)) {
      if (worker->steps() == together_until) BeginTheEnd();
      const absl::Status status = Step(kLostRank, replica, *worker);
      if (absl::StrContains(status.message(), "no longer kept")) {
        const uint64_t lost_at = worker->steps();
        worker.reset();
        return ComeBack(lost_at);
      }
      ASSERT_TRUE(status.ok()) << status;
    }
    replica.GetValues();
    values_[kLostRank] = replica.values;
  }

  // The others train, from a step that takes some time each to the next, and the lost rank does
  // `body`. All of them end with the same parameters.
  void Run(const std::function<void(Replica& replica, std::unique_ptr<Worker> worker)>& body) {
    values_.assign(job_.workers, {});
    {
      absl::MutexLock lock(&mutex_);
      newest_step_ = 0;
      end_ = std::numeric_limits<uint64_t>::max();
    }
    OnEachRank(job_.workers, [&](uint32_t rank) {
      Replica replica(job_, rank);
      auto worker = Join(rank, replica);
      ASSERT_TRUE(worker.ok()) << worker.status();
      EXPECT_FALSE((*worker)->returned());
      if (rank == kLostRank) return body(replica, *std::move(worker));
      while (!IsAtTheEnd(**worker)) {
        // A faster pace begins at once: who still slept would be left behind.
        for (int ms = 0; ms < pace_ms_; ms += 5) absl::SleepFor(absl::Milliseconds(5));
        const absl::Status status = Step(rank, replica, **worker);
        ASSERT_TRUE(status.ok()) << status;
        if (rank == 0 && after_step_) after_step_((*worker)->steps());
      }
      replica.GetValues();
      values_[rank] = replica.values;
    });
    EXPECT_FALSE(values_.front().empty());
    for (const std::vector<float>& values : values_) EXPECT_EQ(values, values_.front());
  }

  // Takes the lost rank's place, and steps to the end.
  void ComeBack(uint64_t lost_at, const std::function<void(Worker& worker)>& see = nullptr) {
    Replica replica(job_, kLostRank);
    auto worker = Join(kLostRank, replica);
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE((*worker)->returned());
    EXPECT_EQ((*worker)->steps(), (*worker)->returned()->step);
    EXPECT_GE((*worker)->steps(), lost_at);
    if (see) see(**worker);
    TakeStepsToTheEnd(replica, *std::move(worker));
  }

  kernels::cuda::SimulatedGpu gpu_{/*seed=*/1};
  std::atomic<int> pace_ms_ = 10;  // of the others: how long they compute in each step
  JobOptionsForTest job_;
  std::unique_ptr<Cluster> cluster_;
  bool loses_questions_ = false;  // LosingChannel
  std::atomic<int> lost_questions_ = 0;
  uint64_t steps_together_ = 25;
  std::function<void(uint64_t steps)> after_step_;  // of rank 0
  std::vector<std::vector<float>> values_;          // by rank, at the end

 private:
  absl::Mutex mutex_;
  uint64_t newest_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t end_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_P(ReturningWorkerTest, TakesTheStateOfTheOthersAndJoinsThem) {
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    const double lost = NormOf(worker->optimizer().error());
    worker.reset();
    ComeBack(20, [&](Worker& returned) {
      ASSERT_TRUE(returned.returned()->lost_error_norm);
      EXPECT_GE(*returned.returned()->lost_error_norm, lost);
      EXPECT_LE(*returned.returned()->lost_error_norm, 4 * lost);
      EXPECT_EQ(NormOf(returned.optimizer().error()), 0);
    });
  });
}

TEST_P(ReturningWorkerTest, InTheWarmUpNothingIsLost) {
  job_.optimizer.freeze_step = OptimizerOptions::kNever;
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 5);
    worker.reset();
    ComeBack(5, [](Worker& returned) { EXPECT_EQ(returned.returned()->lost_error_norm, 0); });
  });
}

TEST_P(ReturningWorkerTest, ComesBackFromTheWarmUpBehindTheFreeze) {
  job_.optimizer.freeze_step = 24;
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    worker.reset();
    AwaitStepOfTheOthers(24);
    ComeBack(24);
  });
}

// How many steps the others take meanwhile nobody knows.
TEST_P(ReturningWorkerTest, ComesBackInTheWarmUpAndTakesPartInTheFreeze) {
  bool was_before = false;
  for (uint64_t freeze_step = 26; !was_before && freeze_step < 1000;
       freeze_step += freeze_step / 4) {
    SCOPED_TRACE(freeze_step);
    job_.worker.job = "freeze" + std::to_string(freeze_step);
    job_.optimizer.freeze_step = freeze_step;
    steps_together_ = freeze_step;
    Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
      TakeSteps(kLostRank, replica, *worker, 20);
      worker.reset();
      ComeBack(20, [&](Worker& returned) { was_before = returned.steps() < freeze_step; });
    });
  }
  EXPECT_TRUE(was_before);
}

TEST_P(ReturningWorkerTest, WithLambTooInTheWarmUpAroundTheFreezeAndAfterIt) {
  job_.optimizer.lamb.emplace();
  for (const uint64_t freeze_step : {OptimizerOptions::kNever, uint64_t{32}, uint64_t{5}}) {
    SCOPED_TRACE(freeze_step);
    job_.worker.job = "lamb" + std::to_string(freeze_step);
    job_.optimizer.freeze_step = freeze_step;
    Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
      TakeSteps(kLostRank, replica, *worker, 20);
      worker.reset();
      ComeBack(20);
    });
  }
}

TEST_P(ReturningWorkerTest, WithLambInOtherCodecsThanOneBit) {
  job_.optimizer = {.freeze_step = 5, .lamb = LambOptions()};
  for (const Codec codec : {FLOAT16, INT8}) {
    SCOPED_TRACE(Codec_Name(codec));
    job_.worker.job = "lamb-in-" + Codec_Name(codec);
    job_.optimizer.codec = codec;
    Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
      TakeSteps(kLostRank, replica, *worker, 20);
      worker.reset();
      ComeBack(20);
    });
  }
}

TEST_P(ReturningWorkerTest, WithZeroOneAdamTooBetweenUpdatesAroundTheFreezeAndAfterIt) {
  job_.optimizer.zero_one = {
      .var_update_scaler = 2, .local_step_scaler = 10, .local_step_clipper = 3};
  for (const uint64_t freeze_step : {101, 32, 5}) {
    SCOPED_TRACE(freeze_step);
    job_.worker.job = "zero-one" + std::to_string(freeze_step);
    job_.optimizer.freeze_step = freeze_step;
    Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
      TakeSteps(kLostRank, replica, *worker, 20);
      worker.reset();
      ComeBack(20, [](Worker& returned) { EXPECT_TRUE(returned.is_synchronised()); });
    });
  }
}

TEST_P(ReturningWorkerTest, ComesBackAfterItHasLeft) {
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    EXPECT_TRUE(worker->Leave().ok());
    worker.reset();
    ComeBack(20);
  });
}

TEST_P(ReturningWorkerTest, ComesBackTwice) {
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 10);
    worker.reset();
    {
      Replica second(job_, kLostRank);
      auto again = Join(kLostRank, second);
      ASSERT_TRUE(again.ok()) << again.status();
      ASSERT_TRUE(Step(kLostRank, second, **again).ok());
    }
    ComeBack(11);
  });
}

TEST_P(ReturningWorkerTest, IsToldWhyNobodyGivesItTheState) {
  absl::Notification told;
  absl::BlockingCounter computing(job_.workers - 1);
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker = Join(rank, replica);
    ASSERT_TRUE(worker.ok()) << worker.status();
    TakeSteps(rank, replica, **worker, 5);
    if (rank != kLostRank) {
      TakeSteps(rank, replica, **worker, 10);  // so that the lost one is absent, and may come back
      computing.DecrementCount();
      return told.WaitForNotification();  // which takes longer than that one waits
    }
    worker->reset();
    computing.Wait();
    Replica second(job_, rank);
    WorkerOptions options = second.Options();
    options.exchange_timeout = absl::Milliseconds(600);
    const absl::Status status =
        Worker::Join(options, job_.optimizer, second.Parameters(), cluster_->Connect()).status();
    told.Notify();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("no other worker has given it in 600ms (exchange_timeout)"));
  });
}

TEST_P(ReturningWorkerTest, IsGivenTheStateInTimeThoughTheQuestionForItIsLost) {
  loses_questions_ = true;
  job_.worker.exchange_timeout = absl::Seconds(4);  // one that has come is not repeated before 5 s
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    worker.reset();
    ComeBack(20);
  });
  EXPECT_GT(lost_questions_, 0);
}

TEST_P(ReturningWorkerTest, ARankThatTakesPartIsNotTaken) {
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 5);
    absl::Notification refused;
    std::thread other([&] {
      Replica second(job_, kLostRank);
      const absl::Status status = Join(kLostRank, second).status();
      EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("takes part"));
      refused.Notify();
    });
    while (!refused.HasBeenNotified()) TakeSteps(kLostRank, replica, *worker, worker->steps() + 1);
    other.join();
    TakeStepsToTheEnd(replica, std::move(worker));
  });
}

TEST_P(ReturningWorkerTest, TheProcessBeforeIsRefused) {
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 5);
    ComeBack(5, [&](Worker&) {
      const absl::Status status = Step(kLostRank, replica, *worker);
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("another process has taken rank 1"));
      EXPECT_TRUE(IsTryAgain(status)) << status;
    });
    EXPECT_TRUE(absl::IsFailedPrecondition(worker->Leave()));
  });
}

TEST_P(ReturningWorkerTest, WhenTheOthersHaveEndedItIsToTryAgain) {
  job_.workers = 2;
  job_.worker.min_workers = 1;
  absl::Notification alone;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker = Join(rank, replica);
    ASSERT_TRUE(worker.ok()) << worker.status();
    TakeSteps(rank, replica, **worker, rank == kLostRank ? 1 : 2);
    if (rank != kLostRank) {
      alone.Notify();
      EXPECT_TRUE((*worker)->Leave().ok());
      return;
    }
    alone.WaitForNotification();
    Replica next(job_, kLostRank);
    const absl::Status status = Join(kLostRank, next).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("is over"));
    EXPECT_TRUE(IsTryAgain(status)) << status;
  });
}

TEST_P(ReturningWorkerTest, AnAggregatorThatIsKilledAtAnyTimeChangesNothing) {
  if (!GetParam()) GTEST_SKIP() << "needs a state directory";
  steps_together_ = 150;
  after_step_ = [&](uint64_t steps) {
    if (steps % 16 == 0) cluster_->Kill((steps / 16) % 2);
  };
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    worker.reset();
    ComeBack(20);
  });
}

// Their snapshots are of before it came back, and it has no frames of that time.
TEST_P(ReturningWorkerTest, AggregatorsThatAreKilledBeforeItsFirstStepGoOn) {
  if (!GetParam()) GTEST_SKIP() << "needs a state directory";
  Run([&](Replica& replica, std::unique_ptr<Worker> worker) {
    TakeSteps(kLostRank, replica, *worker, 20);
    worker.reset();
    pace_ms_ = 200;  // so small chunks' answers are kept for some steps only; connections take time
    Replica second(job_, kLostRank);
    auto again = Join(kLostRank, second);
    ASSERT_TRUE(again.ok()) << again.status();
    cluster_->Kill(0);
    cluster_->Kill(1);
    TakeSteps(kLostRank, second, **again, (*again)->steps() + 3);  // the others' too
    pace_ms_ = 10;
    TakeStepsToTheEnd(second, *std::move(again));
  });
}

INSTANTIATE_TEST_SUITE_P(StateDir, ReturningWorkerTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "With" : "Without"; });

}  // namespace
}  // namespace signpost::testing
