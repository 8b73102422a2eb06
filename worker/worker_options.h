// What a worker is to its job, and what the job's options follow from.

#ifndef SIGNPOST_WORKER_WORKER_OPTIONS_H_
#define SIGNPOST_WORKER_WORKER_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "worker/clock.h"

namespace signpost {

struct WorkerOptions {
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t block_elements = 4096;
  uint32_t chunk_elements = 0;  // 0: SuitableChunkElements
  float gamma = 1.35f;
  // That compress and apply, whoever calls included; at most ChunkCrew::kMostThreads. Changes no
  // bit.
  uint32_t threads = 1;
  absl::Duration join_timeout = absl::Minutes(5);
  // That a step's exchange may go on without an answer, and for each wait of a Checkpoint for the
  // other ranks.
  absl::Duration exchange_timeout = absl::Minutes(1);
  // Rounds close without the workers whose frames are not there so long after the first one's, if
  // at least min_workers' are. Both zero: they wait for all, until the exchange timeout.
  absl::Duration round_deadline;
  uint32_t min_workers = 0;
  // Lets a job resume from a checkpoint of another number of workers: each then takes the mean of
  // all errors in it. Their mean over the workers, and so what training sees, stays what it was;
  // which bits follow does not.
  bool resume_with_other_world_size = false;
  // Lets ranks join whose parameters have different values. Whoever sets it makes them equal before
  // the first step, unless the job resumes or the worker comes back.
  bool parameters_may_differ = false;
  // Where parameters and gradients are, and the optimizer's state will be, or tensors that are
  // reduced, and their errors; must outlive the worker. Null: on the host.
  kernels::cuda::Gpu* gpu = nullptr;
  // What CUSTOM is, where it is the codec of a stage or a reduction: the shared object
  // (signpost_codec.h), which the aggregators need too, and the codec's own options.
  std::string codec_library;
  std::string codec_options;
  // The number of shards of each tensor, of which this job trains one; other jobs train the others.
  // All these jobs have the same tensors in the same order, and take their steps together.
  uint32_t shards = 1;
  // With shards > 1: adds numbers up, in place, over the processes that train the other shards of
  // the same model. The optimizer calls it where a step begins, the same number of times for each
  // shard, so that all shards decide alike, by whole tensors. An error ends the session's steps.
  std::function<absl::Status(absl::Span<double>)> sum_over_shards;
  // Whether whoever waits in a call is to do so no longer; asked twice a second, by the thread that
  // waits. The call then ends with CANCELLED, and a step that does has failed. Null: nobody is
  // asked. Join does not ask while it waits for other ranks, but before it writes into parameters,
  // nor a checkpoint while an aggregator does not answer.
  std::function<bool()> is_interrupted;
  // As is_interrupted, for a job that is of use to another only; Join asks too while it waits for
  // other ranks. A call ends with its error.
  std::function<absl::Status()> check_may_wait;
  // Called, by any thread and with no lock held, when something has come that AdvanceStep can go on
  // with; for what was under way also when the worker is gone. It must not call the worker. Null:
  // nobody is.
  std::function<void()> on_news;
  Clock* clock = &Clock::Real();
};

// INVALID_ARGUMENT that names what does not go together, got and wanted.
absl::Status CheckOptions(const WorkerOptions& options);

// A job as a worker asks for it.
struct WantedJob {
  JobOptions options;
  uint32_t workers = 0;
  std::shared_ptr<const NumberCodec> custom_codec;  // that the options describe, if they do
};

// What does not depend on what the job does. Loads the codec that CUSTOM is, if one of `codecs` is
// that, and opens it; errors are the library's.
absl::StatusOr<WantedJob> DescribeJob(const WorkerOptions& options, absl::Span<const Codec> codecs);

// Chunks of the size that was asked for, or of one that suits the tensors, which `job` has then.
absl::StatusOr<Layout> LayOut(absl::Span<const Tensor> tensors, WantedJob& job);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_WORKER_OPTIONS_H_
