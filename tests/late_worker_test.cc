// Rounds that close without late workers: nothing of what those sent is lost, replicas stay equal,
// and the others go on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/simulated_gpu.h"
#include "proto/codec.h"
#include "proto/custom_codec.h"
#include "server/state_dir.h"
#include "storage/disk.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/loopback_channel.h"

namespace signpost::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using Vector = std::vector<double>;

// What the answers of a job stood for, whoever got them.
class Answers {
 public:
  void Add(const Layout& layout, const Answer& answer) {
    absl::MutexLock lock(&mutex_);
    Vector& values = steps_[answer.header.step()];
    values.resize(layout.elements());
    const Chunk& chunk = layout.chunks()[answer.header.chunk()];
    for (const Segment& segment : chunk.segments) {
      const uint64_t first = chunk.first_element + segment.chunk_offset;
      std::vector<float> custom(segment.elements);
      if (answer.header.codec() == CUSTOM) {
        const kernels::BlockRule rule = {layout.options().block_elements()};
        NumberCodecOf(CUSTOM, layout)
            .Decompress(rule, chunk, segment, answer.payload.data(), absl::MakeSpan(custom));
      }
      for (uint32_t i = 0; i < segment.elements; ++i) {
        values[first + i] = answer.header.codec() == CUSTOM
                                ? custom[i]
                                : ValueOf(layout, chunk, segment, i, answer);
      }
    }
  }

  // By step.
  const std::map<uint64_t, Vector>& steps() const { return steps_; }

 private:
  static double ValueOf(const Layout& layout, const Chunk& chunk, const Segment& segment,
                        uint32_t i, const Answer& answer) {
    if (answer.header.codec() == ONE_BIT) {
      const kernels::OneBitView part = OneBitPart(chunk, segment, answer.payload.data());
      const double scale = part.scales[i / layout.options().block_elements()];
      return part.bits[i / 8] >> (i % 8) & 1 ? -scale : scale;
    }
    return reinterpret_cast<const float*>(answer.payload.data())[segment.chunk_offset + i];
  }

  absl::Mutex mutex_;
  std::map<uint64_t, Vector> steps_;
};

// Notes the answers that pass.
class NotingChannel final : public ForwardingChannel {
 public:
  NotingChannel(std::unique_ptr<Channel> inner, const Layout& layout, Answers& answers)
      : ForwardingChannel(std::move(inner)), layout_(layout), answers_(answers) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    ForwardingChannel::Exchange(
        header, std::move(payload), deadline,
        [this, done = std::move(done)](absl::StatusOr<Answer> answer) mutable {
          if (answer.ok()) answers_.Add(layout_, *answer);
          done(std::move(answer));
        });
  }

 private:
  const Layout& layout_;
  Answers& answers_;
};

// An aggregator in this process, with what `signpost aggregator` does around it.
class Shard {
 public:
  explicit Shard(const std::string& directory)
      : state_dir_(*StateDir::Open(directory, {0, 1})),
        aggregator_(AggregatorOptions(), state_dir_.get()),
        snapshots_([this] {
          while (!stopping_) {
            aggregator_.AwaitSnapshotDue(absl::Seconds(1));
            EXPECT_TRUE(aggregator_.TakeSnapshots().ok());
          }
        }),
        late_rounds_([this] {
          while (!stopping_) {
            aggregator_.AwaitLateRounds(std::min(aggregator_.CloseLateRounds(), absl::Seconds(1)));
          }
        }) {}
  ~Shard() { Stop(); }

  Aggregator& aggregator() { return aggregator_; }

  // In layout order, of the only job; it is over.
  std::vector<float> TakeError() {
    EXPECT_TRUE(aggregator_.Suspend().ok());
    Stop();
    std::vector<float> error;
    const auto recovered = state_dir_->Recover(/*allow_error_reset=*/false);
    EXPECT_EQ(recovered->jobs.size(), 1);
    const JobState& job = recovered->jobs.front();
    const Layout layout = *Layout::Create(job.tensors, job.options);
    for (const ChunkState& chunk : job.chunks) {
      std::vector<float> part(chunk.error.begin(), chunk.error.end());
      part.resize(layout.chunks()[chunk.chunk].elements);
      error.insert(error.end(), part.begin(), part.end());
    }
    return error;
  }

 private:
  void Stop() {
    stopping_ = true;
    aggregator_.RingSnapshotBell();
    aggregator_.RingLateBell();
    if (snapshots_.joinable()) snapshots_.join();
    if (late_rounds_.joinable()) late_rounds_.join();
  }

