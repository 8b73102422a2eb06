#include "kernels/adam_reference.h"

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/dense.h"
#include "kernels/dense_reference.h"
#include "kernels/formulas.h"

namespace signpost::kernels::reference {
void AdamStep(const AdamRates& rates, DenseType type, const uint8_t* gradient,
              absl::Span<float> momentum, absl::Span<float> variance,
              absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    formulas::AdamStep(rates, LoadDense(type, gradient, i), momentum[i], variance[i],
                       parameters[i]);
  }
}

void Freeze(const FreezeRates& rates, absl::Span<float> momentum, absl::Span<float> variance) {
  for (float& m : momentum) m = m * rates.momentum_correction;
  for (float& v : variance) v = formulas::InverseDenominator(rates, v);
}

void RefreshStep(const RefreshRates& rates, DenseType type, const uint8_t* gradient,
                 absl::Span<float> momentum, absl::Span<float> inverse_denominator,
                 absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    formulas::RefreshStep(rates, LoadDense(type, gradient, i), momentum[i], inverse_denominator[i],
                          parameters[i]);
  }
}

void Thaw(float epsilon, absl::Span<float> inverse_denominator) {
  for (float& d : inverse_denominator) d = formulas::VarianceOf(d, epsilon);
}

}  // namespace signpost::kernels::reference
