#include "worker/variance_plan.h"

#include <algorithm>
#include <cmath>

#include "worker/power.h"

namespace signpost {
namespace {

constexpr uint64_t kMostBetweenLooks = 32;
constexpr double kLeastFit = 1.0 / 16, kMostFit = 1.5;

}  // namespace

uint64_t LookInterval(double beta2) {
  return std::clamp<uint64_t>(std::llround(1 / (1 - beta2)), 1, kMostBetweenLooks);
}

bool VarianceFits(double sum, double sum_before, double corrected, double beta2, uint64_t steps) {
  if (!(sum > 0) || !std::isfinite(sum)) return false;
  const double kept = Power(beta2, steps);
  const double recent = (sum - kept * sum_before) / (1 - kept);
  return recent >= kLeastFit * corrected && recent <= kMostFit * corrected;
}

RefreshWeights WeightsOfRefresh(double beta2, uint64_t steps_before, uint64_t steps) {
  const double faded = Power(beta2, steps);
  const double before = 1 - Power(beta2, steps_before);
  const double after = 1 - faded * (1 - before);
  return {faded * before / after, (1 - faded) / after};
}

void VariancePlan::Freeze(uint64_t step, uint64_t youngest) {
  schedule_.set_refreshed_step(step);
  PlanNext(step, youngest);
}

// Refreshes are further and further apart: the next one is after a quarter of the steps so far, or
// of those since the youngest tensor's first gradient.
void VariancePlan::PlanNext(uint64_t step, uint64_t youngest) {
  schedule_.set_variance_steps(step);
  schedule_.set_refresh_step(step + std::max(kRest, (step - youngest) / 4));
  schedule_.set_refresh_end(schedule_.refresh_step() + 1 + kSteps);
}

void VariancePlan::BeginStep(uint64_t step, bool fits, uint64_t youngest) {
  if (step == schedule_.refresh_end()) {
    schedule_.set_refreshed_step(schedule_.refresh_step());
    PlanNext(step, youngest);
  } else if (MayRefreshAtOnce(step) && !fits) {
    schedule_.set_refresh_step(step);
    schedule_.set_refresh_end(step + 1 + kStepsAtOnce);
  }
}

bool VariancePlan::MayRefreshAtOnce(uint64_t step) const {
  return step < schedule_.refresh_step() && step >= schedule_.variance_steps() + kRest;
}

void VariancePlan::Extend(uint64_t first_step) {
  schedule_.set_refresh_end(std::max(schedule_.refresh_end(), first_step + kFirstSteps));
}

VariancePlan::Kind VariancePlan::KindOf(const Schedule& schedule, uint64_t step) {
  const auto kind_in = [step](uint64_t settles, uint64_t end) {
    if (step < settles || step >= end) return Kind::kOneBit;
    return step == settles ? Kind::kSettle : Kind::kRefresh;
  };
  const Kind last = kind_in(schedule.refreshed_step(), schedule.variance_steps());
  return last != Kind::kOneBit ? last : kind_in(schedule.refresh_step(), schedule.refresh_end());
}

// The first kSteps refreshes share the steps since the variance was frozen. All others are of one
// step, as are those of a tensor that had no variance before the series.
uint64_t VariancePlan::StepsOf(const Schedule& schedule, uint64_t step, uint64_t first_step) {
  const uint64_t end = schedule.refresh_step() + 1 + kSteps;
  if (step >= end || first_step >= schedule.refresh_step()) return 1;
  return std::max<uint64_t>(1, (end - schedule.variance_steps()) / kSteps);
}

uint64_t VariancePlan::StepsBefore(const Schedule& schedule, uint64_t step, uint64_t first_step) {
  if (first_step >= schedule.refresh_step()) return step - first_step;
  const uint64_t first_refresh = schedule.refresh_step() + 1;
  const uint64_t shared = std::min(step - first_refresh, kSteps);
  const uint64_t of_one_step = step - first_refresh - shared;
  return schedule.variance_steps() - first_step +
         shared * StepsOf(schedule, first_refresh, first_step) + of_one_step;
}

}  // namespace signpost
