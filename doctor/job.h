// The job that is to run, as far as it is known: what there must be enough of.

#ifndef SIGNPOST_DOCTOR_JOB_H_
#define SIGNPOST_DOCTOR_JOB_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/job.h"

namespace signpost::doctor {

struct Job {
  std::vector<std::string> aggregators;  // HOST:PORT in shard order; empty: they are not known
  uint32_t workers = 0;                  // of the whole job; 0: not known
  uint64_t parameters = 0;               // likewise
  uint32_t warm_up_bytes = 4;            // of a number, in the warm-up's codec

  // On this host.
  uint32_t local_workers = 1;
  std::optional<ShardId> shard;  // of the aggregator that runs here; none: there is none
  std::string state_dir;         // of that; empty: it has none
  std::optional<int> gpu;        // that is trained on, as CUDA counts
  std::string python;            // an interpreter that must have PyTorch; empty: none need to
};

// Most bytes that a host's processes take for a job of known size; roughly, and without what only
// the model knows, its activations. For each parameter a worker has it and its gradient (8), error,
// momentum and variance (12), and frames of up to four rounds of the warm-up; an aggregator, of its
// shard, the error, the last answer, and all workers' frames of the chunks that are under way.
uint64_t WorkerBytes(const Job& job);
uint64_t AggregatorBytes(const Job& job);

// What the state directory of the shard takes: three snapshots, the newest two and the next one.
uint64_t StateBytes(const Job& job);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_JOB_H_
