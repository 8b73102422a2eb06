// What the kernels do to one element or one block, once for the scalar reference and for CUDA: each
// line is one of the equations of onebit.h, dense.h, adam.h and lamb.h, rounded after each
// operation.

#ifndef SIGNPOST_KERNELS_FORMULAS_H_
#define SIGNPOST_KERNELS_FORMULAS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/lamb.h"
#include "kernels/onebit.h"

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

SIGNPOST_HOST_DEVICE inline float MomentumAndError(const MomentumRates& rates, float m, float g,
                                                   float e) {
  return rates.beta1 * m + rates.one_minus_beta1 * g + e;
}

SIGNPOST_HOST_DEVICE inline float ApplyMomentum(float m, float inverse_denominator,
                                                float learning_rate, float weight_decay, float x) {
  const float direction = m * inverse_denominator + weight_decay * x;
  return x - learning_rate * direction;
}

// To nearest, ties to even: adds half a unit of the last place, less one where that place is even.
SIGNPOST_HOST_DEVICE inline uint16_t RoundToBfloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

SIGNPOST_HOST_DEVICE inline float WidenBfloat16(uint16_t value) {
  return BitsToFloat(static_cast<uint32_t>(value) << 16);
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

SIGNPOST_HOST_DEVICE inline float InverseDenominator(const FreezeRates& rates, float variance) {
  if (!(variance > 0)) return 0;
  return 1 / (sqrtf(FlooredVariance(rates, variance)) + rates.epsilon);
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
  x = decayed - rates.learning_rate * (m * d);
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

}  // namespace signpost::kernels::formulas

#endif  // SIGNPOST_KERNELS_FORMULAS_H_
