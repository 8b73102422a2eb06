// Invariants 1 and 2 of ARCHITECTURE.md: replicas are byte-identical after every step, and
// transport, number of aggregators, arrival order, duplicates and retries never change a bit.

#include <gtest/gtest.h>

#include <cstring>

#include "absl/synchronization/mutex.h"
#include "tests/job.h"

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

TEST(ReplicaIdentity, HoldsWithABfloat16WarmUp) {
  JobOptionsForTest job;
  job.optimizer.warm_up_codec = BFLOAT16;
  const std::vector<float> expected = TrainedOn({}, job);
  EXPECT_TRUE(
      SameBytes(TrainedOn({.transport = Transport::kGrpc, .aggregators = 3, .fault_seed = 7}, job),
                expected));
  EXPECT_FALSE(SameBytes(expected, TrainedOn({}, JobOptionsForTest()))) << "bf16 was not used";
}

TEST(ReplicaIdentity, HoldsForManyWorkersAndManyChunks) {
  JobOptionsForTest job;
  job.workers = 9;
  job.tensors = {1000, 1, 2000};
  EXPECT_TRUE(SameBytes(
      TrainedOn({.aggregators = 2}, job),
      TrainedOn({.transport = Transport::kGrpc, .aggregators = 3, .fault_seed = 3}, job)));
}

}  // namespace
}  // namespace signpost::testing
