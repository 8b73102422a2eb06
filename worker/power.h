#ifndef SIGNPOST_WORKER_POWER_H_
#define SIGNPOST_WORKER_POWER_H_

#include <cstdint>

namespace signpost {

// Returns base^exponent by multiplications alone, which are the same on every machine.
inline double Power(double base, uint64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) power *= base;
  }
  return power;
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_POWER_H_
