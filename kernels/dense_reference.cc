#include "kernels/dense_reference.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/formulas.h"
#include "kernels/rank_sum.h"

namespace signpost::kernels::reference {
namespace {

using formulas::IsWithinRange;

// Element i of an error, which is all zeros if it is empty.
float LoadError(absl::Span<const float> error, size_t i) { return error.empty() ? 0 : error[i]; }
void StoreError(float value, absl::Span<float> error, size_t i) {
  if (!error.empty()) error[i] = value;
}

// To and from the types of two bytes.
uint16_t RoundToHalf(DenseType type, float value) {
  return type == DenseType::kBfloat16 ? formulas::RoundToBfloat16(value)
                                      : formulas::RoundToFloat16(value);
}
float Widen(DenseType type, uint16_t half) {
  return type == DenseType::kBfloat16 ? formulas::WidenBfloat16(half)
                                      : formulas::WidenFloat16(half);
}

}  // namespace

float LoadDense(DenseType type, const uint8_t* payload, size_t i) {
  if (type == DenseType::kFloat32) {
    float value;
    std::memcpy(&value, payload + 4 * i, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, payload + 2 * i, sizeof half);
  return Widen(type, half);
}

float StoreDense(DenseType type, float value, uint8_t* payload, size_t i) {
  if (type == DenseType::kFloat32) {
    std::memcpy(payload + 4 * i, &value, sizeof value);
    return value;
  }
  const uint16_t half = RoundToHalf(type, value);
  std::memcpy(payload + 2 * i, &half, sizeof half);
  return Widen(type, half);
}

void StoreNotPacked(DenseType type, uint8_t* payload, size_t begin, size_t length) {
  StoreDense(type, kNotPacked, payload, begin);
  for (size_t i = 1; i < length; ++i) StoreDense(type, 0, payload, begin + i);
}

size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out) {
  const auto u = [&](size_t i) { return gradient[i] + LoadError(error, i); };
  const size_t blocks = BlockCount(gradient.size(), rule.block_elements);
  size_t first_not_packed = blocks;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * rule.block_elements;
    const size_t end = std::min(begin + rule.block_elements, gradient.size());
    bool is_within_range = true;
    for (size_t i = begin; i < end; ++i) is_within_range &= IsWithinRange(u(i));
    if (!is_within_range) {
      StoreNotPacked(type, out, begin, end - begin);
      first_not_packed = std::min(first_not_packed, block);
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      const float value = u(i);
      StoreError(value - StoreDense(type, value, out, i), error, i);
    }
  }
  return first_not_packed;
}

void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out) {
  for (size_t i = 0; i < n; ++i) {
    const float sum = SumOverRanks(
        contributions.size(), [&](size_t rank) { return LoadDense(type, contributions[rank], i); });
    const float u = sum * inverse_count + LoadError(error, i);
    StoreError(u - StoreDense(type, u, out, i), error, i);
  }
}

void DecompressDense(DenseType type, const uint8_t* payload, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) values[i] = LoadDense(type, payload, i);
}

void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator) {
  for (size_t i = 0; i < accumulator.size(); ++i) {
    accumulator[i] = accumulator[i] + factor * LoadDense(type, addend, i);
  }
}

void Scale(float factor, absl::Span<float> values) {
  for (float& value : values) value = factor * value;
}

bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements) {
  for (size_t i = 0; i < elements; ++i) {
    if (!IsWithinRange(LoadDense(type, payload, i))) return false;
  }
  return true;
}

}  // namespace signpost::kernels::reference
