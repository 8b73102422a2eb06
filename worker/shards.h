// The aggregators of a job, as one of its ranks has joined them.

#ifndef SIGNPOST_WORKER_SHARDS_H_
#define SIGNPOST_WORKER_SHARDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "log/log.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "trace/event.h"
#include "worker/channel.h"
#include "worker/worker_options.h"

namespace signpost {

// Whether a job that a rank has joined can go on with it, as far as its aggregators know.
enum class JobOutlook {
  kGoesOn,      // or that is not certain
  kIsLeft,      // too many ranks have left it, and none of them has come again
  kBeginsAnew,  // another job of its name is about to begin, or has begun, and this one is over
};

// Makes the requests of one rank to each shard, and knows what the shards have answered when it
// joined. Not thread-safe.
class Shards {
 public:
  // channels[s] leads to shard s; those to shards that own no chunk are closed. `options` and
  // `layout` must outlive it.
  Shards(const WorkerOptions& options, const Layout& layout,
         std::vector<std::unique_ptr<Channel>> channels);

  uint32_t size() const { return channels_.size(); }  // of those that own chunks
  uint32_t ShardOf(uint32_t chunk) const { return shard_of_chunk_[chunk]; }
  Channel& channel(uint32_t shard) { return *channels_[shard]; }
  Channel& ChannelOf(uint32_t chunk) { return channel(ShardOf(chunk)); }
  const std::vector<uint64_t>& epochs() const { return epochs_; }  // by shard

  // Blocks until all ranks have joined the shard. Errors name the aggregator, and who is missing;
  // FAILED_PRECONDITION when the aggregator lays the job out differently.
  absl::StatusOr<JoinResponse> Join(uint32_t shard, const JobOptions& job_options,
                                    absl::Time deadline, Channel::CheckMayWait check_may_wait);
  // Once the shard is joined, whether the job still has its epoch there. Errors have TryAgain's
  // mark; what cannot be found out is none. May take a second. The aggregator takes who asks to be
  // there.
  absl::Status CheckEpochStands(uint32_t shard);
  // Of the first so many shards: any may have let this rank in together with processes that had
  // just given up, and have begun anew with those that came for them.
  absl::Status CheckEpochsStand(uint32_t shards);
  // Errors of the channel, ABORTED while the shard lacks frames of the `steps` that this rank has
  // had answers of.
  absl::Status Leave(uint32_t shard, uint64_t steps, absl::Time deadline);
  // The aggregator's error before that step; ABORTED as Leave's. What it answers is not checked.
  absl::StatusOr<ReadErrorResponse> ReadError(uint32_t chunk, uint64_t step, absl::Time deadline);
  // Of this job at the first shard; an empty one if there is no answer.
  JobStatus AskAboutJob() const;
  // The worst that a shard says. kGoesOn if one does not answer, or does not know the job: it is
  // being stopped, or has lost its state, which the next exchange tells. May take seconds.
  JobOutlook Outlook() const;

  // Of a frame of this rank, without what its codec and its step's rates ask for.
  FrameHeader HeaderOf(uint32_t chunk, uint64_t step, Codec codec) const;

  // The status with what failed, where, and, when time ran out, what the aggregator waits for: it
  // is asked, which may take seconds.
  absl::Status Explain(const absl::Status& status, uint32_t shard, absl::string_view what) const;
  // "aggregator 127.0.0.1:4000 (shard 0 of 2)"
  std::string Describe(uint32_t shard) const;

  // For the trace and the log; trace::kNone is no chunk.
  trace::Event EventOf(trace::Kind kind, uint64_t step, uint32_t chunk) const;
  log::About AboutOf(uint32_t chunk, uint64_t step) const;

 private:
  // About this job; may take seconds.
  absl::StatusOr<StatusResponse> Ask(uint32_t shard) const;

  const WorkerOptions& options_;
  const Layout& layout_;
  const uint32_t shard_count_;  // also those that own no chunk
  const std::vector<uint32_t> shard_of_chunk_;
  const uint64_t incarnation_;  // tells this process from another that claims the rank
  const uint16_t trace_job_;    // the job's label in the trace
  std::vector<uint64_t> epochs_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by shard
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_SHARDS_H_