  std::unique_ptr<StateDir> state_dir_;
  Aggregator aggregator_;
  std::atomic<bool> stopping_ = false;
  std::thread snapshots_, late_rounds_;
};

JobOptionsForTest ElasticJob() {
  JobOptionsForTest job;
  job.worker.round_deadline = absl::Milliseconds(100);
  job.worker.min_workers = 3;
  job.optimizer = {.bias_correction = false};
  job.rates.beta1 = 0.5;
  job.steps = 30;
  return job;
}

// Everything that went into a job, and everything that came out or is still in an error. Sums over
// all steps, in layout order.
struct Ledger {
  Vector gradients, answers;  // mean over the workers
  Vector momentum;            // of the steps after which a one-bit step follows
  Vector worker_errors, aggregator_error;
  uint64_t late_rounds = 0, steps_caught_up = 0;
  std::vector<std::vector<float>> replicas;
};

// Where each rank is. One that is to be late is so when the others have done its step, and none
// goes on where a machine that is busy would leave another behind the sixteen steps whose answers
// are kept.
class Pace {
 public:
  explicit Pace(uint32_t ranks) : steps_(ranks) {}

  // Before a rank's step; false: the others have not come.
  bool Await(uint32_t rank, uint64_t step, bool is_late) {
    absl::MutexLock lock(&mutex_);
    steps_[rank] = step;
    const auto may_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      for (size_t other = 0; other < steps_.size(); ++other) {
        if (other == rank) continue;
        if (is_late ? steps_[other] <= step : steps_[other] + 3 < step) return false;
      }
      return true;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&may_go), absl::Minutes(1));
  }

  void End(uint32_t rank) {
    absl::MutexLock lock(&mutex_);
    steps_[rank] = std::numeric_limits<uint64_t>::max() - 3;
  }

 private:
  absl::Mutex mutex_;
  std::vector<uint64_t> steps_ ABSL_GUARDED_BY(mutex_);
};

using GradientOfStep = std::function<std::vector<float>(uint32_t rank, uint64_t step, size_t n)>;

Ledger TrainWithALateWorker(const JobOptionsForTest& job, const GradientOfStep& gradient_of) {
  const std::string directory = ::testing::TempDir() + "/shard";
  std::filesystem::remove_all(directory);
  Shard shard(directory);
  Answers answers;
  absl::Mutex mutex;
  Ledger ledger;
  const uint64_t freeze = std::min<uint64_t>(job.optimizer.freeze_step, job.steps);
  size_t elements = 0;
  for (const size_t n : job.tensors) elements += n;
  const Vector zeros(elements);
  ledger.gradients = ledger.answers = ledger.momentum = zeros;
  ledger.worker_errors = ledger.aggregator_error = zeros;
  ledger.replicas.resize(job.workers);
  std::vector<std::unique_ptr<Worker>> workers(job.workers);
  std::vector<std::unique_ptr<Replica>> replicas(job.workers);
  std::vector<Layout> layouts;  // by rank
  Pace pace(job.workers);
  {
    Replica replica(job, 0);
    JobOptions options;
    options.set_block_elements(job.worker.block_elements);
    options.set_chunk_elements(job.worker.chunk_elements);
    options.set_gamma(job.worker.gamma);
    OpenCustomCodec custom;
    if (!job.worker.codec_library.empty()) {
      custom = *OpenCodec(*LoadCodecLibrary(job.worker.codec_library), job.worker.codec_options,
                          job.worker.block_elements);
      *options.mutable_custom_codec() = custom.description;
    }
    std::vector<Tensor> tensors;
    for (const Parameter& parameter : replica.Parameters()) {
      Tensor& tensor = tensors.emplace_back();
      tensor.set_name(parameter.name);
      tensor.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
    }
    layouts.push_back(*Layout::Create(tensors, options));
    layouts.back().set_custom_codec(custom.codec);
  }
  OnEachRank(job.workers, [&](uint32_t rank) {
    replicas[rank] = std::make_unique<Replica>(job, rank);
    Replica& replica = *replicas[rank];
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(
        std::make_unique<NotingChannel>(LoopbackTo(shard.aggregator()), layouts.front(), answers));
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    while ((*worker)->steps() < static_cast<uint64_t>(job.steps)) {
      const uint64_t step = (*worker)->steps();
      ASSERT_TRUE(pace.Await(rank, step, /*is_late=*/rank == 2 && step % 5 == 3));
      replica.gradient = gradient_of(rank, step, elements);
      replica.BeforeStep(**worker);
      const auto report = (*worker)->Step(replica.Gradients(), {job.rates});
      ASSERT_TRUE(report.ok()) << report.status();
      absl::MutexLock lock(&mutex);
      ledger.late_rounds += report->late_rounds;
      ledger.steps_caught_up += report->steps_caught_up;
      // In the units of the stage in which it arrives, or will.
      const bool is_one_bit = freeze < static_cast<uint64_t>(job.steps);
      const double factor = is_one_bit ? 1 - job.rates.beta1 : 1;
      for (size_t i = 0; i < elements; ++i) {
        ledger.gradients[i] += factor * replica.gradient[i] / job.workers;
      }
    }
    pace.End(rank);
    replica.GetValues();
    const HostFloats error = (*worker)->optimizer().error();
    absl::MutexLock lock(&mutex);
    for (size_t i = 0; i < elements; ++i) ledger.worker_errors[i] += error[i] / job.workers;
    ledger.replicas[rank] = replica.values;
    workers[rank] = *std::move(worker);
  });
  const std::vector<float> error = shard.TakeError();
  ledger.aggregator_error.assign(error.begin(), error.end());
  Vector momentum = zeros;
  for (const auto& [step, values] : answers.steps()) {
    const bool is_one_bit = step >= freeze;
    const bool is_last = step + 1 == static_cast<uint64_t>(job.steps);
    for (size_t i = 0; i < elements; ++i) {
      const double beta1 = job.rates.beta1;
      momentum[i] = is_one_bit ? values[i] : beta1 * momentum[i] + (1 - beta1) * values[i];
      // Before the freeze, errors and gradients are worth 1 - beta1 of what they are after it.
      const bool job_freezes = freeze < static_cast<uint64_t>(job.steps);
      ledger.answers[i] += !is_one_bit && job_freezes ? (1 - beta1) * values[i] : values[i];
      if (step + 1 >= freeze && !is_last) ledger.momentum[i] += momentum[i];
    }
  }
  return ledger;
}

