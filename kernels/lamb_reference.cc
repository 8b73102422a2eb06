#include "kernels/lamb_reference.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense_reference.h"
#include "kernels/formulas.h"

namespace signpost::kernels::reference {
namespace {

// A block's sum of squares, in the order of block.h.
class SquareLanes {
 public:
  void Add(size_t i, float value) { lanes_[i % kSumLanes] += value * value; }

  float Fold() {
    for (size_t w = kSumLanes / 2; w > 0; w /= 2) {
      for (size_t l = 0; l < w; ++l) lanes_[l] += lanes_[l + w];
    }
    return lanes_[0];
  }

 private:
  float lanes_[kSumLanes] = {};
};

// Calls use(i) for the elements [begin, end) of each block, and then done(block).
template <class Begin, class Use, class Done>
void ForEachBlock(const BlockRule& rule, size_t elements, Begin begin_block, Use use, Done done) {
  const size_t blocks = BlockCount(elements, rule.block_elements);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t end = std::min(begin + rule.block_elements, elements);
    begin_block();
    for (size_t i = begin; i < end; ++i) use(i, i - begin);
    done(block);
  }
}

float Decompress(const BlockRule& rule, OneBitView view, size_t i) {
  const bool is_negative = (view.bits[i / 8] >> (i % 8) & 1) != 0;
  return formulas::Signed(view.scales[i / rule.block_elements], is_negative);
}

// momentum(i) is the momentum that has come, before(i) the one that was.
template <class Momentum, class Before>
void FollowMomentum(const BlockRule& rule, const FreshRates& rates, Momentum momentum,
                    Before before, absl::Span<const float> inverse_denominator,
                    absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                    LambSums* sums) {
  SquareLanes steps, updates;
  float least = 0;
  ForEachBlock(
      rule, parameters.size(),
      [&] {
        steps = updates = SquareLanes();
        least = std::numeric_limits<float>::infinity();
      },
      [&](size_t i, size_t in_block) {
        const formulas::FreshStep step =
            formulas::FollowMomentum(rates, momentum(i), before(i), inverse_denominator[i],
                                     parameters[i], fresh_variance[i]);
        steps.Add(in_block, step.step);
        updates.Add(in_block, step.update);
        if (inverse_denominator[i] > 0 && step.quotient < least) least = step.quotient;
      },
      [&](size_t block) {
        sums[block] = {steps.Fold(), updates.Fold(), least};
      });
}

}  // namespace

void UpdateMoments(const BlockRule& rule, const LambRates& rates, DenseType type,
                   const uint8_t* gradient, absl::Span<float> momentum, absl::Span<float> variance,
                   absl::Span<const float> parameters, LambSums* sums) {
  SquareLanes values, updates;
  ForEachBlock(
      rule, parameters.size(), [&] { values = updates = SquareLanes(); },
      [&](size_t i, size_t in_block) {
        formulas::UpdateMoments(rates, LoadDense(type, gradient, i), momentum[i], variance[i]);
        values.Add(in_block, parameters[i]);
        updates.Add(in_block, formulas::LambUpdate(rates, momentum[i], variance[i], parameters[i]));
      },
      [&](size_t block) {
        sums[block] = {values.Fold(), updates.Fold(), 0};
      });
}

void LambStep(const LambRates& rates, float step_size, absl::Span<const float> momentum,
              absl::Span<const float> variance, absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    float& x = parameters[i];
    x = x - step_size * formulas::LambUpdate(rates, momentum[i], variance[i], x);
  }
}

void FloorVariance(const FreezeRates& rates, absl::Span<const float> variance,
                   absl::Span<float> fresh_variance) {
  for (size_t i = 0; i < variance.size(); ++i) {
    fresh_variance[i] = formulas::FlooredVariance(rates, variance[i]);
  }
}

void FollowDenseMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                         const float* momentum_before, absl::Span<const float> inverse_denominator,
                         absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                         LambSums* sums) {
  FollowMomentum(
      rule, rates, [&](size_t i) { return Decompress(rule, momentum, i); },
      [&](size_t i) { return momentum_before[i]; }, inverse_denominator, fresh_variance, parameters,
      sums);
}

void FollowOneBitMomentum(const BlockRule& rule, const FreshRates& rates, OneBitView momentum,
                          OneBitView momentum_before, absl::Span<const float> inverse_denominator,
                          absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                          LambSums* sums) {
  FollowMomentum(
      rule, rates, [&](size_t i) { return Decompress(rule, momentum, i); },
      [&](size_t i) { return Decompress(rule, momentum_before, i); }, inverse_denominator,
      fresh_variance, parameters, sums);
}

void FollowDenseAnswer(const BlockRule& rule, const FreshRates& rates, const float* answer,
                       absl::Span<float> momentum, absl::Span<const float> inverse_denominator,
                       absl::Span<float> fresh_variance, absl::Span<const float> parameters,
                       LambSums* sums) {
  FollowMomentum(
      rule, rates, [&](size_t i) { return answer[i]; }, [&](size_t i) { return momentum[i]; },
      inverse_denominator, fresh_variance, parameters, sums);
  std::copy_n(answer, momentum.size(), momentum.data());
}

}  // namespace signpost::kernels::reference
