// What an exchange costs: links, processors, and the chunks that go through them.

#ifndef SIGNPOST_BENCH_COSTS_H_
#define SIGNPOST_BENCH_COSTS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "bench/figures.h"
#include "proto/aggregator.pb.h"

namespace signpost::bench {

// What an element costs in a codec: bytes in each direction, and seconds of one core.
struct CodecCosts {
  double bytes;
  double compress_s;
  double apply_s;
  // A sum over n workers takes max(aggregate_least_s, aggregate_s + n * aggregate_worker_s): the
  // least is memory's, the rest arithmetic's.
  double aggregate_s;
  double aggregate_worker_s;
  double aggregate_least_s;

  double AggregateSeconds(uint32_t workers) const;
};

// As the kernels were measured: docs/measurements.md, "What predictions count with"; one core of an
// AMD EPYC (Zen 4), in DRAM.
CodecCosts Float32Costs();
CodecCosts Bfloat16Costs();
CodecCosts Float16Costs();
CodecCosts Int8Costs();
CodecCosts Int4Costs();
CodecCosts OneBitCosts();

// Of one core, for sending and for receiving alike: checksums, copies, gRPC, the kernel's TCP.
struct TransportCosts {
  double cpu_s_per_byte;
  double cpu_s_per_frame;
  double latency_s;  // what an exchange of next to nothing takes beyond that, there and back
};

// docs/measurements.md, "Transport".
TransportCosts MeasuredTransportCosts();

struct Costs {
  TransportCosts transport = MeasuredTransportCosts();
  CodecCosts fp32 = Float32Costs();
  CodecCosts bf16 = Bfloat16Costs();
  CodecCosts fp16 = Float16Costs();
  CodecCosts int8 = Int8Costs();
  CodecCosts int4 = Int4Costs();
  CodecCosts one_bit = OneBitCosts();

  // CHECK-fails for any other codec.
  const CodecCosts& Of(Codec codec) const;
};

// As `signpost bench kernels --json` found the kernels on other processors. INVALID_ARGUMENT names
// the figure that is missing.
absl::StatusOr<Costs> CostsOfKernels(const Figures& kernels);

// Hosts with a link each, which carries that much in each direction at once, around a switch that
// never is the bottleneck. Each worker has a host; so has each shard, unless they are colocated:
// then shards are dealt out to the workers' hosts.
struct Cluster {
  double link_bits_per_s;
  uint32_t workers;  // 1 or more
  uint32_t shards;   // likewise
  bool colocated = false;
  uint32_t cores_per_host = 16;
  uint32_t chunk_elements = 0;  // 0: what jobs have
  uint32_t worker_threads = 0;  // that compress and apply; 0: what jobs have, a core each, up to 8

  uint32_t threads() const;

  // How many chunks of a worker are under way at most, as in Worker.
  uint32_t window() const;
};

// How many chunks a job of so many workers has: of `chunk_elements` at most, or of what jobs have if
// that is 0. parameters >= 1.
uint64_t ChunkCount(uint64_t parameters, uint32_t chunk_elements, uint32_t workers);

// How many of them the shard has that has most, if they are equally large (Layout::ShardOfChunk).
uint64_t MostChunksOfAShard(uint64_t chunks, uint32_t shards);

// Chunks of a job, and the seconds that one takes of what it comes through.
struct ChunkTimes {
  uint64_t chunks;     // equally large
  double link_s;       // out of a host, or into one
  double transport_s;  // of a processor, to send or to receive it
  double compress_s;   // of a worker, with all of its threads
  double apply_s;      // likewise
  double kernels_s;    // of one core, for both
  double aggregate_s;  // of one core, all workers' contributions
};

// "8 workers and 8 aggregators, each on a host of its own with 16 cores, 8 threads in each worker;
// links of 1000 Mbit/s".
std::string Describe(const Cluster& cluster);

// How many times as fast as one thread so many compress and apply: two were measured, 1.5 times
// (docs/measurements.md, "Threads of a worker"); with more it is taken to be 0.75 for each.
double ThreadSpeedup(uint32_t threads);

// parameters >= 1.
ChunkTimes ChunkTimesOf(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                        const TransportCosts& transport);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_COSTS_H_
