// Dense codecs: gradients as fp32 or bf16, for the warm-up, with the same error feedback as
// one-bit.
//
// A dense payload holds n numbers of `type` in element order, little-endian, with no alignment
// requirement. bf16 is the upper half of fp32, rounded to nearest, ties to even.
//
// fp32 loses nothing: an error that is zero stays zero. For kFloat32 `error` may therefore be
// empty, and counts as zeros.
//
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_DENSE_H_
#define SIGNPOST_KERNELS_DENSE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/block.h"

namespace signpost::kernels {

enum class DenseType { kFloat32, kBfloat16 };

constexpr size_t DenseBytes(DenseType type, size_t elements) {
  return elements * (type == DenseType::kFloat32 ? 4 : 2);
}

// A worker's dense contribution: u = gradient + error; out = round(u); error = u - out. Sizes:
// gradient and error n elements, out DenseBytes(type, n).
//
// A block of `rule.block_elements` with an element of u that is not finite or exceeds kMaxDense in
// magnitude is not packed: kNotPacked is its first element in `out`, and the rest of it and its
// part of `error` are untouched. Returns the index of the first such block, or BlockCount(n).
size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out);

// An aggregator's dense round, of n elements:
//   u = (sum over ranks) * inverse_count + error;  out = round(u);  error = u - out
// summed in the order of block.h (kRankGroup). `contributions` are payloads in rank order, at
// least one, each element at most kMaxDense in magnitude, as DenseWithinRange says.
void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out);

// accumulator = accumulator + factor * payload, rounded after each operation.
void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator);

// values = factor * values.
void Scale(float factor, absl::Span<float> values);

// Whether each of the n elements of a payload is finite and at most kMaxDense in magnitude.
bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DENSE_H_
