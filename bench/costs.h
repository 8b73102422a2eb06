// What an exchange costs: links, processors, and the chunks that go through them.

#ifndef SIGNPOST_BENCH_COSTS_H_
#define SIGNPOST_BENCH_COSTS_H_

#include <cstdint>

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

// As the kernels were measured: docs/measurements.md, "Kernels"; one core of an AMD EPYC, AVX2, in
// DRAM.
CodecCosts Float32Costs();
CodecCosts Bfloat16Costs();
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
  CodecCosts one_bit = OneBitCosts();
};

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

  // How many chunks of a worker are under way at most, as in Worker.
  uint32_t window() const;
};

// Chunks of a job, and the seconds that one takes of what it comes through.
struct ChunkTimes {
  uint64_t chunks;     // equally large
  double link_s;       // out of a host, or into one
  double transport_s;  // of a processor, to send or to receive it
  double compress_s;
  double apply_s;
  double aggregate_s;  // all workers' contributions
};

// parameters >= 1.
ChunkTimes ChunkTimesOf(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                        const TransportCosts& transport);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_COSTS_H_
