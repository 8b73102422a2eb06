// A whole job in virtual time: the real workers, aggregators, rounds and recovery on a network and
// disks that fail, in an order that a seed decides.

#ifndef SIGNPOST_TESTS_SIMULATION_SIMULATION_H_
#define SIGNPOST_TESTS_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "proto/codec.h"
#include "worker/onebit_adam.h"

namespace signpost::simulation {

struct SimulationResult {
  // What must not happen and did; empty: nothing.
  std::vector<std::string> violations;
  // What did happen.
  uint64_t kills = 0;
  uint64_t kills_while_saving = 0;
  uint64_t kills_without_the_dead = 0;  // of both, while a dead worker's place is empty
  uint64_t stops = 0;
  uint64_t replayed_frames = 0;
  uint64_t skipped_rounds = 0;
  uint64_t bit_flips = 0;
  uint64_t late_rounds = 0;  // of one rank and chunk each
  uint64_t steps_caught_up = 0;
  uint64_t lost_ranks = 0;  // too late to catch up
  uint64_t dead_workers = 0;
  uint64_t returned_workers = 0;  // in the place of one that was dead, or lost
  uint64_t given_up_workers = 0;  // of those: left before their first frame
  uint64_t job_standstills = 0;   // of all processes at once
  uint64_t worker_standstills = 0;
  uint64_t aggregator_standstills = 0;
  uint64_t longest_standstills = 0;  // of both: the others may have given up
};

// CRC-32C of the parameters after each step.
using Digests = std::vector<uint32_t>;

// The seed's job without any fault. The seed decides the workers, shards, steps, whether it is
// 1-bit Adam, 1-bit LAMB or 0/1 Adam, as DeepSpeed has them or not, the codecs (one of them from
// outside) and when the variance is frozen, if it is, whether and when a gradient is not finite,
// whether rounds close without late workers, whether workers die, and whether their steps overlap
// the computation of gradients.
Digests Undisturbed(uint64_t seed);

// Its job's optimizer.
OptimizerOptions OptimizerOf(uint64_t seed);

// Of what travelled in that job: a variance that is never frozen, or behind the last step, leaves
// the second empty.
struct AnsweredCodecs {
  std::set<Codec> warm_up;
  std::set<Codec> frozen;    // from the freeze step on
  std::set<Codec> variance;  // of what brings it up to date, and is in neither of the others
};
AnsweredCodecs AnsweredCodecsOf(uint64_t seed);

// The same job with faults. Invariants:
//   - every call of every worker succeeds, but for a step of one that is too late to catch up,
//     those of one that is dead, and errors that starting again mends, of jobs that begin anew;
//   - who dies comes back, unless the job is over before; so does who gives up. As few as one may
//     be left, but where variances are brought up to date: there as many as rounds need. Two faults
//     at once are too many: no aggregator ends after a worker, or while one stands still for long
//     that others go on without, until it has closed two rounds without it, and saved them, and no
//     snapshot is damaged before another worker is in its place, or once one has left, nor what is
//     written down of late ranks while one of three or more gets its state;
//   - a job begins anew when one of its workers dies that it waits for, in an elastic one before
//     its first step, or when the last with the state does; and one that waits for all when a
//     process of it stands still for longer than the others wait, but not when all do at once;
//   - after every step each worker's parameters have the same bytes, and unless rounds close
//     without late workers the expected ones;
//   - the frames and answers that travelled are what they should be to the byte, and so are the
//     errors: audit.h;
//   - no rank is called late that was in time, or still has time: arrivals.h;
//   - when all workers have left, no aggregator has the job any more.
SimulationResult Simulate(uint64_t seed, const Digests& expected);

// The same job with faults, which ends with a checkpoint half way and resumes from it, on another
// number of shards and with other faults. The same invariants; and each rank has again what it
// saved. There is no checkpoint where some rank was not there for it.
SimulationResult SimulateResumed(uint64_t seed, const Digests& expected);

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SIMULATION_H_
