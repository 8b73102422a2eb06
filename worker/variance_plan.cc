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

bool VarianceFits(double sum, double sum_before, double beta2, uint64_t step, uint64_t steps) {
  if (!(sum > 0) || !std::isfinite(sum)) return false;
  const double kept = Power(beta2, steps);
  const double recent = (sum - kept * sum_before) / (1 - kept);
  const double corrected = sum / (1 - Power(beta2, step));
  return recent >= kLeastFit * corrected && recent <= kMostFit * corrected;
}

RefreshWeights WeightsOfRefresh(double beta2, uint64_t steps_before, uint64_t steps) {
  const double faded = Power(beta2, steps);
  const double before = 1 - Power(beta2, steps_before);
  const double after = 1 - faded * (1 - before);
  return {faded * before / after, (1 - faded) / after};
}

void VariancePlan::Freeze(uint64_t step) {
  schedule_.set_refreshed_step(step);
  PlanNext(step, /*youngest=*/0);
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

bool VariancePlan::Settles(const Schedule& schedule, uint64_t step) {
  const bool was_refreshed = schedule.refreshed_step() < schedule.variance_steps();
  return step == schedule.refresh_step() || (was_refreshed && step == schedule.refreshed_step());
}

bool VariancePlan::Refreshes(const Schedule& schedule, uint64_t step) {
  const bool is_planned = step > schedule.refresh_step() && step < schedule.refresh_end();
  const bool was_refreshed = step > schedule.refreshed_step() && step < schedule.variance_steps();
  return is_planned || was_refreshed;
}

// The first kSteps refreshes share the steps since the variance was frozen; all others are of one.
uint64_t VariancePlan::StepsOf(const Schedule& schedule, uint64_t step) {
  const uint64_t end = schedule.refresh_step() + 1 + kSteps;
  if (step >= end) return 1;
  return std::max<uint64_t>(1, (end - schedule.variance_steps()) / kSteps);
}

uint64_t VariancePlan::StepsBefore(const Schedule& schedule, uint64_t step, uint64_t first_step) {
  if (first_step >= schedule.refresh_step()) return step - first_step;
  const uint64_t refreshes = step - schedule.refresh_step() - 1;
  const uint64_t in_plan = std::min(refreshes, kSteps) * StepsOf(schedule, schedule.refresh_step());
  return schedule.variance_steps() - first_step + in_plan + refreshes - std::min(refreshes, kSteps);
}

}  // namespace signpost
