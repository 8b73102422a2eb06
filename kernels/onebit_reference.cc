#include "kernels/onebit_reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/onebit.h"
#include "kernels/rank_sum.h"

namespace signpost::kernels::reference {
namespace {

bool IsNegative(const uint8_t* bits, size_t i) { return (bits[i / 8] >> (i % 8) & 1) != 0; }

// What element i of a compressed span stands for, times a factor.
float Decompress(const BlockRule& rule, OneBitView view, float factor, size_t i) {
  return formulas::Signed(factor * view.scales[i / rule.block_elements], IsNegative(view.bits, i));
}

float SumOfSquares(absl::Span<const float> u) {
  float lanes[kSumLanes] = {};
  for (size_t i = 0; i < u.size(); ++i) lanes[i % kSumLanes] += u[i] * u[i];
  for (size_t w = kSumLanes / 2; w > 0; w /= 2) {
    for (size_t l = 0; l < w; ++l) lanes[l] += lanes[l + w];
  }
  return lanes[0];
}

// Writes one block: its sign bits and what they lose. `bits` are the block's own.
void Pack(absl::Span<const float> u, float scale, absl::Span<float> error, uint8_t* bits) {
  std::fill_n(bits, SignBytes(u.size()), 0);
  for (size_t i = 0; i < u.size(); ++i) {
    bits[i / 8] |= static_cast<uint8_t>(std::signbit(u[i]) << (i % 8));
    error[i] = u[i] - std::copysign(scale, u[i]);
  }
}

// Compresses input(0), input(1), ... block by block; as onebit.h says of CompressMomentum.
template <class Input>
size_t Compress(const BlockRule& rule, Input input, absl::Span<float> error, OneBitSpan out) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  size_t first_not_packed = blocks;
  std::vector<float> u;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    u.resize(std::min(rule.block_elements, error.size() - begin));
    for (size_t i = 0; i < u.size(); ++i) u[i] = input(begin + i);
    const float scale = formulas::BlockScale(rule.gamma, SumOfSquares(u), u.size());
    if (scale <= kMaxScale) {
      out.scales[block] = scale;
      Pack(u, scale, error.subspan(begin, u.size()), out.bits + begin / 8);
    } else {  // also when it is not a number
      out.scales[block] = kNotPacked;
      first_not_packed = std::min(first_not_packed, block);
    }
  }
  return first_not_packed;
}

}  // namespace

size_t CompressDenseMomentum(const BlockRule& rule, MomentumRates rates,
                             absl::Span<const float> gradient, const float* momentum,
                             absl::Span<float> error, OneBitSpan out) {
  const auto u = [&](size_t i) {
    return formulas::MomentumAndError(rates, momentum[i], gradient[i], error[i]);
  };
  return Compress(rule, u, error, out);
}

size_t CompressOneBitMomentum(const BlockRule& rule, MomentumRates rates,
                              absl::Span<const float> gradient, OneBitView momentum,
                              absl::Span<float> error, OneBitSpan out) {
  const auto u = [&](size_t i) {
    const float m = Decompress(rule, momentum, /*factor=*/1, i);
    return formulas::MomentumAndError(rates, m, gradient[i], error[i]);
  };
  return Compress(rule, u, error, out);
}

size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out) {
  return Compress(rule, [&](size_t i) { return values[i] + error[i]; }, error, out);
}

void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Decompress(rule, compressed, /*factor=*/1, i);
  }
}

size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out) {
  const auto u = [&](size_t i) {
    const float sum = SumOverRanks(contributions.size(), [&](size_t rank) {
      return Decompress(rule, contributions[rank], /*factor=*/1, i);
    });
    return sum * inverse_count + error[i];
  };
  return Compress(rule, u, error, out);
}

void ApplyMomentum(const BlockRule& rule, OneBitView momentum, const UpdateRates& rates,
                   absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float m = Decompress(rule, momentum, /*factor=*/1, i);
    parameters[i] = formulas::ApplyMomentum(m, inverse_denominator[i], rates, parameters[i]);
  }
}

void AddOneBit(const BlockRule& rule, OneBitView addend, float factor,
               absl::Span<float> accumulator) {
  for (size_t i = 0; i < accumulator.size(); ++i) {
    accumulator[i] = accumulator[i] + Decompress(rule, addend, factor, i);
  }
}

}  // namespace signpost::kernels::reference
