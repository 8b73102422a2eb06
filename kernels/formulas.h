// What the kernels do to one element or one block, once for the scalar reference and for CUDA: each
// line is one of the equations of onebit.h, quantized.h, momentum.h, dense.h, adam.h, lamb.h and
// zero_one.h, rounded after each operation.

#ifndef SIGNPOST_KERNELS_FORMULAS_H_
#define SIGNPOST_KERNELS_FORMULAS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/lamb.h"
#include "kernels/momentum.h"
#include "kernels/onebit.h"
#include "kernels/quantized.h"
#include "kernels/zero_one.h"

// On functions that run on GPUs too.
#ifdef __CUDACC__
#define SIGNPOST_HOST_DEVICE __host__ __device__
#else
#define SIGNPOST_HOST_DEVICE
#endif

namespace signpost::kernels::formulas {

SIGNPOST_HOST_DEVICE inline float BitsToFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

SIGNPOST_HOST_DEVICE inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

SIGNPOST_HOST_DEVICE inline bool IsNegative(float value) { return FloatToBits(value) >> 31 != 0; }

// What a sign bit stands for.
SIGNPOST_HOST_DEVICE inline float Signed(float magnitude, bool is_negative) {
  return is_negative ? -magnitude : magnitude;
}

// S of a block of `length` elements.
SIGNPOST_HOST_DEVICE inline float BlockScale(float gamma, float sum_of_squares, size_t length) {
  return gamma * sqrtf(sum_of_squares / static_cast<float>(length));
}

// A of a block, magnitude by magnitude from 0 on. NaN is larger than all numbers, as its bits are.
SIGNPOST_HOST_DEVICE inline float LargerMagnitude(float largest, float value) {
  const float magnitude = fabsf(value);
  return FloatToBits(magnitude) > FloatToBits(largest) ? magnitude : largest;
}

// S and r of a block with that A.
SIGNPOST_HOST_DEVICE inline float ScaleOf(IntegerType type, float largest) {
  return largest < kLeastMagnitude ? 0.0f : largest / MostCode(type);
}
SIGNPOST_HOST_DEVICE inline float InverseScale(IntegerType type, float largest) {
  return largest < kLeastMagnitude ? 0.0f : MostCode(type) / largest;
}

SIGNPOST_HOST_DEVICE inline int32_t Quantize(float u, float inverse_scale) {
  return static_cast<int32_t>(rintf(u * inverse_scale));
}

SIGNPOST_HOST_DEVICE inline float Dequantize(int32_t code, float scale) {
  return static_cast<float>(code) * scale;
}

// The code in the lowest bits.
SIGNPOST_HOST_DEVICE inline int32_t CodeOf(IntegerType type, uint32_t bits) {
  const int32_t sign = type == IntegerType::kInt8 ? 0x80 : 0x8;
  const int32_t code = static_cast<int32_t>(bits & (2 * sign - 1));
  return (code ^ sign) - sign;
}

SIGNPOST_HOST_DEVICE inline float MomentumInput(const MomentumRates& rates, float m, float g) {
  return rates.beta1 * m + rates.one_minus_beta1 * g;
}

SIGNPOST_HOST_DEVICE inline float MomentumAndError(const MomentumRates& rates, float m, float g,
                                                   float e) {
  return MomentumInput(rates, m, g) + e;
}

SIGNPOST_HOST_DEVICE inline float Bounded(float update, float most) {
  const float below = update < most ? update : most;
  return below > -most ? below : -most;
}

SIGNPOST_HOST_DEVICE inline float ApplyMomentum(float m, float inverse_denominator,
                                                const UpdateRates& rates, float x) {
  const float update = Bounded(m * inverse_denominator, rates.most_update);
  const float direction = update + rates.weight_decay * x;
  return x - rates.learning_rate * direction;
}

// To nearest, ties to even: adds half a unit of the last place, less one where that place is even.
SIGNPOST_HOST_DEVICE inline uint16_t RoundToBfloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

SIGNPOST_HOST_DEVICE inline float WidenBfloat16(uint16_t value) {
  return BitsToFloat(static_cast<uint32_t>(value) << 16);
}

// To nearest, ties to even, and no further than kMaxFloat16.
SIGNPOST_HOST_DEVICE inline uint16_t RoundToFloat16(float value) {
  const uint32_t sign = FloatToBits(value) >> 16 & 0x8000;
  const float magnitude = fabsf(value);
  if (magnitude != magnitude) return static_cast<uint16_t>(sign | 0x7e00);
  const float clipped = magnitude > kMaxFloat16 ? kMaxFloat16 : magnitude;
  // Denormal numbers are multiples of 2^-24, as floats from 0.5 on are: the sum rounds to them.
  if (clipped < 0x1p-14f) {
    return static_cast<uint16_t>(sign | (FloatToBits(clipped + 0.5f) - FloatToBits(0.5f)));
  }
  const uint32_t bits = FloatToBits(clipped);
  const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - ((127 - 15) << 23)) >> 13));
}

