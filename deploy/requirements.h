// What a job takes of the hosts that its processes run on.
//
// All of it follows from the layout that the job will have, of one tensor with all parameters, and
// is a bound: what was measured stays below (tests/pods/requirements_test.cc). With, of the shard
// that has the most of them,
//   E  elements,
//   R  the bytes of a round's payloads in the largest of the job's codecs, r of them in one chunk,
//   w  = max(8, 2 * aggregators): chunks that a worker has under way (worker/worker.cc),
//   W  = min(w, 2 * ceil(w / aggregators), chunks of the shard): of them, at one shard. Shards have
//        chunks in turn; twice their share is for workers that are not in step,
//   K  = max(2 * E, 4 * R) if rounds close without late workers, otherwise 2 * R: answers that some
//      rank may still need (server/owned_chunk.h),
// an aggregator has
//   memory  64 MiB + 4 * E error + 2 * workers * W * r frames, as they come and as they wait
//           + K + 16 bytes for each element of a chunk, of the snapshot or the state under way;
//           and a ninth more, which --max-held-bytes leaves free
//   disk    3 * (4 * E + K) snapshots: two, and the one that is being written; and 64 MiB
// and a worker, beside the training program's own, 256 MiB and 20 bytes for each parameter
// (momentum, variance, error, gradient in fp32, and a refresh of the variance), 8 more of frames
// that are kept and answers that are held, and its window of frames.

#ifndef SIGNPOST_DEPLOY_REQUIREMENTS_H_
#define SIGNPOST_DEPLOY_REQUIREMENTS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/aggregator.pb.h"

namespace signpost::deploy {

struct JobSize {
  uint32_t workers = 0;
  uint32_t aggregators = 0;
  uint64_t parameters = 0;
  Codec warm_up_codec = FLOAT32;
  Codec codec = ONE_BIT;
  bool closes_without_late_workers = false;
};

struct Requirements {
  uint64_t chunks = 0;  // that the job has; aggregators beyond that have nothing to do
  uint64_t aggregator_memory_bytes = 0;
  uint64_t aggregator_disk_bytes = 0;
  uint64_t worker_memory_bytes = 0;  // for Signpost, beside model and activations
};

// INVALID_ARGUMENT, naming the number, for a size that no job can have.
absl::StatusOr<Requirements> RequirementsOf(const JobSize& size);

}  // namespace signpost::deploy

#endif  // SIGNPOST_DEPLOY_REQUIREMENTS_H_
