// The job that is to run, as far as it is known: what there must be enough of.

#ifndef SIGNPOST_DOCTOR_JOB_H_
#define SIGNPOST_DOCTOR_JOB_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/aggregator.pb.h"
#include "server/job.h"

namespace signpost::doctor {

struct Job {
  std::vector<std::string> aggregators;  // HOST:PORT in shard order; empty: they are not known
  uint32_t workers = 0;                  // of the whole job; 0: not known
  uint64_t parameters = 0;               // likewise
  Codec warm_up_codec = FLOAT32;

  // On this host.
  uint32_t local_workers = 1;
  std::optional<ShardId> shard;  // of the aggregator that runs here; none: there is none
  std::string state_dir;         // of that; empty: it has none
  std::optional<int> gpu;        // that is trained on, as CUDA counts
  std::string python;            // an interpreter that must have PyTorch; empty: none need to
};

// What a job takes of its hosts at most.
struct Needs {
  // Of a worker, with the model's parameters and without what only the model knows, its
  // activations.
  uint64_t worker_bytes;
  uint64_t aggregator_bytes;
  uint64_t state_bytes;  // of a state directory
};

// As deploy/requirements.h has them. The number of parameters must be known; one worker and one
// aggregator stand for numbers that are not. INVALID_ARGUMENT for a job that cannot be.
absl::StatusOr<Needs> NeedsOf(const Job& job);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_JOB_H_
