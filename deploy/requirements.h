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
//   held    4 * E error + workers * W * r frames as they wait + K + 16 bytes for each element of a
//           chunk, of the snapshot or the state under way; at least what a job of this layout
//           reserves (server/job.h), and once more that or the frames, for its reductions and so
//           that frames need not wait with their workers; and 16 MiB: --max-held-bytes
//   receive workers * W * r frames as they come, and 32 MiB: --max-receive-bytes
//   memory  64 MiB and both, and a ninth more
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
  Codec warm_up_codec = FLOAT32;  // or variance_codec, if that is wider
  Codec codec = ONE_BIT;
  bool closes_without_late_workers = false;
};

struct Requirements {
  uint64_t chunks = 0;  // that the job has; aggregators beyond that have nothing to do
  uint64_t aggregator_held_bytes = 0;     // --max-held-bytes
  uint64_t aggregator_receive_bytes = 0;  // --max-receive-bytes
  uint64_t aggregator_memory_bytes = 0;
  uint64_t aggregator_disk_bytes = 0;
  uint64_t worker_memory_bytes = 0;  // for Signpost, beside model and activations
};

// INVALID_ARGUMENT, naming the number, for a size that no job can have.
absl::StatusOr<Requirements> RequirementsOf(const JobSize& size);

}  // namespace signpost::deploy

#endif  // SIGNPOST_DEPLOY_REQUIREMENTS_H_
