#include "kernels/target.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/highway_targets.h"

namespace signpost::kernels {
namespace {

// Highway 1.0 has no target with GFNI: to it both of AVX-512 are the same.
int64_t HighwayTarget(Target target) {
  switch (target) {
    case Target::kScalar:
      return HWY_SCALAR;
    case Target::kAvx2:
      return HWY_AVX2;
    case Target::kAvx512:
    case Target::kAvx512Gfni:
      return HWY_AVX3;
  }
  HWY_ABORT("no such target: %d", static_cast<int>(target));
}

bool HasGfni() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
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

bool IsSupported(Target target) {
  if (target == Target::kAvx512Gfni && !HasGfni()) return false;
  return (DetectedTargets() & HighwayTarget(target)) != 0;
}

std::atomic<Target>& UsedTarget() {
  static std::atomic<Target> used = SupportedTargets().back();
  return used;
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
    case Target::kAvx512Gfni:
      return "avx512_gfni";
  }
  HWY_ABORT("no such target: %d", static_cast<int>(target));
}

std::vector<Target> SupportedTargets() {
  std::vector<Target> supported = {Target::kScalar};
  for (Target target : {Target::kAvx2, Target::kAvx512, Target::kAvx512Gfni}) {
    if (IsSupported(target)) supported.push_back(target);
  }
  return supported;
}

Target CurrentTarget() { return UsedTarget().load(std::memory_order_relaxed); }

void UseTarget(Target target) {
  const std::vector<Target> supported = SupportedTargets();
  if (std::find(supported.begin(), supported.end(), target) == supported.end()) {
    HWY_ABORT("this processor does not have %s", TargetName(target).c_str());
  }
  hwy::GetChosenTarget().Update(HighwayTarget(target));
  UsedTarget().store(target, std::memory_order_relaxed);
}

}  // namespace signpost::kernels
