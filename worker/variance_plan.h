// When a variance that follows the gradients is frozen and refreshed, and with which weights. All
// ranks see the same answers and take these decisions from them, so they agree without a message.
// docs/algorithms.md has the rules with what they were measured on.

#ifndef SIGNPOST_WORKER_VARIANCE_PLAN_H_
#define SIGNPOST_WORKER_VARIANCE_PLAN_H_

#include <cstdint>

#include "proto/aggregator.pb.h"

namespace signpost {

// Steps between two looks at the variance before the freeze: 1 / (1 - beta2), at most 32.
uint64_t LookInterval(double beta2);

// Returns whether the variance at `step` fits the gradients since the last look: their mean square
// is between 1/16 of the bias-corrected variance and 3/2 of it. Smaller: the gradients have shrunk
// and the variance remembers others. Larger: they grow. `sum` and `sum_before` are the sums of the
// uncorrected variances now and at the last look, `steps` before, and `corrected` is that of the
// corrected ones now. sum_before is 0 where there was no look.
bool VarianceFits(double sum, double sum_before, double corrected, double beta2, uint64_t steps);

// The share of the old variance, and of a squared gradient, in a refreshed one. Together they
// are 1.
struct RefreshWeights {
  double kept;
  double added;
};

// For a gradient that stands for `steps` steps. The old variance is the bias-corrected mean over
// `steps_before` steps; 0: there is none, and the squared gradient takes its place.
RefreshWeights WeightsOfRefresh(double beta2, uint64_t steps_before, uint64_t steps);

// The plan of refreshes, which is part of the job's schedule.
class VariancePlan {
 public:
  // One bit leaves noise in the momentum, which the errors of later one-bit steps take back.
  // Refreshes have no errors, so before each series of them the momentum is settled: it travels
  // once densely, with all errors.
  //
  // kSteps refreshes are in a planned series, kStepsAtOnce in one that begins because the variance
  // does not fit. That one begins at least kRest steps after the last series.
  static constexpr uint64_t kSteps = 4, kStepsAtOnce = 8, kRest = 8;
  // A tensor whose first gradient comes behind the freeze has kFirstSteps dense steps. In the
  // first kStillSteps of them only weight decay moves it: its variance is of too few gradients.
  static constexpr uint64_t kFirstSteps = 64, kStillSteps = 4;
  // The root mean square of a tensor's momentum, in root mean squares of its gradients, above which
  // its variance does not fit. Averages of gradients are below 1, and one bit makes 2.2 times as
  // much of them on each side, where they hardly change.
  static constexpr double kMostMomentum = 4;

  // `schedule` must stay.
  explicit VariancePlan(Schedule& schedule) : schedule_(schedule) {}

  // Starts the plan: the variance is frozen before `step`. `youngest` as BeginStep's.
  void Freeze(uint64_t step, uint64_t youngest = 0);
  // Brings the plan to `step`. Callers do so at the begin of each step after the freeze, in order.
  // `fits`: the variance does. `youngest`: the largest first step of a tensor that has a variance.
  void BeginStep(uint64_t step, bool fits, uint64_t youngest);
  // Lets the refreshes under way go on for kFirstSteps from `first_step` on.
  void Extend(uint64_t first_step);

  enum class Kind { kOneBit, kSettle, kRefresh };
  // Returns what a step after the freeze does. The schedule knows the newest series that has ended,
  // and the one that is planned or under way.
  static Kind KindOf(const Schedule& schedule, uint64_t step);
  // `step` refreshes. Returns how many steps its gradient stands for, and of how many steps the
  // variance before it is the mean, of a tensor whose first gradient was in first_step.
  static uint64_t StepsOf(const Schedule& schedule, uint64_t step, uint64_t first_step);
  static uint64_t StepsBefore(const Schedule& schedule, uint64_t step, uint64_t first_step);

 private:
  // Returns whether a variance that does not fit at `step` is refreshed at once.
  bool MayRefreshAtOnce(uint64_t step) const;
  void PlanNext(uint64_t step, uint64_t youngest);

  Schedule& schedule_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_VARIANCE_PLAN_H_
