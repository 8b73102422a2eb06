// How long an exchange takes, of Signpost and of others, on the same hosts and in turns.

#ifndef SIGNPOST_BENCH_EXCHANGE_H_
#define SIGNPOST_BENCH_EXCHANGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bench/figures.h"
#include "bench/rank.h"

namespace signpost::bench {

struct ExchangeOptions {
  // Starts "<program> bench rank ..." and "<program> aggregator ...".
  std::string program;
  uint32_t workers = 4;
  uint32_t shards = 2;
  // Empty: all processes are on this machine. Otherwise each worker and each aggregator is a host
  // with a link of that rate (ParseRate).
  std::string rate;
  std::vector<RankOptions> ranks;  // ours, in turns; of one codec and size
  // Each of ours a second time, with aggregators of its own, over mTLS: compared with the first.
  bool tls = false;
  // Others that do the same, likewise: exchanges, or whole steps. Ours are compared with the first,
  // and each of them with gradients to mean, or with what there is. They are known to
  // `peers_script`, a rank of them all, which speaks as ServeLines does.
  std::vector<std::string> peers;
  std::string peers_script;
  std::string python = "/usr/bin/python3";  // that runs it
  uint32_t threads = 0;      // of each rank, peers' too; 0: its share (ShareOfProcessors)
  uint32_t connections = 1;  // of each worker of ours to each aggregator
  uint32_t turns = 5;
  uint32_t exchanges = 3;  // in each of a turn
  // For a start, or an exchange of a turn; as often as it has steps.
  absl::Duration timeout = absl::Minutes(5);
  // From one answer of those that take a turn to the next, however many exchanges it has.
  absl::Duration longest_silence = absl::Hours(1);
  // Of silence, until standard error says once for whom a turn waits.
  absl::Duration patience = absl::Seconds(30);
};

// For each of ours the seconds of an exchange, which is that of the slowest rank, or of 0/1 Adam
// the mean of the steps from one synchronisation to the next, against what a link takes for the
// bytes, or without links what plain TCP does, in turns with the rest (plain_tcp.h); and of packed
// frames the processor seconds that all workers and aggregators together spend on each GB of
// payload that is sent, by either side. Then the seconds of each peer. RESOURCE_EXHAUSTED, before
// anything is started, when the machine has not LeastMemory to spare; CANCELLED when interrupted;
// otherwise names a process that failed, or that says nothing. Removes what others that were killed
// have left behind.
absl::StatusOr<Figures> MeasureExchange(const ExchangeOptions& options);

// In bytes, what all processes together have for parameters, gradients, errors and payloads, peers'
// included, and for themselves when they have nothing to do. They have more: what is on its way.
uint64_t LeastMemory(const ExchangeOptions& options);

// What the busiest link takes for an exchange, in seconds, with workers and aggregators on hosts of
// their own: bytes go both ways at once, and an aggregator has those of its chunks, which are taken
// to be equally large. It is the busiest link of PlayExchange (scale.h).
double LinkBound(const RankOptions& rank, uint32_t workers, uint32_t shards,
                 double bits_per_second);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_EXCHANGE_H_
