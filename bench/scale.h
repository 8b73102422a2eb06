// An exchange of many workers, played frame by frame without sending any.

#ifndef SIGNPOST_BENCH_SCALE_H_
#define SIGNPOST_BENCH_SCALE_H_

#include <cstdint>

#include "bench/costs.h"

namespace signpost::bench {

// In seconds, from the first chunk's compressing to the last worker's having applied all.
struct PlayedExchange {
  double exchange_s;
  // What took so long: how long the busiest link, in one direction, a worker's threads, the
  // busiest aggregator's sums, its transport in one direction, and all cores of the busiest host
  // were at work.
  double link_s;
  double worker_s;
  double aggregator_s;
  double transport_s;
  double cores_s;
  uint64_t frames;  // both ways
};

// Plays what Worker and Aggregator do: chunk c belongs to shard c mod shards (Layout::ShardOfChunk,
// for equal chunks); a worker compresses and sends while its window allows, and otherwise applies
// whichever answer has come; a round closes with its last frame, and its answer goes to all workers
// in turn. Each of these is done for one chunk at a time, in the order in which they come: what a
// host sends, what it receives, a worker's kernels, an aggregator's sums, the transport of either's
// process in each direction.
//
// A frame that leaves a host is on its way into the other at the same time, behind those that are
// before it there: a switch passes on packets, not frames. Between a worker and a shard of the same
// host it waits for its turn, but takes no time on the link. Cores are not handed out; a host's
// work divided by its cores is the least that an exchange takes.
//
// Deterministic. Takes memory for a window of each worker, and about 0.1 us per frame.
PlayedExchange PlayExchange(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                            const TransportCosts& transport);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_SCALE_H_
