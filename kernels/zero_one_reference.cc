#include "kernels/zero_one_reference.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense_reference.h"
#include "kernels/formulas.h"

namespace signpost::kernels::reference {

void AdaptiveStep(const AdaptiveRates& rates, DenseType type, const uint8_t* gradient,
                  absl::Span<float> momentum, absl::Span<float> variance,
                  absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    formulas::AdaptiveStep(rates, LoadDense(type, gradient, i), momentum[i], variance[i],
                           parameters[i]);
  }
}

size_t LocalStep(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient,
                 absl::Span<float> momentum, absl::Span<float> accumulated,
                 absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  const size_t blocks = BlockCount(gradient.size(), rule.block_elements);
  size_t first_left_alone = blocks;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t end = std::min(begin + rule.block_elements, gradient.size());
    if (!std::all_of(gradient.begin() + begin, gradient.begin() + end, formulas::IsWithinRange)) {
      first_left_alone = std::min(first_left_alone, block);
      continue;
    }
    const UpdateRates update = {rates.learning_rate, rates.weight_decay, rates.most_update};
    for (size_t i = begin; i < end; ++i) {
      formulas::Accumulate(rates, gradient[i], momentum[i], accumulated[i]);
      if (parameters.empty()) continue;
      parameters[i] =
          formulas::ApplyMomentum(momentum[i], inverse_denominator[i], update, parameters[i]);
    }
  }
  return first_left_alone;
}

}  // namespace signpost::kernels::reference
