// A gradient that is not finite: its rounds are skipped by all, named, and nothing is lost.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "log/log.h"
#include "nlohmann/json.hpp"
#include "tests/job.h"

namespace signpost::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Vector = std::vector<double>;

// What a rank holds after a step, all in layout order.
struct State {
  std::vector<float> values, momentum, error;
};

State StateOf(const Replica& replica, const Worker& worker) {
  State state{
      replica.values, {}, {worker.optimizer().error().begin(), worker.optimizer().error().end()}};
  for (uint32_t chunk = 0; chunk < worker.layout().chunks().size(); ++chunk) {
    for (float m : worker.optimizer().Momentum(chunk)) state.momentum.push_back(m);
  }
  return state;
}

class NonFiniteGradientTest : public ::testing::Test {
 protected:
  // One tensor, blocks of 16, chunks of 64, no variance correction in the way of the sums.
  NonFiniteGradientTest() {
    job_.tensors = {100, 90};
    job_.optimizer = {.bias_correction = false, .freeze_step = 4};
    job_.rates.beta1 = 0.5;
    job_.steps = 10;
  }

  // Trains with `bad` as the gradient of one element on one rank in one step.
  void TrainWith(float bad, int bad_step) {
    Cluster cluster({.aggregators = 2});
    Train(
        cluster, job_,
        [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
          absl::MutexLock lock(&mutex_);
          states_[{rank, step}] = StateOf(replica, worker);
          if (rank == 0) layout_ = std::make_unique<Layout>(worker.layout());
        },
        [&](uint32_t rank, int step, std::vector<float>& gradient) {
          if (rank == kBadRank && step == bad_step) gradient[kBadElement] = bad;
        });
  }

  bool IsSkipped(size_t element) const {
    const Chunk& bad = ChunkOf(kBadElement);
    return element >= bad.first_element && element < bad.first_element + bad.elements;
  }

  const Chunk& ChunkOf(size_t element) const {
    for (const Chunk& chunk : layout_->chunks()) {
      if (element < chunk.first_element + chunk.elements) return chunk;
    }
    return layout_->chunks().back();
  }

  static constexpr uint32_t kBadRank = 2;
  static constexpr size_t kBadElement = 120;  // tensor1, element 20
  JobOptionsForTest job_;
  absl::Mutex mutex_;
  std::map<std::pair<uint32_t, int>, State> states_;
  std::unique_ptr<Layout> layout_;
};

TEST_F(NonFiniteGradientTest, LeavesAllReplicasEqual) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    for (int bad_step : {0, 3, 4, 7}) {
      TrainWith(bad, bad_step);
      for (int step = 0; step < job_.steps; ++step) {
        for (uint32_t rank = 1; rank < job_.workers; ++rank) {
          ASSERT_EQ((states_[{rank, step}].values), (states_[{0, step}].values));
          ASSERT_EQ((states_[{rank, step}].momentum), (states_[{0, step}].momentum));
        }
      }
      for (float value : states_[{0, job_.steps - 1}].values) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST_F(NonFiniteGradientTest, SkipsItsChunkAndNoOther) {
  for (int bad_step : {2, 7}) {
    TrainWith(kNan, bad_step);
    const State &before = states_[{0, bad_step - 1}], &after = states_[{0, bad_step}];
    for (size_t j = 0; j < before.values.size(); ++j) {
      EXPECT_EQ(before.values[j] == after.values[j], IsSkipped(j)) << "element " << j;
    }
  }
}

// The ledger of the one-bit stage: mean of worker errors + momentum. A skipped round must put
// exactly the gradients' share in, apart from what never was a number.
TEST_F(NonFiniteGradientTest, LosesNoErrorAndNoOtherGradient) {
  const int bad_step = 7;
  TrainWith(kNan, bad_step);
  const size_t elements = states_[{0, 0}].values.size();
  const Chunk& bad_chunk = ChunkOf(kBadElement);
  const size_t bad_block = 100 + (kBadElement - 100) / 16 * 16;  // all that rank 2 did not pack
  for (uint32_t rank = 0; rank < job_.workers; ++rank) {
    const State &before = states_[{rank, bad_step - 1}], &after = states_[{rank, bad_step}];
    const std::vector<float> gradient = GradientOf(rank, bad_step, elements);
    for (size_t j = bad_chunk.first_element; j < bad_chunk.first_element + bad_chunk.elements;
         ++j) {
      const bool packed = rank != kBadRank || j < bad_block || j >= bad_block + 16;
      const double expected = before.error[j] + (packed ? 0.5 * gradient[j] : 0);
      // Six roundings of values below 16.
      EXPECT_NEAR(after.error[j], expected, 6 * 0x1p-21) << "rank " << rank << ", element " << j;
    }
  }
}

TEST_F(NonFiniteGradientTest, IsInEachWorkersLogWithStepAndChunk) {
  ASSERT_TRUE(log::SetFormat("json").ok());
  ::testing::internal::CaptureStderr();
  TrainWith(kNan, /*bad_step=*/3);
  const std::string written = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(log::SetFormat("text").ok());
  std::set<uint32_t> workers;
  for (const absl::string_view text : absl::StrSplit(written, '\n', absl::SkipEmpty())) {
    const auto line = nlohmann::json::parse(text.begin(), text.end());
    if (!absl::StrContains(line.at("message").get<std::string>(), "not finite on rank 2")) continue;
    EXPECT_EQ(line.at("step"), 3);
    EXPECT_EQ(line.at("chunk"), &ChunkOf(kBadElement) - layout_->chunks().data());
    workers.insert(line.at("worker").get<uint32_t>());
  }
  EXPECT_EQ(workers.size(), job_.workers) << written;
}

TEST_F(NonFiniteGradientTest, IsReportedOnAllRanksWithRankAndTensor) {
  Cluster cluster({.transport = Transport::kGrpc});
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < 6; ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      if (rank >= kBadRank && step >= 3) replica.gradient[kBadElement + rank] = kNan;
      auto report = (*worker)->Step(replica.Gradients(), {job_.rates});
      ASSERT_TRUE(report.ok()) << report.status();
      if (step < 3) {
        EXPECT_TRUE(report->skipped.empty());
        continue;
      }
      ASSERT_EQ(report->skipped.size(), 1);
      EXPECT_EQ(report->skipped[0].rank, kBadRank) << "the lowest of the ranks at fault";
      EXPECT_NE(report->skipped[0].block.find("tensor1"), std::string::npos)
          << report->skipped[0].block;
    }
    EXPECT_TRUE((*worker)->Leave().ok());
  });
}

TEST_F(NonFiniteGradientTest, EndsTrainingInWhichNoStepCountsForAHundredSteps) {
  Cluster cluster({});
  job_.workers = 2;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    const auto step = [&](float bad) {
      replica.gradient.assign(replica.values.size(), 1);
      if (rank == 1) replica.gradient[kBadElement] = bad;
      return (*worker)->Step(replica.Gradients(), {job_.rates}).status();
    };
    for (int i = 0; i < 99; ++i) ASSERT_TRUE(step(kInfinity).ok());
    ASSERT_TRUE(step(1).ok()) << "a step that counts";
    for (int i = 0; i < 99; ++i) ASSERT_TRUE(step(kInfinity).ok());
    const absl::Status status = step(kInfinity);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "up to step 199")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1: tensor 'tensor1'")) << status;
  });
}

}  // namespace
}  // namespace signpost::testing
