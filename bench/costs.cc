#include "bench/costs.h"

#include <algorithm>

#include "proto/layout.h"
#include "proto/window.h"

namespace signpost::bench {
namespace {

constexpr double kGiga = 1e9;
constexpr uint32_t kBlockElements = 4096;  // the default of Signpost's jobs

}  // namespace

double CodecCosts::AggregateSeconds(uint32_t workers) const {
  return std::max(aggregate_least_s, aggregate_s + workers * aggregate_worker_s);
}

CodecCosts Float32Costs() {
  constexpr double kAggregated = 27.4 * kGiga;  // bytes in a second, of 4 workers: no error
  return {.bytes = 4,
          .compress_s = 1 / (3.6 * kGiga),
          .apply_s = 1 / (1.65 * kGiga),  // AdamStep
          .aggregate_s = 4 / kAggregated,
          .aggregate_worker_s = 4 / kAggregated,
          .aggregate_least_s = 0};
}

CodecCosts Bfloat16Costs() {
  constexpr double kAggregated = 36.6 * kGiga;  // with an error, which is read and written
  return {.bytes = 2,
          .compress_s = 1 / (2.27 * kGiga),
          .apply_s = 1 / (1.8 * kGiga),
          .aggregate_s = (8 + 2) / kAggregated,
          .aggregate_worker_s = 2 / kAggregated,
          .aggregate_least_s = 0};
}

CodecCosts OneBitCosts() {
  // Arithmetic's line goes through 2.77 Gelem/s with 16 workers and 0.9 with 64.
  constexpr double kWorker = (1 / 0.9 - 1 / 2.77) / 48;
  return {.bytes = 1. / 8 + 4. / kBlockElements,
          .compress_s = 1 / (2.81 * kGiga),
          .apply_s = 1 / (3.68 * kGiga),
          .aggregate_s = (1 / 2.77 - 16 * kWorker) / kGiga,
          .aggregate_worker_s = kWorker / kGiga,
          .aggregate_least_s = 1 / (4.7 * kGiga)};
}

TransportCosts MeasuredTransportCosts() {
  return {.cpu_s_per_byte = 0.4e-9, .cpu_s_per_frame = 50e-6, .latency_s = 100e-6};
}

double ThreadSpeedup(uint32_t threads) { return threads <= 1 ? 1 : 0.75 * threads; }

uint32_t Cluster::threads() const {
  constexpr uint32_t kMostOfJobs = 8;
  return worker_threads != 0 ? worker_threads : std::clamp(cores_per_host, 1u, kMostOfJobs);
}

uint32_t Cluster::window() const { return WindowOf(shards); }

ChunkTimes ChunkTimesOf(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                        const TransportCosts& transport) {
  const uint64_t most = cluster.chunk_elements != 0
                            ? cluster.chunk_elements
                            : SuitableChunkElements(parameters, kBlockElements);
  const uint64_t chunks = (parameters + most - 1) / most;
  const double elements = static_cast<double>(parameters) / static_cast<double>(chunks);
  const double bytes = elements * codec.bytes;
  const double speedup = ThreadSpeedup(cluster.threads());
  return {.chunks = chunks,
          .link_s = 8 * bytes / cluster.link_bits_per_s,
          .transport_s = bytes * transport.cpu_s_per_byte + transport.cpu_s_per_frame,
          .compress_s = elements * codec.compress_s / speedup,
          .apply_s = elements * codec.apply_s / speedup,
          .kernels_s = elements * (codec.compress_s + codec.apply_s),
          .aggregate_s = elements * codec.AggregateSeconds(cluster.workers)};
}

}  // namespace signpost::bench