// sum of answers + errors = sum of mean gradients + beta1 * (what of the momentum was sent again)
void ExpectConserved(const Ledger& ledger, double beta1, double tolerance) {
  for (size_t i = 0; i < ledger.answers.size(); ++i) {
    const double in = ledger.gradients[i] + beta1 * ledger.momentum[i];
    const double out = ledger.answers[i] + ledger.worker_errors[i] + ledger.aggregator_error[i];
    const double size = std::abs(in) + std::abs(ledger.answers[i]) + 1;
    ASSERT_NEAR(out, in, tolerance * size) << "element " << i;
  }
}

void ExpectEqual(const Ledger& ledger) {
  for (const std::vector<float>& replica : ledger.replicas) {
    EXPECT_EQ(replica, ledger.replicas.front());
  }
}

TEST(LateWorker, ConservesIntegersExactly) {
  const Ledger ledger =
      TrainWithALateWorker(ElasticJob(), [](uint32_t rank, uint64_t step, size_t n) {
        std::vector<float> gradient(n);
        for (size_t i = 0; i < n; ++i) {
          gradient[i] = static_cast<float>((i * 7 + step * 3 + rank * 5) % 11) - 5;
        }
        return gradient;
      });
  EXPECT_GT(ledger.late_rounds, 0);
  ExpectConserved(ledger, /*beta1=*/0, /*tolerance=*/0);
  ExpectEqual(ledger);
}

TEST(LateWorker, ConservesErrorsOfCompressedRounds) {
  const OptimizerOptions one_bit = {.bias_correction = false, .freeze_step = 4};
  const OptimizerOptions custom = {
      .bias_correction = false, .freeze_step = 10, .warm_up_codec = CUSTOM, .codec = CUSTOM};
  for (const OptimizerOptions& optimizer : {one_bit, custom}) {
    SCOPED_TRACE(DescribeOptions(optimizer));
    JobOptionsForTest job = ElasticJob();
    job.optimizer = optimizer;
    UseExampleCodec(job.worker);
    kernels::cuda::SimulatedGpu gpu(/*seed=*/1);
    job.gpu_of = [&](uint32_t rank) { return rank == 2 ? &gpu : nullptr; };  // the late one
    const Ledger ledger = TrainWithALateWorker(job, [](uint32_t rank, uint64_t step, size_t n) {
      return GradientOf(rank, static_cast<int>(step), n);
    });
    EXPECT_GT(ledger.late_rounds, 0);
    ExpectConserved(ledger, job.rates.beta1, /*tolerance=*/1e-6);
    ExpectEqual(ledger);
  }
}

