#include "kernels/adam_reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/dense.h"
#include "kernels/dense_reference.h"

namespace signpost::kernels::reference {
namespace {

float InverseDenominator(const FreezeRates& rates, float variance) {
  if (!(variance > 0)) return 0;
  const float corrected = variance * rates.variance_correction;
  return 1 / (std::sqrt(std::max(corrected, rates.floor)) + rates.epsilon);
}

float VarianceOf(float inverse_denominator, float epsilon) {
  if (!(inverse_denominator > 0)) return 0;
  const float root = 1 / inverse_denominator - epsilon;
  return root * root;
}

}  // namespace

void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance,
              absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = LoadDense(type, gradient, i);
    const float m = rates.beta1 * momentum[i] + rates.one_minus_beta1 * g;
    const float v = rates.beta2 * variance[i] + rates.one_minus_beta2 * (g * g);
    const float denominator = std::sqrt(v) * rates.inverse_sqrt_correction2 + rates.epsilon;
    const float decayed = parameters[i] - rates.decay * parameters[i];
    parameters[i] = decayed - rates.step_size * (m / denominator);
    momentum[i] = m;
    variance[i] = v;
  }
}

void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance) {
  for (float& m : momentum) m = m * rates.momentum_correction;
  for (float& v : variance) v = InverseDenominator(rates, v);
}

void RefreshStep(const RefreshRates& rates, const uint8_t* gradient, absl::Span<float> momentum,
                 absl::Span<float> inverse_denominator, absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = LoadDense(DenseType::kFloat32, gradient, i);
    const float d = inverse_denominator[i];
    const float m = rates.beta1 * momentum[i] + rates.one_minus_beta1 * g;
    const float v = VarianceOf(d, rates.epsilon);
    const float decayed = parameters[i] - rates.decay * parameters[i];
    parameters[i] = decayed - rates.learning_rate * (m * d);
    momentum[i] = m;
    inverse_denominator[i] = rates.kept_variance * v + rates.one_minus_kept_variance * (g * g);
  }
}

void Thaw(float epsilon, absl::Span<float> inverse_denominator) {
  for (float& d : inverse_denominator) d = VarianceOf(d, epsilon);
}

}  // namespace signpost::kernels::reference
