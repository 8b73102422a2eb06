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

// Between two that follow each other, to the nearer one, or that whose last bit is 0.
TEST(Formulas, HalvesAreRoundedTo) {
  for (uint16_t half = 0; half < 0x7bff; ++half) {
    const double low = formulas::WidenFloat16(half), high = formulas::WidenFloat16(half + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    const uint16_t next = half + 1;
    EXPECT_EQ(formulas::RoundToFloat16(static_cast<float>(low)), half);
    EXPECT_EQ(formulas::RoundToFloat16(std::nextafter(middle, 0.0f)), half);
    EXPECT_EQ(formulas::RoundToFloat16(middle), half % 2 == 0 ? half : next);
    EXPECT_EQ(formulas::RoundToFloat16(std::nextafter(middle, 1e9f)), next);
    EXPECT_EQ(formulas::RoundToFloat16(-std::nextafter(middle, 1e9f)), 0x8000 + next);
  }
  EXPECT_EQ(formulas::RoundToFloat16(65536.0f), 0x7bff);
  EXPECT_EQ(formulas::RoundToFloat16(-1e30f), 0xfbff);
  EXPECT_TRUE(std::isnan(formulas::WidenFloat16(formulas::RoundToFloat16(kNotPacked))));
}

}  // namespace
}  // namespace signpost::kernels