class ElasticJobTest : public ::testing::Test {
 protected:
  ElasticJobTest()
      : job_(ElasticJob()), cluster_({.transport = Transport::kGrpc, .aggregators = 2}) {
    job_.worker.exchange_timeout = absl::Seconds(5);
    // The rank that is late, dies, leaves or comes back, and another.
    job_.gpu_of = [this](uint32_t rank) { return rank % 2 == 1 ? &gpu_ : nullptr; };
  }

  // Runs all ranks; each ends when body, called before each step, returns false.
  void Run(const std::function<bool(uint32_t rank, Worker& worker)>& body) {
    values_.resize(job_.workers);
    statuses_.resize(job_.workers);
    OnEachRank(job_.workers, [&](uint32_t rank) {
      Replica replica(job_, rank);
      auto worker =
          Worker::Join(replica.Options(), job_.optimizer, replica.Parameters(), cluster_.Connect());
      ASSERT_TRUE(worker.ok()) << worker.status();
      while ((*worker)->steps() < static_cast<uint64_t>(job_.steps)) {
        if (!body(rank, **worker)) return;
        const int step = static_cast<int>((*worker)->steps());
        replica.gradient = GradientOf(rank, step, replica.values.size());
        replica.BeforeStep(**worker);
        const auto report = (*worker)->Step(replica.Gradients(), {job_.rates});
        statuses_[rank] = report.status();
        if (!report.ok()) return;
        absl::MutexLock lock(&mutex_);
        for (const uint32_t late : report->late_ranks) late_ranks_.push_back(late);
      }
      replica.GetValues();
      values_[rank] = replica.values;
    });
  }

  std::unique_ptr<Disk> NewDirectory() const {
    std::filesystem::remove_all(checkpoints_);
    EXPECT_TRUE(MakeDirectory(checkpoints_).ok());
    return OpenDirectory(checkpoints_);
  }

  const std::string checkpoints_ = ::testing::TempDir() + "/checkpoints";
  kernels::cuda::SimulatedGpu gpu_{/*seed=*/1};
  JobOptionsForTest job_;
  Cluster cluster_;
  absl::Mutex mutex_;
  std::vector<uint32_t> late_ranks_;
  std::vector<std::vector<float>> values_;  // by rank; of those that came to the end
  std::vector<absl::Status> statuses_;      // by rank; of the last step
};

TEST_F(ElasticJobTest, GoesOnWithoutAWorkerThatDies) {
  Run([](uint32_t rank, Worker& worker) { return rank != 1 || worker.steps() < 5; });
  for (uint32_t rank : {0, 2, 3}) EXPECT_TRUE(statuses_[rank].ok()) << statuses_[rank];
  EXPECT_FALSE(values_[0].empty());
  EXPECT_EQ(values_[2], values_[0]);
  EXPECT_EQ(values_[3], values_[0]);
  EXPECT_THAT(late_ranks_, Contains(1));
}

TEST_F(ElasticJobTest, GoesOnWithoutAWorkerThatLeaves) {
  Run([](uint32_t rank, Worker& worker) {
    if (rank != 1 || worker.steps() < 5) return true;
    EXPECT_TRUE(worker.Leave().ok());
    return false;
  });
  for (uint32_t rank : {0, 2, 3}) EXPECT_TRUE(statuses_[rank].ok()) << statuses_[rank];
  EXPECT_FALSE(values_[0].empty());
  EXPECT_EQ(values_[2], values_[0]);
}

TEST_F(ElasticJobTest, WithTooFewWorkersItNamesThoseThatAreMissing) {
  Run([](uint32_t rank, Worker& worker) { return rank % 2 == 0 || worker.steps() < 5; });
  for (uint32_t rank : {0, 2}) {
    EXPECT_EQ(statuses_[rank].code(), absl::StatusCode::kDeadlineExceeded) << statuses_[rank];
    EXPECT_THAT(std::string(statuses_[rank].message()),
                HasSubstr("waiting for rank 1, rank 3; it has no connection to rank 1, rank 3 "));
  }
}

TEST_F(ElasticJobTest, OfAWorkerThatComesBackMuchLaterTheAnswersAreGone) {
  job_.steps = 40;
  absl::Notification others_are_far_ahead;
  Run([&](uint32_t rank, Worker& worker) {
    if (rank == 1 && worker.steps() >= 5) others_are_far_ahead.WaitForNotification();
    if (rank == 0 && worker.steps() >= 30 && !others_are_far_ahead.HasBeenNotified()) {
      others_are_far_ahead.Notify();
    }
    return true;
  });
  EXPECT_EQ(statuses_[1].code(), absl::StatusCode::kFailedPrecondition) << statuses_[1];
  EXPECT_THAT(std::string(statuses_[1].message()), HasSubstr("no longer kept"));
  EXPECT_TRUE(statuses_[0].ok()) << statuses_[0];
  EXPECT_EQ(values_[2], values_[0]);
}

