#include "bench/costs.h"

#include <algorithm>

#include "proto/layout.h"

namespace signpost::bench {
namespace {

constexpr double kGiga = 1e9;
constexpr uint32_t kBlockElements = 4096;  // the default of Signpost's jobs

}  // namespace

double CodecCosts::AggregateSeconds(uint32_t workers) const {
  return std::max(aggregate_least_s, aggregate_s + workers * aggregate_worker_s);
}

CodecCosts Float32Costs() {
  return {.bytes = 4,
          .compress_s = 1 / (1.19 * kGiga),
          .apply_s = 1 / (1.25 * kGiga),  // AdamStep
          // Reads and writes its error, writes the answer: 12 bytes at the 26.5 GB/s that were
          // measured with 4 workers; and reads 4 of each.
          .aggregate_s = 12 / (26.5 * kGiga),
          .aggregate_worker_s = 4 / (26.5 * kGiga),
          .aggregate_least_s = 0};
}

CodecCosts Bfloat16Costs() {
  return {.bytes = 2,
          .compress_s = 1 / (1.45 * kGiga),
          .apply_s = 1 / (1.25 * kGiga),
          .aggregate_s = 10 / (27.7 * kGiga),
          .aggregate_worker_s = 2 / (27.7 * kGiga),
          .aggregate_least_s = 0};
}

CodecCosts OneBitCosts() {
  // Arithmetic's line goes through 1.85 Gelem/s with 8 workers and 1.19 with 16.
  constexpr double kWorker = (1 / 1.19 - 1 / 1.85) / 8;
  return {.bytes = 1. / 8 + 4. / kBlockElements,
          .compress_s = 1 / (1.92 * kGiga),
          .apply_s = 1 / (2.34 * kGiga),
          .aggregate_s = (1 / 1.85 - 8 * kWorker) / kGiga,
          .aggregate_worker_s = kWorker / kGiga,
          .aggregate_least_s = 1 / (2.47 * kGiga)};
}

TransportCosts MeasuredTransportCosts() {
  return {.cpu_s_per_byte = 0.6e-9, .cpu_s_per_frame = 100e-6, .latency_s = 100e-6};
}

uint32_t Cluster::window() const { return std::max<uint32_t>(8, 2 * shards); }

ChunkTimes ChunkTimesOf(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                        const TransportCosts& transport) {
  const uint64_t most = cluster.chunk_elements != 0
                            ? cluster.chunk_elements
                            : SuitableChunkElements(parameters, kBlockElements);
  const uint64_t chunks = (parameters + most - 1) / most;
  const double elements = static_cast<double>(parameters) / static_cast<double>(chunks);
  const double bytes = elements * codec.bytes;
  return {.chunks = chunks,
          .link_s = 8 * bytes / cluster.link_bits_per_s,
          .transport_s = bytes * transport.cpu_s_per_byte + transport.cpu_s_per_frame,
          .compress_s = elements * codec.compress_s,
          .apply_s = elements * codec.apply_s,
          .aggregate_s = elements * codec.AggregateSeconds(cluster.workers)};
}

}  // namespace signpost::bench
