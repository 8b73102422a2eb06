#include "kernels/formulas.h"

#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"

namespace signpost::kernels {
namespace {

// The numbers that IEEE 754 says halves stand for.
TEST(Formulas, HalvesAreWhatTheyStandFor) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int sign = bits >> 15 != 0 ? -1 : 1;
    const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    const float widened = formulas::WidenFloat16(static_cast<uint16_t>(bits));
    EXPECT_EQ(std::signbit(widened), sign < 0);
    if (exponent == 0x1f) {
      EXPECT_EQ(std::isnan(widened), mantissa != 0);
      EXPECT_EQ(std::isinf(widened), mantissa == 0);
    } else {
      const double value =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      EXPECT_EQ(widened, sign * value) << bits;
    }
  }
}

}  // namespace
}  // namespace signpost::kernels
