// Block-wise symmetric integers with error feedback.
//
// A span of elements is cut into blocks of `rule.block_elements`; the last may be short. A
// compressed block is one fp32 scale S >= 0 and one integer code for each element, which stands for
// code * S. With Q = MostCode(type), codes are in [-Q, Q].
//
// Compressing u, per block, everything in fp32, each operation rounded once:
//   A      = max |u_i|
//   S      = A / Q
//   r      = Q / A
//   code_i = u_i * r          rounded to the nearest integer, ties to even
//   e_i    = u_i - code_i * S              what compression lost, kept for the next input
// Where A is less than kLeastMagnitude, for which r could overflow, S, r and with them all codes
// are 0: all of u is in e.
//
// A span's codes are in two's complement: element i of int8 is byte i, and of int4 the lower (i
// even) or upper (i odd) half of byte i div 2. They take whole groups of eight elements; what is
// behind the last element is zero.
//
// All pointers are host memory with no alignment requirement beyond their type's. Spans of one call
// must not overlap. Functions are thread-safe: they touch their arguments only. BlockRule::gamma is
// not looked at.

#ifndef SIGNPOST_KERNELS_QUANTIZED_H_
#define SIGNPOST_KERNELS_QUANTIZED_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/block.h"

namespace signpost::kernels {

enum class IntegerType { kInt8, kInt4 };

constexpr size_t BitsOf(IntegerType type) { return type == IntegerType::kInt8 ? 8 : 4; }

// Q. The least of two's complement, -Q - 1, is never made, but stands for itself where it is read.
constexpr float MostCode(IntegerType type) { return type == IntegerType::kInt8 ? 127 : 7; }

constexpr size_t CodeBytes(IntegerType type, size_t elements) {
  return BitsOf(type) * SignBytes(elements);
}

inline constexpr float kLeastMagnitude = 0x1p-100f;

// A compressed span of n elements: BlockCount(n) scales and CodeBytes(type, n) bytes of codes.
struct QuantizedView {
  const float* scales = nullptr;
  const uint8_t* codes = nullptr;
};
struct QuantizedSpan {
  float* scales = nullptr;
  uint8_t* codes = nullptr;
  operator QuantizedView() const { return {scales, codes}; }
};

inline bool IsPacked(QuantizedView view, size_t block) { return !std::isnan(view.scales[block]); }

// A worker's contribution, in one pass over memory: compresses u = value + error of the span into
// `out` and leaves the new error in `error`. `values` and `error` have equal sizes, n.
//
// A block with a u that is not finite, or whose S exceeds kMaxScale, is not packed: kNotPacked is
// its scale in `out`, and its codes and its part of `error` are untouched. Returns the index of the
// first such block, or BlockCount(n): whether all are packed.
size_t CompressQuantized(const BlockRule& rule, IntegerType type, absl::Span<const float> values,
                         absl::Span<float> error, QuantizedSpan out);

// An aggregator's round, in one pass over memory, no contribution expanded to floats:
//   u = (sum over ranks of code * S) * inverse_count + error
// summed in the order of block.h (kRankGroup), compressed into `out`, the new error left in
// `error`. `contributions` are in rank order, at least one, with all blocks packed; inverse_count
// is fp32 1/world size. What is not finite, and what it returns, as CompressQuantized.
size_t AggregateQuantized(const BlockRule& rule, IntegerType type,
                          absl::Span<const QuantizedView> contributions, float inverse_count,
                          absl::Span<float> error, QuantizedSpan out);

// values = code * S.
void DecompressQuantized(const BlockRule& rule, IntegerType type, QuantizedView compressed,
                         absl::Span<float> values);

// accumulator = accumulator + factor * (code * S), rounded after each operation. With factor 1 it
// takes a contribution back that did not count.
void AddQuantized(const BlockRule& rule, IntegerType type, QuantizedView addend, float factor,
                  absl::Span<float> accumulator);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_QUANTIZED_H_
