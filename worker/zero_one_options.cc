#include "worker/zero_one_options.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost {
namespace {

// No product of two of them, or of one and a power of two that is not above it, overflows.
constexpr uint64_t kMostSteps = uint64_t{1} << 40;
constexpr uint32_t kMostLocalSteps = 1 << 16;

// DeepSpeed's first stage has a step more than its option says, and so than the scaler.
uint64_t LocalStepScaler(const ZeroOneOptions& options, uint64_t freeze_step, bool as_deepspeed) {
  if (options.local_step_scaler != 0) return options.local_step_scaler;
  return as_deepspeed ? std::max<uint64_t>(freeze_step, 2) - 1 : freeze_step;
}

}  // namespace

absl::Status CheckZeroOneOptions(const ZeroOneOptions& options, uint64_t freeze_step) {
  if (freeze_step > kMostSteps) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "optimizer option freeze_step of 0/1 Adam is a number of steps, at most %d", kMostSteps));
  }
  const auto error = [](absl::string_view option, uint64_t got, uint64_t least, uint64_t most) {
    return absl::InvalidArgumentError(
        absl::StrFormat("optimizer option %s is %d, wanted %d to %d", option, got, least, most));
  };
  if (options.var_update_scaler == 0) {
    return error("var_update_scaler", 0, 1, std::numeric_limits<uint32_t>::max());
  }
  if (options.local_step_scaler > kMostSteps) {
    return error("local_step_scaler", options.local_step_scaler, 0, kMostSteps);
  }
  if (options.local_step_clipper == 0 || options.local_step_clipper > kMostLocalSteps) {
    return error("local_step_clipper", options.local_step_clipper, 1, kMostLocalSteps);
  }
  return absl::OkStatus();
}

std::string DescribeZeroOneOptions(const ZeroOneOptions& options) {
  return absl::StrFormat("var_update_scaler=%d local_step_scaler=%d local_step_clipper=%d",
                         options.var_update_scaler, options.local_step_scaler,
                         options.local_step_clipper);
}

ZeroOneSchedule::ZeroOneSchedule(const ZeroOneOptions& options, uint64_t freeze_step,
                                 bool as_deepspeed)
    : as_deepspeed_(as_deepspeed),
      freeze_step_(freeze_step),
      var_update_scaler_(options.var_update_scaler),
      local_step_scaler_(LocalStepScaler(options, freeze_step, as_deepspeed)),
      local_step_clipper_(options.local_step_clipper) {}

ZeroOneSchedule::Update ZeroOneSchedule::LastUpdate(uint64_t step) const {
  uint64_t first = as_deepspeed_ ? 1 : 0;  // of those that are so many steps apart
  uint64_t interval = 1;
  if (step < first) return {0, 1};
  while (true) {
    const uint64_t last = first + (var_update_scaler_ - 1) * interval;
    const uint64_t next =
        as_deepspeed_ ? ((last + 1) / (2 * interval) + 1) * 2 * interval - 1 : last + interval;
    if (step < next) break;
    first = next;
    interval *= 2;
  }
  const uint64_t last = std::min(first + (step - first) / interval * interval,
                                 first + (var_update_scaler_ - 1) * interval);
  const bool is_first = last == first && interval > 1;
  return {last, is_first ? interval / 2 : interval};
}

uint64_t ZeroOneSchedule::EndAsDeepSpeed(uint64_t round) const {
  if (round < freeze_step_) return round + 1;
  uint64_t first_round = freeze_step_, first_step = freeze_step_;  // with this interval
  for (uint64_t interval = 1;;) {
    const uint64_t before = first_step / interval;
    const uint64_t rounds = (first_step + local_step_scaler_) / interval - before;
    if (interval == local_step_clipper_ || round - first_round < rounds) {
      return (before + round - first_round + 1) * interval;
    }
    first_round += rounds;
    first_step += local_step_scaler_;
    interval = std::min(2 * interval, local_step_clipper_);
  }
}

ZeroOneSchedule::Interval ZeroOneSchedule::StepsOf(uint64_t round) const {
  if (round < freeze_step_) return {round, 1};
  if (as_deepspeed_) {
    const uint64_t first_step = EndAsDeepSpeed(round - 1);
    return {first_step, EndAsDeepSpeed(round) - first_step};
  }
  uint64_t first_round = freeze_step_, first_step = freeze_step_;  // of intervals of this length
  for (uint64_t doublings = 0;; ++doublings) {
    const uint64_t steps = std::min(uint64_t{1} << doublings, local_step_clipper_);
    const uint64_t end = freeze_step_ + local_step_scaler_ * (doublings + 1);
    const uint64_t rounds = end > first_step ? (end - first_step + steps - 1) / steps : 0;
    if (steps == local_step_clipper_ || round - first_round < rounds) {
      return {first_step + (round - first_round) * steps, steps};
    }
    first_round += rounds;
    first_step += rounds * steps;
  }
}

}  // namespace signpost
