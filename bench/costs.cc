#include "bench/costs.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/layout.h"
#include "proto/window.h"

namespace signpost::bench {
namespace {

constexpr double kGiga = 1e9;
constexpr uint32_t kBlockElements = 4096;  // the default of Signpost's jobs

struct DenseBytesOf {
  double payload;
  double error;  // that a sum reads and writes
};
constexpr DenseBytesOf kFloat32Bytes = {.payload = 4, .error = 0};
constexpr DenseBytesOf kSixteenBitBytes = {.payload = 2, .error = 2 * 4};

// Of kernels that do so many Gelem/s; a sum takes what its bytes take, of so many for 4 workers.
CodecCosts DenseCosts(const DenseBytesOf& bytes, double compress, double step, double aggregate_4) {
  const double of_sum = bytes.error + bytes.payload;
  const double bytes_per_s = aggregate_4 * kGiga * (of_sum + 4 * bytes.payload);
  return {.bytes = bytes.payload,
          .compress_s = 1 / (compress * kGiga),
          .apply_s = 1 / (step * kGiga),
          .aggregate_s = of_sum / bytes_per_s,
          .aggregate_worker_s = bytes.payload / bytes_per_s,
          .aggregate_least_s = 0};
}

// Likewise; the line goes through the sums of 4 and 8 workers. What came is decompressed for Adam's
// step in fp32, a block at a time: from the cache, so that takes no longer than counted here.
CodecCosts IntegerCosts(double bits, double compress, double decompress, double step,
                        double aggregate_4, double aggregate_8) {
  const double worker_s = (1 / aggregate_8 - 1 / aggregate_4) / (4 * kGiga);
  return {.bytes = bits / 8 + 4. / kBlockElements,
          .compress_s = 1 / (compress * kGiga),
          .apply_s = (1 / decompress + 1 / step) / kGiga,
          .aggregate_s = 1 / (aggregate_4 * kGiga) - 4 * worker_s,
          .aggregate_worker_s = worker_s,
          .aggregate_least_s = 0};
}

// Likewise; arithmetic's line goes through the sums of 16 and 64 workers.
CodecCosts OneBitCostsOf(double compress, double apply, double aggregate_4, double aggregate_16,
                         double aggregate_64) {
  const double worker_s = (1 / aggregate_64 - 1 / aggregate_16) / (48 * kGiga);
  return {.bytes = 1. / 8 + 4. / kBlockElements,
          .compress_s = 1 / (compress * kGiga),
          .apply_s = 1 / (apply * kGiga),
          .aggregate_s = 1 / (aggregate_16 * kGiga) - 16 * worker_s,
          .aggregate_worker_s = worker_s,
          .aggregate_least_s = 1 / (aggregate_4 * kGiga)};
}

}  // namespace

double CodecCosts::AggregateSeconds(uint32_t workers) const {
  return std::max(aggregate_least_s, aggregate_s + workers * aggregate_worker_s);
}

CodecCosts Float32Costs() { return DenseCosts(kFloat32Bytes, 4.2, 1.65, 1.37); }

CodecCosts Bfloat16Costs() { return DenseCosts(kSixteenBitBytes, 2.8, 1.8, 2.03); }

CodecCosts Float16Costs() { return Bfloat16Costs(); }

CodecCosts Int8Costs() { return IntegerCosts(8, 2.8, 6.64, 1.65, 2.78, 1.59); }

CodecCosts Int4Costs() { return IntegerCosts(4, 2.99, 6.7, 1.65, 3.28, 1.88); }

CodecCosts OneBitCosts() { return OneBitCostsOf(2.81, 3.68, 4.7, 2.77, 0.9); }

const CodecCosts& Costs::Of(Codec codec) const {
  switch (codec) {
    case FLOAT32:
      return fp32;
    case BFLOAT16:
      return bf16;
    case FLOAT16:
      return fp16;
    case INT8:
      return int8;
    case INT4:
      return int4;
    case ONE_BIT:
      return one_bit;
    default:
      ABSL_RAW_LOG(FATAL, "nothing is known of what codec %d costs", static_cast<int>(codec));
  }
}

TransportCosts MeasuredTransportCosts() {
  return {.cpu_s_per_byte = 0.4e-9, .cpu_s_per_frame = 50e-6, .latency_s = 100e-6};
}

absl::StatusOr<Costs> CostsOfKernels(const Figures& kernels) {
  std::string missing;
  const auto rate = [&](const std::string& name) {
    for (const Figure& figure : kernels.figures()) {
      const bool is_it = figure.name() == name && figure.unit() == "Gelem/s";
      if (is_it && figure.value() > 0) return figure.value();
    }
    if (missing.empty()) missing = name;
    return 1.0;
  };
  // In the order in which they are missed.
  const auto dense = [&](const std::string& type, const DenseBytesOf& bytes) {
    const double compress = rate("compress, " + type), step = rate("Adam step, " + type);
    return DenseCosts(bytes, compress, step, rate("aggregate, " + type + ", 4 workers"));
  };
  const auto integers = [&](const std::string& type, double bits) {
    const double compress = rate("compress, " + type), decompress = rate("decompress, " + type);
    const double of_4 = rate("aggregate, " + type + ", 4 workers");
    const double of_8 = rate("aggregate, " + type + ", 8 workers");
    return IntegerCosts(bits, compress, decompress, rate("Adam step, fp32"), of_4, of_8);
  };
  Costs costs;
  costs.fp32 = dense("fp32", kFloat32Bytes);
  costs.bf16 = dense("bf16", kSixteenBitBytes);
  costs.fp16 = dense("fp16", kSixteenBitBytes);
  costs.int8 = integers("int8", /*bits=*/8);
  costs.int4 = integers("int4", /*bits=*/4);
  const double compress = rate("compress, one-bit momentum"), apply = rate("apply");
  const double of_4 = rate("aggregate, 4 workers"), of_16 = rate("aggregate, 16 workers");
  costs.one_bit = OneBitCostsOf(compress, apply, of_4, of_16, rate("aggregate, 64 workers"));
  if (missing.empty()) return costs;
  return absl::InvalidArgumentError(absl::StrCat("there is no '", missing, "' in Gelem/s"));
}

double ThreadSpeedup(uint32_t threads) { return threads <= 1 ? 1 : 0.75 * threads; }

uint32_t Cluster::threads() const {
  constexpr uint32_t kMostOfJobs = 8;
  return worker_threads != 0 ? worker_threads : std::clamp(cores_per_host, 1u, kMostOfJobs);
}

std::string Describe(const Cluster& cluster) {
  const auto counted = [](uint32_t count, absl::string_view what) {
    return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
  };
  const double mbit = cluster.link_bits_per_s / 1e6;
  return absl::StrFormat(
      "%s and %s, %s with %s, %s in each worker; links of %.*f Mbit/s",
      counted(cluster.workers, "worker"), counted(cluster.shards, "aggregator"),
      cluster.colocated ? "these on the workers' hosts," : "each on a host of its own",
      counted(cluster.cores_per_host, "core"), counted(cluster.threads(), "thread"),
      mbit >= 100 || mbit == std::floor(mbit) ? 0 : 2, mbit);
}

uint32_t Cluster::window() const { return WindowOf(shards); }

uint64_t ChunkCount(uint64_t parameters, uint32_t chunk_elements, uint32_t workers) {
  const uint64_t most = chunk_elements != 0
                            ? chunk_elements
                            : SuitableChunkElements(parameters, kBlockElements, workers);
  return (parameters + most - 1) / most;
}

uint64_t MostChunksOfAShard(uint64_t chunks, uint32_t shards) { return (chunks - 1) / shards + 1; }

ChunkTimes ChunkTimesOf(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                        const TransportCosts& transport) {
  const uint64_t chunks = ChunkCount(parameters, cluster.chunk_elements, cluster.workers);
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
