#include "worker/shards.h"

#include <random>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/try_again.h"
#include "trace/recorder.h"

namespace signpost {
namespace {

// How long it may take to find out whom an aggregator waits for.
constexpr absl::Duration kStatusTimeout = absl::Seconds(3);
constexpr absl::Duration kQuestionTimeout = absl::Seconds(1);

// Of what an aggregator waits for its disk.
constexpr absl::Duration kWorthSaying = absl::Seconds(1);
// Rounds go on while one is written: only a slow one is worth naming.
constexpr absl::Duration kSlowSnapshot = absl::Seconds(10);

std::string InSeconds(absl::Duration duration) {
  return absl::StrFormat("%.1f s", absl::ToDoubleSeconds(duration));
}

uint64_t NewIncarnation() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

// What keeps the aggregator from answering, as far as it knows: "; it is waiting for rank 3".
std::string WhatIsWaitedFor(const StatusResponse& response) {
  std::string message;
  std::vector<std::string> parts;
  std::vector<std::string> disconnected;
  for (const JobStatus& job : response.jobs()) {
    for (uint32_t rank : job.waiting_for_ranks()) {
      std::string part = absl::StrCat("rank ", rank);
      if (absl::c_linear_search(job.disconnected_ranks(), rank)) disconnected.push_back(part);
      for (const RefusedJoin& refused : job.refused_joins()) {
        if (refused.rank() == rank) absl::StrAppend(&part, " (refused: ", refused.reason(), ")");
      }
      parts.push_back(std::move(part));
    }
    if (!job.state_error().empty()) {
      absl::StrAppend(&message, "; it cannot save the job's state: ", job.state_error());
    }
    if (const absl::Duration held = absl::Microseconds(job.held_us()); held >= kWorthSaying) {
      absl::StrAppend(&message, "; it has waited for its disk for ", InSeconds(held));
    } else if (const absl::Duration taken = absl::Microseconds(job.snapshot_us());
               taken >= kSlowSnapshot) {
      absl::StrAppend(&message, "; it has been writing a snapshot for ", InSeconds(taken));
    }
  }
  if (!disconnected.empty()) {
    message = absl::StrCat("; it has no connection to ", absl::StrJoin(disconnected, ", "),
                           " (has the process ended?)", message);
  }
  if (parts.empty()) return message;
  return absl::StrCat("; it is waiting for ", absl::StrJoin(parts, ", "), message);
}

}  // namespace

Shards::Shards(const WorkerOptions& options, const Layout& layout,
               std::vector<std::unique_ptr<Channel>> channels)
    : options_(options),
      layout_(layout),
      shard_count_(channels.size()),
      shard_of_chunk_(layout.ShardOfChunk(shard_count_)),
      incarnation_(NewIncarnation()),
      trace_job_(trace::LabelOf(options.job)),
      epochs_(layout.OwningShards(shard_count_)),
      channels_(std::move(channels)) {
  channels_.resize(epochs_.size());
}

absl::StatusOr<JoinResponse> Shards::Join(uint32_t shard, const JobOptions& job_options,
                                          absl::Time deadline,
                                          Channel::CheckMayWait check_may_wait) {
  JoinRequest request;
  request.set_job(options_.job);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  request.set_incarnation(incarnation_);
  request.set_shard(shard);
  request.set_shard_count(shard_count_);
  *request.mutable_options() = job_options;
  request.mutable_tensors()->Add(layout_.tensors().begin(), layout_.tensors().end());

  absl::StatusOr<JoinResponse> response = channels_[shard]->Join(request, deadline, check_may_wait);
  if (!response.ok()) {
    return Explain(response.status(), shard,
                   absl::StrFormat("rank %d could not join job '%s'", options_.rank, options_.job));
  }
  if (response->layout_fingerprint() != layout_.Fingerprint()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "aggregator %s lays job '%s' out differently (fingerprint %016x, here %016x): "
        "it runs another version of signpost",
        channels_[shard]->target(), options_.job, response->layout_fingerprint(),
        layout_.Fingerprint()));
  }
  epochs_[shard] = response->epoch();
  return response;
}