// Every half is a float: a denormal one, mantissa * 2^-24, too.
SIGNPOST_HOST_DEVICE inline float WidenFloat16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t exponent = value >> 10 & 0x1f;
  const uint32_t mantissa = value & 0x3ff;
  if (exponent == 0) {
    return BitsToFloat(sign | FloatToBits(static_cast<float>(mantissa) * 0x1p-24f));
  }
  const uint32_t widened = exponent == 0x1f ? 0xff : exponent + (127 - 15);
  return BitsToFloat(sign | widened << 23 | mantissa << 13);
}

// False for NaN.
SIGNPOST_HOST_DEVICE inline bool IsWithinRange(float value) { return fabsf(value) <= kMaxDense; }

SIGNPOST_HOST_DEVICE inline void AdamStep(const AdamRates& rates, float g, float& m, float& v,
                                          float& x) {
  m = rates.beta1 * m + rates.one_minus_beta1 * g;
  v = rates.beta2 * v + rates.one_minus_beta2 * (g * g);
  const float denominator = sqrtf(v) * rates.inverse_sqrt_correction2 + rates.epsilon;
  const float decayed = x - rates.decay * x;
  x = decayed - rates.step_size * (m / denominator);
}

SIGNPOST_HOST_DEVICE inline float FlooredVariance(const FreezeRates& rates, float variance) {
  if (!(variance > 0)) return 0;
  const float corrected = variance * rates.variance_correction;
  return corrected < rates.floor ? rates.floor : corrected;
}

// What a variance must be above for its element to get an update: 0, or less, which every one is.
template <class Rates>
SIGNPOST_HOST_DEVICE float UpdatedAbove(const Rates& rates) {
  return rates.lifts_zeros && rates.floor > 0 ? -1.0f : 0.0f;
}

SIGNPOST_HOST_DEVICE inline float InverseDenominator(const FreezeRates& rates, float variance) {
  if (!(variance > UpdatedAbove(rates))) return 0;
  const float corrected = variance * rates.variance_correction;
  return 1 / (sqrtf(corrected < rates.floor ? rates.floor : corrected) + rates.epsilon);
}

SIGNPOST_HOST_DEVICE inline float VarianceOf(float inverse_denominator, float epsilon) {
  if (!(inverse_denominator > 0)) return 0;
  const float root = 1 / inverse_denominator - epsilon;
  return root * root;
}

// d is the inverse denominator, and becomes a variance.
SIGNPOST_HOST_DEVICE inline void RefreshStep(const RefreshRates& rates, float g, float& m, float& d,
                                             float& x) {
  m = rates.beta1 * m + rates.one_minus_beta1 * g;
  const float v = VarianceOf(d, rates.epsilon);
  const float decayed = x - rates.decay * x;
  x = decayed - rates.learning_rate * Bounded(m * d, rates.most_update);
  d = rates.kept_variance * v + rates.one_minus_kept_variance * (g * g);
}

SIGNPOST_HOST_DEVICE inline void UpdateMoments(const LambRates& rates, float g, float& m,
                                               float& v) {
  m = rates.beta1 * m + rates.one_minus_beta1 * g;
  v = rates.beta2 * v + rates.one_minus_beta2 * (g * g);
}

SIGNPOST_HOST_DEVICE inline float LambUpdate(const LambRates& rates, float m, float v, float x) {
  const float denominator = sqrtf(v) * rates.inverse_sqrt_correction2 + rates.epsilon;
  return m * rates.inverse_correction1 / denominator + rates.weight_decay * x;
}

struct FreshStep {
  float step, update;
  float quotient;  // d * (sqrt(f) + epsilon)
};

// d is the inverse denominator, f the fresh variance.
SIGNPOST_HOST_DEVICE inline FreshStep FollowMomentum(const FreshRates& rates, float m,
                                                     float m_before, float d, float x, float& f) {
  const float g = (m - rates.beta1 * m_before) * rates.inverse_one_minus_beta1;
  f = rates.beta2 * f + rates.one_minus_beta2 * (g * g);
  const float step = m * d;
  return {step, step + rates.weight_decay * x, d * (sqrtf(f) + rates.epsilon)};
}

SIGNPOST_HOST_DEVICE inline void AdaptiveStep(const AdaptiveRates& rates, float g, float& m,
                                              float& v, float& x) {
  if (rates.updates_variance) {
    v = rates.kept_variance * v + rates.one_minus_kept_variance * (g * g);
  }
  m = rates.beta1 * m + rates.one_minus_beta1 * g;
  const float floored = v > rates.floor ? v : rates.floor;
  const float denominator = sqrtf(floored) * rates.inverse_sqrt_correction2 + rates.epsilon;
  const float ratio = v > UpdatedAbove(rates) ? m / denominator : 0.0f;
  const float decayed = x - rates.decay * x;
  x = decayed - rates.step_size * ratio;
}

// The first two equations of LocalStep; the third is ApplyMomentum.
SIGNPOST_HOST_DEVICE inline void Accumulate(const LocalRates& rates, float g, float& m, float& u) {
  m = rates.beta1 * m + rates.one_minus_beta1 * g;
  u = u + rates.learning_rate * m;
}

}  // namespace signpost::kernels::formulas

#endif  // SIGNPOST_KERNELS_FORMULAS_H_
