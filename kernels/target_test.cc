#include "kernels/target.h"

#include <vector>

#include "gtest/gtest.h"

namespace signpost::kernels {
namespace {

TEST(Target, ScalarIsAlwaysThereAndTheBestIsChosen) {
  const std::vector<Target> supported = SupportedTargets();
  EXPECT_EQ(supported.front(), Target::kScalar);
  EXPECT_EQ(CurrentTarget(), supported.back());
}

TEST(Target, EachSupportedOneCanBeUsed) {
  const std::vector<Target> supported = SupportedTargets();
  for (Target target : supported) {
    UseTarget(target);
    EXPECT_EQ(CurrentTarget(), target);
    EXPECT_EQ(SupportedTargets(), supported);
  }
}

TEST(Target, SupportedOnesAreThoseOfTheProcessor) {
  const std::vector<Target> supported = SupportedTargets();
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2");
  const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool gfni = avx512 && __builtin_cpu_supports("gfni") &&
                    __builtin_cpu_supports("avx512vbmi");
  EXPECT_EQ(supported.size(), 1u + avx2 + avx512 + gfni);
#else
  EXPECT_EQ(supported.size(), 1u);
#endif
}

TEST(Target, NamesAreTheOnesInLogs) {
  EXPECT_EQ(TargetName(Target::kScalar), "scalar");
  EXPECT_EQ(TargetName(Target::kAvx2), "avx2");
  EXPECT_EQ(TargetName(Target::kAvx512), "avx512");
  EXPECT_EQ(TargetName(Target::kAvx512Gfni), "avx512_gfni");
}

}  // namespace
}  // namespace signpost::kernels
