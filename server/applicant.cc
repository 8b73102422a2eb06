#include "server/applicant.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/custom_codec.h"

namespace signpost {
namespace {

absl::Status CheckIdentity(const JoinRequest& request, ShardId shard) {
  if (absl::Status status = CheckJobName(request.job()); !status.ok()) return status;
  if (request.rank() >= request.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " is not in [0, ", request.world_size(), ")"));
  }
  if (request.shard_count() != shard.shard_count) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "rank %d lists %d %s, but this one is shard %d of %d (its --shard): all workers must list "
        "as many",
        request.rank(), request.shard_count(),
        request.shard_count() == 1 ? "aggregator" : "aggregators", shard.shard, shard.shard_count));
  }
  if (request.shard() != shard.shard) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "this aggregator is shard %d of %d, but rank %d takes it for shard %d: all workers must "
        "list the aggregators in shard order",
        shard.shard, shard.shard_count, request.rank(), request.shard()));
  }
  return absl::OkStatus();
}

// UINT64_MAX if it is more.
uint64_t CountElements(const JoinRequest& request) {
  uint64_t sum = 0;
  for (const Tensor& tensor : request.tensors()) {
    const uint64_t before = sum;
    sum += ElementCount(tensor);
    if (sum < before) return UINT64_MAX;
  }
  return sum;
}

constexpr uint64_t kMaxRoundDeadlineUs = uint64_t{24} * 3600 * 1'000'000;

absl::Status CheckLateness(const JoinRequest& request) {
  const JobOptions& options = request.options();
  if (options.min_workers() > request.world_size()) {
    return absl::InvalidArgumentError(absl::StrFormat("option min_workers is %d, of %d workers",
                                                      options.min_workers(), request.world_size()));
  }
  if (options.round_deadline_us() != 0 &&
      (options.round_deadline_us() < 1000 || options.round_deadline_us() > kMaxRoundDeadlineUs)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("option round_deadline_us is %d; a deadline is between a millisecond and a "
                        "day",
                        options.round_deadline_us()));
  }
  if ((options.min_workers() == 0) != (options.round_deadline_us() == 0)) {
    return absl::InvalidArgumentError(
        "options min_workers and round_deadline_us go together: set both, or neither");
  }
  return absl::OkStatus();
}

// As the applicant's, but for those options.
absl::Status CheckMatches(const Applicant& applicant, const JobOptions& options, const Job& job) {
  if (applicant.world_size != job.world_size()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the world size is %d here but %d in the job", applicant.world_size, job.world_size()));
  }
  return CheckSameJob(applicant.layout.tensors(), options, job.layout());
}

}  // namespace

absl::Status LimitError(absl::string_view what, uint64_t got, uint64_t limit,
                        absl::string_view flag) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: %d is over this aggregator's limit of %d, which %s sets", what, got, limit, flag));
}

uint64_t FramesOf(uint32_t world_size, const Layout& layout) {
  return uint64_t{world_size} * layout.chunks().size();
}

absl::StatusOr<Applicant> CheckJoin(const JoinRequest& request, std::string peer, ShardId shard,
                                    const AggregatorLimits& limits) {
  if (absl::Status status = CheckIdentity(request, shard); !status.ok()) return status;
  if (absl::Status status = CheckLateness(request); !status.ok()) return status;
  if (request.world_size() > limits.workers) {
    return LimitError("workers", request.world_size(), limits.workers, "--max-workers");
  }
  if (const uint64_t elements = CountElements(request); elements > limits.parameters) {
    return LimitError("parameters", elements, limits.parameters, "--max-parameters");
  }
  // As the layout says, before they are copied for it.
  if (static_cast<size_t>(request.tensors_size()) > kMaxTensors) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the job has %d tensors; at most %d", request.tensors_size(), kMaxTensors));
  }
  const std::vector<Tensor> tensors(request.tensors().begin(), request.tensors().end());
  absl::StatusOr<Layout> layout = Layout::Create(tensors, request.options());
  if (!layout.ok()) return layout.status();
  if (const uint32_t owning = layout->OwningShards(shard.shard_count); shard.shard >= owning) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shard %d of %d owns none of the job's chunks: it is to be joined at the first %d only",
        shard.shard, shard.shard_count, owning));
  }
  if (const uint64_t frames = FramesOf(request.world_size(), *layout); frames > limits.frames) {
    return LimitError("frames of a step", frames, limits.frames, "--max-frames");
  }
  if (request.options().has_custom_codec()) {
    absl::StatusOr<std::shared_ptr<const NumberCodec>> codec =
        OpenCodecOf(request.options().custom_codec(), request.options().block_elements());
    if (!codec.ok()) return codec.status();
    layout->set_custom_codec(*std::move(codec));
  }
  uint64_t payload_bytes = 0;
  for (uint32_t chunk = 0; chunk < layout->chunks().size(); ++chunk) {
    payload_bytes = std::max(payload_bytes, LargestPayload(*layout, chunk));
    // Of ranks that come back.
    if (request.options().min_workers() > 0) {
      payload_bytes = std::max(payload_bytes, layout->PayloadBytes(STATE, chunk));
    }
  }
  if (payload_bytes > limits.payload_bytes) {
    return LimitError("bytes of a frame", payload_bytes, limits.payload_bytes,
                      "--max-message-bytes");
  }
  return Applicant{request.job(),
                   request.world_size(),
                   {request.rank(), request.incarnation(), std::move(peer)},
                   *std::move(layout)};
}

absl::Status CheckMatches(const Applicant& applicant, const Job& job) {
  return CheckMatches(applicant, applicant.layout.options(), job);
}

absl::Status CheckMatchesButBeginning(const Applicant& applicant, const Job& job) {
  JobOptions options = applicant.layout.options();
  options.set_parameters_crc32c(job.layout().options().parameters_crc32c());
  options.set_first_step(job.layout().options().first_step());
  options.set_local_steps(job.layout().options().local_steps());
  return CheckMatches(applicant, options, job);
}

}  // namespace signpost
