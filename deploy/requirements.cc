#include "deploy/requirements.h"

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/layout.h"
#include "server/aggregator.h"
#include "server/job.h"

namespace signpost::deploy {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint32_t kBlockElements = 4096;  // WorkerOptions' and SessionOptions' default

// What the shard that has the most has.
struct Shard {
  uint64_t elements = 0;
  uint64_t round_bytes = 0;
  uint64_t chunks = 0;
  uint64_t reserved_bytes = 0;
};

absl::Status Check(const JobSize& size) {
  const AggregatorLimits limits;
  if (size.workers == 0 || size.workers > limits.workers) {
    return absl::InvalidArgumentError(
        absl::StrCat(size.workers, " workers; a job has 1 to ", limits.workers));
  }
  if (size.aggregators == 0 || size.aggregators > limits.workers) {
    return absl::InvalidArgumentError(
        absl::StrCat(size.aggregators, " aggregators; a job has 1 to ", limits.workers));
  }
  if (size.parameters == 0 || size.parameters > limits.parameters) {
    return absl::InvalidArgumentError(
        absl::StrCat(size.parameters, " parameters; a job has 1 to ", limits.parameters));
  }
  if (absl::Status status = CheckCodecOption("warm-up codec", size.warm_up_codec); !status.ok()) {
    return status;
  }
  return CheckCodecOption("codec", size.codec);
}

absl::StatusOr<Layout> LayoutOf(const JobSize& size) {
  Tensor tensor;
  tensor.set_name("all");
  tensor.add_shape(size.parameters);
  JobOptions options;
  options.set_block_elements(kBlockElements);
  options.set_chunk_elements(SuitableChunkElements(size.parameters, kBlockElements, size.workers));
  options.set_gamma(1.35f);
  return Layout::Create({tensor}, options);
}

uint64_t PayloadBytes(const JobSize& size, const Layout& layout, uint32_t chunk) {
  return std::max(layout.PayloadBytes(size.warm_up_codec, chunk),
                  layout.PayloadBytes(size.codec, chunk));
}

Shard LargestShard(const JobSize& size, const Layout& layout) {
  std::vector<Shard> shards(size.aggregators);
  const std::vector<uint32_t> shard_of_chunk = layout.ShardOfChunk(size.aggregators);
  for (uint32_t chunk = 0; chunk < shard_of_chunk.size(); ++chunk) {
    Shard& shard = shards[shard_of_chunk[chunk]];
    shard.elements += layout.chunks()[chunk].elements;
    shard.round_bytes += PayloadBytes(size, layout, chunk);
    ++shard.chunks;
  }
  const auto largest =
      std::max_element(shards.begin(), shards.end(),
                       [](const Shard& a, const Shard& b) { return a.elements < b.elements; });
  const uint32_t shard = largest - shards.begin();
  largest->reserved_bytes = ReservedBytes(size.workers, layout, {shard, size.aggregators});
  return *largest;
}

}  // namespace

absl::StatusOr<Requirements> RequirementsOf(const JobSize& size) {
  if (absl::Status status = Check(size); !status.ok()) return status;
  const absl::StatusOr<Layout> layout = LayoutOf(size);
  if (!layout.ok()) return layout.status();
  const Shard shard = LargestShard(size, *layout);
  const uint64_t chunk_elements = layout->chunks()[0].elements;
  const uint64_t frame_bytes = PayloadBytes(size, *layout, 0);
  const uint64_t window = std::max<uint64_t>(8, 2 * size.aggregators);
  const uint64_t kept = size.closes_without_late_workers
                            ? std::max(2 * shard.elements, 4 * shard.round_bytes)
                            : 2 * shard.round_bytes;
  const uint64_t share = 2 * ((window + size.aggregators - 1) / size.aggregators);
  const uint64_t frames = size.workers * std::min({window, share, shard.chunks}) * frame_bytes;
  const uint64_t used = 4 * shard.elements + frames + kept + 16 * chunk_elements;
  const uint64_t held =
      16 * kMiB + std::max(used, shard.reserved_bytes + std::max(shard.reserved_bytes, frames));
  const uint64_t receive = 32 * kMiB + frames;
  return Requirements{
      .chunks = layout->chunks().size(),
      .aggregator_held_bytes = held,
      .aggregator_receive_bytes = receive,
      .aggregator_memory_bytes = (64 * kMiB + held + receive) / 9 * 10,
      .aggregator_disk_bytes = 64 * kMiB + 3 * (4 * shard.elements + kept),
      .worker_memory_bytes = 256 * kMiB + 28 * size.parameters + window * frame_bytes,
  };
}

}  // namespace signpost::deploy
