#include "worker/worker_options.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "proto/custom_codec.h"
#include "worker/chunk_crew.h"

namespace signpost {
namespace {

absl::Status CheckLateness(const WorkerOptions& options) {
  if ((options.round_deadline == absl::ZeroDuration()) != (options.min_workers == 0)) {
    return absl::InvalidArgumentError(
        "a round deadline and the least number of workers go together: set both, or neither");
  }
  if (options.round_deadline < absl::ZeroDuration() ||
      options.round_deadline >= options.exchange_timeout) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the round deadline is %s; it must be less than the exchange timeout, %s",
                        absl::FormatDuration(options.round_deadline),
                        absl::FormatDuration(options.exchange_timeout)));
  }
  if (options.min_workers <= options.world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("the least number of workers is %d, of %d",
                                                    options.min_workers, options.world_size));
}

absl::StatusOr<OpenCustomCodec> OpenCodecFromOutside(const WorkerOptions& options) {
  if (options.codec_library.empty()) {
    return absl::InvalidArgumentError("a codec is custom, and there is no codec_library");
  }
  const absl::StatusOr<std::string> name = LoadCodecLibrary(options.codec_library);
  if (!name.ok()) return name.status();
  return OpenCodec(*name, options.codec_options, options.block_elements);
}

}  // namespace

absl::Status CheckOptions(const WorkerOptions& options) {
  if (absl::Status status = CheckJobName(options.job); !status.ok()) return status;
  if (absl::Status status = CheckLateness(options); !status.ok()) return status;
  if (options.threads >= 1 && options.threads <= ChunkCrew::kMostThreads) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("a worker of %d threads; wanted 1 to %d",
                                                    options.threads, ChunkCrew::kMostThreads));
}

absl::StatusOr<WantedJob> DescribeJob(const WorkerOptions& options,
                                      absl::Span<const Codec> codecs) {
  WantedJob job;
  job.workers = options.world_size;
  job.options.set_block_elements(options.block_elements);
  job.options.set_chunk_elements(options.chunk_elements);
  job.options.set_gamma(options.gamma);
  job.options.set_round_deadline_us(absl::ToInt64Microseconds(options.round_deadline));
  job.options.set_min_workers(options.min_workers);
  if (!absl::c_linear_search(codecs, CUSTOM)) return job;
  absl::StatusOr<OpenCustomCodec> opened = OpenCodecFromOutside(options);
  if (!opened.ok()) return opened.status();
  *job.options.mutable_custom_codec() = std::move(opened->description);
  job.custom_codec = std::move(opened->codec);
  return job;
}

absl::StatusOr<Layout> LayOut(absl::Span<const Tensor> tensors, WantedJob& job) {
  JobOptions& options = job.options;
  if (options.chunk_elements() == 0) {
    uint64_t elements = 0;
    for (const Tensor& tensor : tensors) elements += ElementCount(tensor);
    options.set_chunk_elements(
        SuitableChunkElements(elements, options.block_elements(), job.workers));
  }
  absl::StatusOr<Layout> layout = Layout::Create(tensors, options);
  if (layout.ok()) layout->set_custom_codec(job.custom_codec);
  return layout;
}

}  // namespace signpost
