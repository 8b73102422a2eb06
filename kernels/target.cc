#include "kernels/target.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/highway_targets.h"

namespace signpost::kernels {
namespace {

int64_t HighwayTarget(Target target) {
  switch (target) {
    case Target::kScalar:
      return HWY_SCALAR;
    case Target::kAvx2:
      return HWY_AVX2;
    case Target::kAvx512:
      return HWY_AVX3;
  }
  HWY_ABORT("no such target: %d", static_cast<int>(target));
}

// Highway asks the processor and makes the best target the chosen one; only the first call does.
int64_t DetectedTargets() {
  static const int64_t detected = [] {
    const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
    hwy::GetChosenTarget().Update(targets);
    return targets;
  }();
  return detected;
}

}  // namespace

std::string TargetName(Target target) {
  switch (target) {
    case Target::kScalar:
      return "scalar";
    case Target::kAvx2:
      return "avx2";
    case Target::kAvx512:
      return "avx512";
  }
  HWY_ABORT("no such target: %d", static_cast<int>(target));
}

std::vector<Target> SupportedTargets() {
  std::vector<Target> supported = {Target::kScalar};
  for (Target target : {Target::kAvx2, Target::kAvx512}) {
    if ((DetectedTargets() & HighwayTarget(target)) != 0) supported.push_back(target);
  }
  return supported;
}

Target CurrentTarget() {
  for (Target target : SupportedTargets()) {
    hwy::ChosenTarget candidate;
    candidate.Update(HighwayTarget(target));
    if (candidate.GetIndex() == hwy::GetChosenTarget().GetIndex()) return target;
  }
  HWY_ABORT("Highway has chosen a target that this build does not have");
}

void UseTarget(Target target) {
  const std::vector<Target> supported = SupportedTargets();
  if (std::find(supported.begin(), supported.end(), target) == supported.end()) {
    HWY_ABORT("this processor does not have %s", TargetName(target).c_str());
  }
  hwy::GetChosenTarget().Update(HighwayTarget(target));
}

}  // namespace signpost::kernels
