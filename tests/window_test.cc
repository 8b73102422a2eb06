// A worker's pipeline: while answers are still to come, it has a window's chunks under way.

#include "proto/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "worker/clock.h"

namespace signpost::testing {
namespace {

using ::testing::ElementsAreArray;

constexpr uint32_t kChunks = 40;

// Answers that are held back until the worker has nothing to do but wait for one. Then it gets the
// oldest.
class Holder final : public Clock {
 public:
  void Hold(Channel::ExchangeDone done, absl::StatusOr<Answer> answer) {
    held_.emplace_back(std::move(done), std::move(answer));
  }

  bool Await(absl::Mutex& mutex, const absl::Condition& condition,
             absl::Duration timeout) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (condition.Eval()) return true;
    under_way_.push_back(held_.size());
    if (held_.empty()) return false;  // the step will fail
    auto [done, answer] = std::move(held_.front());
    held_.pop_front();
    mutex.Unlock();
    done(std::move(answer));
    mutex.Lock();
    return condition.Eval();
  }

  // Chunks, each time that the worker waited.
  const std::vector<uint32_t>& under_way() const { return under_way_; }

 private:
  std::deque<std::pair<Channel::ExchangeDone, absl::StatusOr<Answer>>> held_;
  std::vector<uint32_t> under_way_;
};

class HoldingChannel final : public ForwardingChannel {
 public:
  HoldingChannel(std::unique_ptr<Channel> inner, Holder& holder)
      : ForwardingChannel(std::move(inner)), holder_(holder) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    ForwardingChannel::Exchange(header, std::move(payload), deadline,
                                [this, done = std::move(done)](auto answer) mutable {
                                  holder_.Hold(std::move(done), std::move(answer));
                                });
  }

 private:
  Holder& holder_;
};

// Of a worker that is alone, whose aggregators answer before a call returns.
std::vector<uint32_t> ChunksUnderWay(uint32_t shards) {
  JobOptionsForTest job;
  job.workers = 1;
  job.tensors = {kChunks * 64};
  Holder holder;
  job.worker.clock = &holder;
  job.worker.world_size = 1;
  Cluster cluster({.aggregators = shards});
  std::vector<std::unique_ptr<Channel>> channels;
  for (std::unique_ptr<Channel>& channel : cluster.Connect()) {
    channels.push_back(std::make_unique<HoldingChannel>(std::move(channel), holder));
  }
  Replica replica(job, /*rank=*/0);
  replica.gradient = GradientOf(/*rank=*/0, /*step=*/0, replica.values.size());
  auto worker = Worker::Join(job.worker, job.optimizer, replica.Parameters(), std::move(channels));
  EXPECT_TRUE(worker.ok()) << worker.status();
  const auto report = (*worker)->Step(replica.Gradients(), {job.rates});
  EXPECT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE((*worker)->Leave().ok());
  return holder.under_way();
}

// A window's, and at the end what is left.
std::vector<uint32_t> WithWindow(uint32_t window) {
  std::vector<uint32_t> under_way;
  for (uint32_t left = kChunks; left > 0; --left) under_way.push_back(std::min(left, window));
  return under_way;
}

TEST(Window, IsFullWheneverTheWorkerWaits) {
  EXPECT_THAT(ChunksUnderWay(/*shards=*/1), ElementsAreArray(WithWindow(8)));
  EXPECT_THAT(ChunksUnderWay(/*shards=*/5), ElementsAreArray(WithWindow(10)));
}

TEST(Window, IsTwoForEachShardAndEightAtLeast) {
  EXPECT_EQ(WindowOf(1), 8u);
  EXPECT_EQ(WindowOf(4), 8u);
  EXPECT_EQ(WindowOf(5), 10u);
  EXPECT_EQ(WindowOf(300), 600u);
}

}  // namespace
}  // namespace signpost::testing
