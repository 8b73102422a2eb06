// What 0/1 Adam (arXiv:2202.06009) has to choose beside what 1-bit Adam has, and what follows from
// it: which steps are alike on all workers, on any of them, without a word between them.

#ifndef SIGNPOST_WORKER_ZERO_ONE_OPTIONS_H_
#define SIGNPOST_WORKER_ZERO_ONE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace signpost {

struct ZeroOneOptions {
  // Before the freeze step the variance is updated in every step for so many updates, then in every
  // second for as many, in every fourth, and so on. At least 1.
  uint32_t var_update_scaler = 16;
  // From the freeze step on workers synchronise in every step for so many steps, then every second
  // for as many, every fourth, and so on; 0: as many as the freeze step, or as DeepSpeed one fewer,
  // which is its var_freeze_step.
  uint64_t local_step_scaler = 0;
  // The most steps from one synchronisation to the next; at least 1.
  uint32_t local_step_clipper = 16;
};

// INVALID_ARGUMENT that names the option.
absl::Status CheckZeroOneOptions(const ZeroOneOptions& options, uint64_t freeze_step);

// "var_update_scaler=16 ...": equal exactly if the options are.
std::string DescribeZeroOneOptions(const ZeroOneOptions& options);

// Steps count from 0. Rounds do too: each step before the freeze step has one, and each
// synchronisation after it.
class ZeroOneSchedule {
 public:
  // Of options that passed the check. DeepSpeed numbers steps from 1. It updates the variance, and
  // synchronises, in steps whose number is a multiple of the interval; the first step, of which
  // nothing is left there, is no update. Its interval between synchronisations doubles after so
  // many steps, wherever the last one was.
  ZeroOneSchedule(const ZeroOneOptions& options, uint64_t freeze_step, bool as_deepspeed = false);

  // The last update of the variance that is not after a step.
  struct Update {
    uint64_t step;
    uint64_t interval;  // since the one before, or since the beginning
  };
  Update LastUpdate(uint64_t step) const;

  // The steps that a round ends.
  struct Interval {
    uint64_t first_step;
    uint64_t steps;
  };
  Interval StepsOf(uint64_t round) const;

 private:
  // After how many steps DeepSpeed's round is closed.
  uint64_t EndAsDeepSpeed(uint64_t round) const;

  const bool as_deepspeed_;
  const uint64_t freeze_step_;
  const uint64_t var_update_scaler_;
  const uint64_t local_step_scaler_;
  const uint64_t local_step_clipper_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ZERO_ONE_OPTIONS_H_
