// For tests: runs a check on every target that this processor has.

#ifndef SIGNPOST_KERNELS_EVERY_TARGET_H_
#define SIGNPOST_KERNELS_EVERY_TARGET_H_

#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/target.h"

namespace signpost::kernels {

// The targets under test, printed once, so that a log tells what it is evidence of.
inline const std::vector<Target>& TargetsUnderTest() {
  static const std::vector<Target> targets = [] {
    std::string names;
    for (Target target : SupportedTargets()) names += " " + TargetName(target);
    std::cout << "targets:" << names << std::endl;
    return SupportedTargets();
  }();
  return targets;
}

// Calls body() once per target; ends on the target that was in use.
template <class Body>
void OnEveryTarget(Body body) {
  const Target before = CurrentTarget();
  for (Target target : TargetsUnderTest()) {
    SCOPED_TRACE(TargetName(target));
    UseTarget(target);
    body();
  }
  UseTarget(before);
}

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_EVERY_TARGET_H_