absl::Status Shards::CheckEpochStands(uint32_t shard) {
  // What is before the first round is little to answer with, and later nothing.
  const uint32_t chunk = absl::c_find(shard_of_chunk_, shard) - shard_of_chunk_.begin();
  const absl::Status status =
      ReadError(chunk, /*step=*/0, options_.clock->Now() + kQuestionTimeout).status();
  return IsTryAgain(status) ? status : absl::OkStatus();
}

absl::Status Shards::CheckEpochsStand(uint32_t shards) {
  absl::Status status;
  for (uint32_t shard = 0; shard < shards && status.ok(); ++shard) status = CheckEpochStands(shard);
  return status;
}

absl::Status Shards::Leave(uint32_t shard, uint64_t steps, absl::Time deadline) {
  LeaveRequest request;
  request.set_job(options_.job);
  request.set_epoch(epochs_[shard]);
  request.set_rank(options_.rank);
  request.set_steps(steps);
  request.set_incarnation(incarnation_);
  return channels_[shard]->Leave(request, deadline);
}

absl::StatusOr<ReadErrorResponse> Shards::ReadError(uint32_t chunk, uint64_t step,
                                                    absl::Time deadline) {
  ReadErrorRequest request;
  request.set_job(options_.job);
  request.set_epoch(epochs_[ShardOf(chunk)]);
  request.set_rank(options_.rank);
  request.set_chunk(chunk);
  request.set_step(step);
  request.set_incarnation(incarnation_);
  return ChannelOf(chunk).ReadError(request, deadline);
}

absl::StatusOr<StatusResponse> Shards::Ask(uint32_t shard) const {
  StatusRequest request;
  request.set_job(options_.job);
  return channels_[shard]->Status(request, options_.clock->Now() + kStatusTimeout);
}

JobStatus Shards::AskAboutJob() const {
  const absl::StatusOr<StatusResponse> response = Ask(/*shard=*/0);
  return response.ok() && response->jobs_size() == 1 ? response->jobs(0) : JobStatus();
}

JobOutlook Shards::Outlook() const {
  const int needed = options_.min_workers == 0 ? options_.world_size : options_.min_workers;
  JobOutlook worst = JobOutlook::kGoesOn;
  for (uint32_t shard = 0; shard < size(); ++shard) {
    const absl::StatusOr<StatusResponse> response = Ask(shard);
    // An aggregator that is being stopped has given its jobs to its snapshots.
    if (!response.ok() || response->jobs_size() == 0) return JobOutlook::kGoesOn;
    const auto& ranks = response->jobs(0).joined_ranks();
    if (!absl::c_linear_search(ranks, options_.rank)) return JobOutlook::kBeginsAnew;
    if (ranks.size() < needed) worst = JobOutlook::kIsLeft;
  }
  return worst;
}

FrameHeader Shards::HeaderOf(uint32_t chunk, uint64_t step, Codec codec) const {
  FrameHeader header;
  header.set_job(options_.job);
  header.set_epoch(epochs_[ShardOf(chunk)]);
  header.set_rank(options_.rank);
  header.set_step(step);
  header.set_chunk(chunk);
  header.set_codec(codec);
  header.set_incarnation(incarnation_);
  return header;
}

absl::Status Shards::Explain(const absl::Status& status, uint32_t shard,
                             absl::string_view what) const {
  std::string message = absl::StrCat(what, ": ", Describe(shard), ": ", status.message());
  if (absl::IsDeadlineExceeded(status)) {
    const absl::StatusOr<StatusResponse> response = Ask(shard);
    absl::StrAppend(&message,
                    response.ok() ? WhatIsWaitedFor(*response) : "; it no longer answers");
  }
  return WithMessage(status, message);
}

std::string Shards::Describe(uint32_t shard) const {
  return absl::StrFormat("aggregator %s (shard %d of %d)", channels_[shard]->target(), shard,
                         shard_count_);
}

trace::Event Shards::EventOf(trace::Kind kind, uint64_t step, uint32_t chunk) const {
  trace::Event event = {.kind = kind, .step = step, .chunk = chunk};
  event.rank = options_.rank;
  event.job = trace_job_;
  if (chunk != trace::kNone) event.epoch = epochs_[ShardOf(chunk)];
  return event;
}

log::About Shards::AboutOf(uint32_t chunk, uint64_t step) const {
  return {.job = options_.job,
          .step = step,
          .chunk = chunk,
          .worker = options_.rank,
          .aggregator = channels_[ShardOf(chunk)]->target()};
}

}  // namespace signpost
