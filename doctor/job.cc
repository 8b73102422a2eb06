#include "doctor/job.h"

#include <algorithm>

#include "deploy/requirements.h"

namespace signpost::doctor {

absl::StatusOr<Needs> NeedsOf(const Job& job) {
  constexpr uint64_t kParameterBytes = 4;
  const uint32_t aggregators = job.shard ? job.shard->shard_count : job.aggregators.size();
  const absl::StatusOr<deploy::Requirements> requirements =
      deploy::RequirementsOf({.workers = std::max(job.workers, 1u),
                              .aggregators = std::max(aggregators, 1u),
                              .parameters = job.parameters,
                              .warm_up_codec = job.warm_up_codec});
  if (!requirements.ok()) return requirements.status();
  return Needs{
      .worker_bytes = requirements->worker_memory_bytes + kParameterBytes * job.parameters,
      .aggregator_bytes = requirements->aggregator_memory_bytes,
      .state_bytes = requirements->aggregator_disk_bytes,
  };
}

}  // namespace signpost::doctor
