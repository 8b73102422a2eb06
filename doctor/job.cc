#include "doctor/job.h"

#include <algorithm>

namespace signpost::doctor {
namespace {

constexpr uint64_t kModelBytes = 8;       // a parameter and its gradient
constexpr uint64_t kOptimizerBytes = 12;  // error, momentum, variance
constexpr uint64_t kKeptRounds = 4;       // of the warm-up, with a state directory
constexpr uint64_t kErrorBytes = 4;
constexpr uint64_t kSnapshots = 3;
constexpr uint64_t kChunkElements = 2 << 20;  // at most

uint64_t ShardParameters(const Job& job) {
  const uint64_t shards = job.shard ? job.shard->shard_count : 1;
  return (job.parameters + shards - 1) / shards;
}

// Of one worker, at one shard: max(8, 2 S) over all S.
uint64_t ChunksUnderWay(const Job& job) {
  const uint64_t shards = job.shard ? job.shard->shard_count : 1;
  return std::max<uint64_t>((8 + shards - 1) / shards, 2);
}

}  // namespace

uint64_t WorkerBytes(const Job& job) {
  return job.parameters * (kModelBytes + kOptimizerBytes + kKeptRounds * job.warm_up_bytes);
}

uint64_t AggregatorBytes(const Job& job) {
  const uint64_t parameters = ShardParameters(job);
  const uint64_t under_way = std::min(parameters, ChunksUnderWay(job) * kChunkElements);
  return parameters * (kErrorBytes + job.warm_up_bytes) +
         std::max<uint64_t>(job.workers, 1) * under_way * job.warm_up_bytes;
}

uint64_t StateBytes(const Job& job) {
  return kSnapshots * ShardParameters(job) * (kErrorBytes + job.warm_up_bytes);
}

}  // namespace signpost::doctor
