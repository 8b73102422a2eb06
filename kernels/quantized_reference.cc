#include "kernels/quantized_reference.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/quantized.h"
#include "kernels/rank_sum.h"

namespace signpost::kernels::reference {
namespace {

int32_t LoadCode(IntegerType type, const uint8_t* codes, size_t i) {
  if (type == IntegerType::kInt8) return formulas::CodeOf(type, codes[i]);
  return formulas::CodeOf(type, codes[i / 2] >> (4 * (i % 2)));
}

// To where it is zero.
void StoreCode(IntegerType type, int32_t code, uint8_t* codes, size_t i) {
  if (type == IntegerType::kInt8) {
    codes[i] = static_cast<uint8_t>(code);
  } else {
    codes[i / 2] |= static_cast<uint8_t>((code & 0xf) << (4 * (i % 2)));
  }
}

// What element i of a compressed span stands for.
float Decompress(const BlockRule& rule, IntegerType type, QuantizedView view, size_t i) {
  return formulas::Dequantize(LoadCode(type, view.codes, i), view.scales[i / rule.block_elements]);
}

// Writes one block: its codes and what they lose. `codes` are the block's own.
void Pack(IntegerType type, absl::Span<const float> u, float largest, float scale,
          absl::Span<float> error, uint8_t* codes) {
  const float inverse = formulas::InverseScale(type, largest);
  std::fill_n(codes, CodeBytes(type, u.size()), 0);
  for (size_t i = 0; i < u.size(); ++i) {
    const int32_t code = formulas::Quantize(u[i], inverse);
    StoreCode(type, code, codes, i);
    error[i] = u[i] - formulas::Dequantize(code, scale);
  }
}

// Compresses input(0), input(1), ... block by block; as quantized.h says of CompressQuantized.
template <class Input>
size_t Compress(const BlockRule& rule, IntegerType type, Input input, absl::Span<float> error,
                QuantizedSpan out) {
  const size_t blocks = BlockCount(error.size(), rule.block_elements);
  size_t first_not_packed = blocks;
  std::vector<float> u;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    u.resize(std::min(rule.block_elements, error.size() - begin));
    float largest = 0;
    for (size_t i = 0; i < u.size(); ++i) {
      u[i] = input(begin + i);
      largest = formulas::LargerMagnitude(largest, u[i]);
    }
    const float scale = formulas::ScaleOf(type, largest);
    if (scale <= kMaxScale) {
      out.scales[block] = scale;
      Pack(type, u, largest, scale, error.subspan(begin, u.size()),
           out.codes + CodeBytes(type, begin));
    } else {  // also when it is not a number
      out.scales[block] = kNotPacked;
      first_not_packed = std::min(first_not_packed, block);
    }
  }
  return first_not_packed;
}

}  // namespace

size_t CompressQuantized(const BlockRule& rule, IntegerType type, absl::Span<const float> values,
                         absl::Span<float> error, QuantizedSpan out) {
  return Compress(
      rule, type, [&](size_t i) { return values[i] + error[i]; }, error, out);
}

size_t AggregateQuantized(const BlockRule& rule, IntegerType type,
                          absl::Span<const QuantizedView> contributions, float inverse_count,
                          absl::Span<float> error, QuantizedSpan out) {
  const auto u = [&](size_t i) {
    const float sum = SumOverRanks(contributions.size(), [&](size_t rank) {
      return Decompress(rule, type, contributions[rank], i);
    });
    return sum * inverse_count + error[i];
  };
  return Compress(rule, type, u, error, out);
}

void DecompressQuantized(const BlockRule& rule, IntegerType type, QuantizedView compressed,
                         absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) values[i] = Decompress(rule, type, compressed, i);
}

void AddQuantized(const BlockRule& rule, IntegerType type, QuantizedView addend, float factor,
                  absl::Span<float> accumulator) {
  for (size_t i = 0; i < accumulator.size(); ++i) {
    accumulator[i] = accumulator[i] + factor * Decompress(rule, type, addend, i);
  }
}

}  // namespace signpost::kernels::reference
