// A whole job in virtual time: the real workers, aggregators, rounds and recovery on a network and
// disks that fail, in an order that a seed decides.

#ifndef SIGNPOST_TESTS_SIMULATION_SIMULATION_H_
#define SIGNPOST_TESTS_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <string>
#include <vector>

namespace signpost::simulation {

struct SimulationResult {
  // What must not happen and did; empty: nothing.
  std::vector<std::string> violations;
  // What did happen.
  uint64_t kills = 0;
  uint64_t kills_while_saving = 0;
  uint64_t stops = 0;
  uint64_t replayed_frames = 0;
  uint64_t skipped_rounds = 0;
  uint64_t most_kept_bytes_per_parameter = 0;
};

// The seed also decides the job: workers, shards, steps, codec of the warm-up, when it ends.
// Invariants:
//   - every call of every worker succeeds;
//   - after every step each worker's parameters have the bytes of the same job without any fault;
//   - when all workers have left, no aggregator has the job any more.
SimulationResult Simulate(uint64_t seed);

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SIMULATION_H_
