#include "kernels/momentum_reference.h"

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/formulas.h"
#include "kernels/momentum.h"

namespace signpost::kernels::reference {

void MomentumInput(MomentumRates rates, absl::Span<const float> gradient, const float* momentum,
                   absl::Span<float> input) {
  for (size_t i = 0; i < input.size(); ++i) {
    input[i] = formulas::MomentumInput(rates, momentum[i], gradient[i]);
  }
}

void ApplyDenseMomentum(absl::Span<const float> momentum, const UpdateRates& rates,
                        absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i] =
        formulas::ApplyMomentum(momentum[i], inverse_denominator[i], rates, parameters[i]);
  }
}

}  // namespace signpost::kernels::reference