// Saves after step 6 and, if that may fail, trains on.
TEST_F(ElasticJobTest, ACheckpointWithoutAWorkerThatIsGoneIsRefusedSoonAndTrainingGoesOn) {
  job_.worker.exchange_timeout = absl::Minutes(2);
  struct Case {
    std::string name;
    uint64_t steps = 0;  // that rank 1 takes
    bool leaves = false;
  };
  for (const auto& [name, steps, leaves] :
       {Case{"died", 4}, {"died in it", 6}, {"left", 4, /*leaves=*/true}}) {
    SCOPED_TRACE(name);
    const std::unique_ptr<Disk> disk = NewDirectory();
    job_.worker.job = name;
    Run([&, steps = steps, leaves = leaves](uint32_t rank, Worker& worker) {
      if (rank == 1 && worker.steps() == steps) {
        if (leaves) {
          EXPECT_TRUE(worker.Leave().ok());
        }
        return false;
      }
      if (worker.steps() != 6) return true;
      const absl::Time start = absl::Now();
      const absl::Status status = worker.Checkpoint(*disk);
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
      EXPECT_LT(absl::Now() - start, absl::Minutes(1));
      return true;
    });
    EXPECT_FALSE(values_[0].empty());
    EXPECT_EQ(values_[3], values_[0]);
  }
}

TEST_F(ElasticJobTest, ACheckpointThatTheOthersHaveGoneOnFromIsRefusedSoon) {
  job_.worker.exchange_timeout = absl::Minutes(2);
  job_.steps = 8;
  const std::unique_ptr<Disk> disk = NewDirectory();
  absl::Notification refused;
  Run([&](uint32_t rank, Worker& worker) {
    if (rank == 1 && worker.steps() == 6) {
      const absl::Status status = worker.Checkpoint(*disk);
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("gone on to step 7"));
      refused.Notify();
    }
    // When its part is there.
    while (rank != 1 && worker.steps() == 6 && std::filesystem::is_empty(checkpoints_)) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    // Not so far that rank 1 cannot catch up.
    if (rank != 1 && worker.steps() == 7) refused.WaitForNotification();
    return true;
  });
  for (const absl::Status& status : statuses_) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(values_[1], values_[0]);
}

TEST_F(ElasticJobTest, MoreParameterGroupsThanTravelInHeadersAreRefused) {
  job_.workers = 1;
  job_.worker.min_workers = 1;
  Replica replica(job_, 0);
  auto worker = Worker::Join(job_.worker, job_.optimizer, replica.Parameters(), cluster_.Connect());
  ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_EQ((*worker)->Step(replica.Gradients(), std::vector(129, job_.rates)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*worker)->Step(replica.Gradients(), std::vector(128, job_.rates)).ok());
}

TEST_F(ElasticJobTest, MoreTensorsOfLambThanTravelInHeadersAreRefused) {
  job_.workers = 1;
  job_.worker.min_workers = 1;
  job_.optimizer.lamb.emplace();
  for (const size_t tensors : {4097, 4096}) {
    job_.tensors.assign(tensors, 1);
    Replica replica(job_, 0);
    auto worker =
        Worker::Join(job_.worker, job_.optimizer, replica.Parameters(), cluster_.Connect());
    const bool is_refused = worker.status().code() == absl::StatusCode::kInvalidArgument;
    EXPECT_EQ(is_refused, tensors > 4096) << worker.status();
  }
}

TEST(WorkerOptions, LatenessIsCheckedBeforeAnythingIsSent) {
  Cluster cluster({});
  for (const auto& [deadline, min_workers] : {std::pair{absl::Seconds(1), 0},
                                              {absl::ZeroDuration(), 2},
                                              {absl::Seconds(1), 5},
                                              {absl::Hours(1), 2},
                                              {-absl::Seconds(1), 2}}) {
    JobOptionsForTest job;
    job.worker.world_size = 4;
    job.worker.round_deadline = deadline;
    job.worker.min_workers = min_workers;
    Replica replica(job, 0);
    const auto worker =
        Worker::Join(job.worker, job.optimizer, replica.Parameters(), cluster.Connect());
    EXPECT_EQ(worker.status().code(), absl::StatusCode::kInvalidArgument) << deadline;
  }
}

}  // namespace
}  // namespace signpost::testing
