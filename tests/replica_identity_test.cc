// Invariants 1 and 2 of ARCHITECTURE.md: replicas are byte-identical after every step, and
// transport, number of aggregators, arrival order, duplicates and retries never change a bit.

#include <gtest/gtest.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <cfenv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "tests/job.h"
#include "worker/crew_threads.h"

namespace signpost::testing {
namespace {

bool SameBytes(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The parameters that all replicas ended with.
std::vector<float> TrainedOn(const ClusterOptions& cluster_options, const JobOptionsForTest& job) {
  Cluster cluster(cluster_options);
  const std::vector<std::vector<float>> replicas = Train(cluster, job);
  for (const auto& replica : replicas) EXPECT_TRUE(SameBytes(replica, replicas[0]));
  return replicas[0];
}

TEST(ReplicaIdentity, HoldsAfterEveryStep) {
  JobOptionsForTest job;
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  absl::Mutex mutex;
  std::vector<std::vector<float>> after_step(job.steps);  // of the first rank to get there
  Train(cluster, job, [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
    absl::MutexLock lock(&mutex);
    if (after_step[step].empty()) after_step[step] = replica.values;
    EXPECT_TRUE(SameBytes(replica.values, after_step[step]))
        << "rank " << rank << ", step " << step;
  });
}

TEST(ReplicaIdentity, HoldsForBothTransportsAndAnyNumberOfAggregators) {
  const JobOptionsForTest job;
  const std::vector<float> expected = TrainedOn({}, job);
  for (Transport transport : {Transport::kLoopback, Transport::kGrpc}) {
    for (uint32_t aggregators : {1, 2, 3}) {
      EXPECT_TRUE(
          SameBytes(TrainedOn({.transport = transport, .aggregators = aggregators}, job), expected))
          << aggregators << " aggregators over "
          << (transport == Transport::kGrpc ? "gRPC" : "loopback");
    }
  }
}

TEST(ReplicaIdentity, HoldsForAnyArrivalOrderWithDuplicatesAndRetries) {
  const JobOptionsForTest job;
  const std::vector<float> expected = TrainedOn({}, job);
  for (Transport transport : {Transport::kLoopback, Transport::kGrpc}) {
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      EXPECT_TRUE(SameBytes(
          TrainedOn({.transport = transport, .aggregators = 2, .fault_seed = seed}, job), expected))
          << "seed " << seed;
    }
  }
}

TEST(ReplicaIdentity, HoldsForEveryOptimizerAndCodecInEveryStage) {
  const OptimizerOptions onebit_adam = {.freeze_step = 5};
  const OptimizerOptions onebit_lamb = {.freeze_step = 5, .lamb = LambOptions()};
  // The last step ends an interval, of two steps.
  const OptimizerOptions zero_one_adam = {
      .freeze_step = 5, .zero_one = ZeroOneOptions{.var_update_scaler = 1, .local_step_scaler = 3}};
  std::vector<OptimizerOptions> all = {onebit_adam, onebit_lamb, zero_one_adam};
  for (const Codec codec : {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT, CUSTOM}) {
    for (const OptimizerOptions& optimizer : {onebit_adam, onebit_lamb}) {
      if (codec != FLOAT32) all.emplace_back(optimizer).warm_up_codec = codec;
      all.emplace_back(optimizer).variance_codec = codec;
      all.back().variance_refresh_interval = 3;
    }
    if (codec != FLOAT32) all.emplace_back(zero_one_adam).variance_codec = codec;
    for (const OptimizerOptions& optimizer : {onebit_adam, onebit_lamb, zero_one_adam}) {
      if (codec != ONE_BIT) all.emplace_back(optimizer).codec = codec;
    }
  }
  std::set<std::vector<float>> seen;
  for (const OptimizerOptions& optimizer : all) {
    JobOptionsForTest job;
    job.optimizer = optimizer;
    UseExampleCodec(job.worker);
    SCOPED_TRACE(DescribeOptions(optimizer));
    const std::vector<float> expected = TrainedOn({}, job);
    EXPECT_TRUE(SameBytes(
        TrainedOn({.transport = Transport::kGrpc, .aggregators = 3, .fault_seed = 7}, job),
        expected));
    EXPECT_TRUE(seen.insert(expected).second) << "the optimizer or codec was not used";
  }
}

TEST(ReplicaIdentity, HoldsForManyWorkersAndManyChunks) {
  JobOptionsForTest job;
  job.workers = 9;
  job.tensors = {1000, 1, 2000};
  EXPECT_TRUE(SameBytes(
      TrainedOn({.aggregators = 2}, job),
      TrainedOn({.transport = Transport::kGrpc, .aggregators = 3, .fault_seed = 3}, job)));
}

// What a worker does to a chunk is shared out among its threads, and which chunks there are follows
// from the tensors alone. Neither may show, in a round that is skipped either.
TEST(ReplicaIdentity, HoldsForAnyNumberOfThreadsAndAggregatorsWhenRoundsAreSkipped) {
  JobOptionsForTest job;
  job.workers = 2;
  job.tensors = {1'200'000, 5, 1'000'000};
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 0;
  job.optimizer = {.freeze_step = 2, .warm_up_codec = BFLOAT16, .variance_refresh_interval = 3};
  job.steps = 8;
  const std::set<int> spoilt_steps = {1, 4, 5};  // warm-up, one-bit, refresh
  const auto spoil = [&](uint32_t rank, int step, std::vector<float>& gradient) {
    if (rank == 0 || !spoilt_steps.contains(step)) return;
    for (const size_t element : {3u, 200'000u, 300'001u}) {
      gradient[element] = std::numeric_limits<float>::quiet_NaN();
    }
  };
  using Gradients = absl::Span<const Gradient>;
  // By rank: parameters and error.
  using End = std::pair<std::vector<float>, std::vector<float>>;
  const auto train = [&](uint32_t threads, uint32_t aggregators) {
    job.worker.threads = threads;
    Cluster cluster({.aggregators = aggregators});
    absl::Mutex mutex;
    std::map<uint32_t, End> ends;
    std::set<int> skipped;
    job.take_step = [&](uint32_t, int step, Worker& worker, Gradients gradients,
                        const GroupRates& rates) {
      absl::StatusOr<StepReport> report = worker.Step(gradients, {rates});
      absl::MutexLock lock(&mutex);
      if (report.ok() && !report->skipped.empty()) skipped.insert(step);
      if (step == 0) {
        EXPECT_EQ(CrewThreads(), threads - 1);  // both workers' together
      }
      return report;
    };
    Train(
        cluster, job,
        [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
          EXPECT_GT(worker.layout().chunks().size(), 1);
          if (step + 1 < job.steps) return;
          const HostFloats error = worker.optimizer().error();
          absl::MutexLock lock(&mutex);
          ends[rank] = {replica.values, {error.begin(), error.end()}};
        },
        spoil);
    EXPECT_EQ(skipped, spoilt_steps);
    return ends;
  };
  const std::map<uint32_t, End> expected = train(/*threads=*/1, /*aggregators=*/1);
  EXPECT_TRUE(SameBytes(expected.at(0).first, expected.at(1).first));
  for (const auto& [threads, aggregators] : {std::pair(4, 1), std::pair(1, 3), std::pair(3, 2)}) {
    const std::map<uint32_t, End> ends = train(threads, aggregators);
    for (uint32_t rank = 0; rank < job.workers; ++rank) {
      SCOPED_TRACE(::testing::Message()
                   << threads << " threads, " << aggregators << " aggregators, rank " << rank);
      EXPECT_TRUE(SameBytes(ends.at(rank).first, expected.at(rank).first));
      EXPECT_TRUE(SameBytes(ends.at(rank).second, expected.at(rank).second));
    }
  }
}

// Of this thread, as torch.set_flush_denormal, or a library that was linked with -ffast-math, sets
// it; and rounding upward, which nearly every result shows.
void UseOtherFloatMode() {
  std::fesetround(FE_UPWARD);
#ifdef __SSE__
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormal numbers count as zero, and become zero
#endif
}

TEST(ReplicaIdentity, HoldsInAnyFloatModeOfTheRanksThreads) {
  JobOptionsForTest job;
  job.workers = 2;
  job.tensors = {1'200'000, 5, 100'000};
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 0;
  job.worker.threads = 2;  // one of them is the caller's
  job.steps = 8;
  std::map<std::pair<uint32_t, int>, std::vector<float>> gradients;
  for (uint32_t rank = 0; rank < job.workers; ++rank) {
    for (int step = 0; step < job.steps; ++step) {
      gradients[{rank, step}] = GradientOf(rank, step, 1'300'005);
    }
  }
  for (const OptimizerOptions& optimizer :
       {OptimizerOptions{.freeze_step = 3, .warm_up_codec = INT8, .variance_refresh_interval = 3},
        OptimizerOptions{.freeze_step = 3, .warm_up_codec = BFLOAT16, .lamb = LambOptions()},
        OptimizerOptions{.freeze_step = 3, .codec = INT4, .zero_one = ZeroOneOptions()}}) {
    job.optimizer = optimizer;
    SCOPED_TRACE(DescribeOptions(optimizer));
    const std::vector<float> expected = TrainedOn({}, job);
    Cluster cluster({});
    const Connect connect = [&cluster] {
      auto channels = cluster.Connect();
      UseOtherFloatMode();  // before the rank joins, and from then on
      return channels;
    };
    const auto replicas = Train(
        connect, job,
        [](uint32_t, int, const Replica&, Worker&) { EXPECT_EQ(std::fegetround(), FE_UPWARD); },
        [&](uint32_t rank, int step, std::vector<float>& gradient) {
          gradient = gradients.at({rank, step});
        });
    for (const std::vector<float>& replica : replicas) EXPECT_TRUE(SameBytes(replica, expected));
  }
}

}  // namespace
}  // namespace signpost::testing
