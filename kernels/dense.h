// Dense codecs: numbers as fp32, bf16 or fp16, with the same error feedback as one-bit.
//
// A dense payload holds n numbers of `type` in element order, little-endian, with no alignment
// requirement. bf16 is the upper half of fp32, and fp16 is IEEE 754's binary16, denormal numbers
// included; both are rounded to nearest, ties to even. What is beyond kMaxFloat16 is kMaxFloat16 of
// its sign in fp16, and the rest of it is in the error.
//
// fp32 loses nothing: an error that is zero stays zero. For kFloat32, and for no other type,
// `error` may therefore be empty, and counts as zeros.
//
// Thread-safe; spans of one call must not overlap.

#ifndef SIGNPOST_KERNELS_DENSE_H_
#define SIGNPOST_KERNELS_DENSE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/block.h"

namespace signpost::kernels {

enum class DenseType { kFloat32, kBfloat16, kFloat16 };

// The largest fp16. Numbers up to kMaxDense are larger.
inline constexpr float kMaxFloat16 = 65504;

constexpr size_t DenseBytes(DenseType type, size_t elements) {
  return elements * (type == DenseType::kFloat32 ? 4 : 2);
}

// A worker's dense contribution: u = gradient + error; out = round(u); error = u - out. Sizes:
// gradient and error n elements, out DenseBytes(type, n).
//
// A block of `rule.block_elements` with an element of u that is not finite or exceeds kMaxDense in
// magnitude is not packed: kNotPacked is its first element in `out`, zeros are the others, and its
// part of `error` is untouched. Returns the index of the first such block, or BlockCount(n).
size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out);

// An aggregator's dense round, of n elements:
//   u = (sum over ranks) * inverse_count + error;  out = round(u);  error = u - out
// summed in the order of block.h (kRankGroup). `contributions` are payloads in rank order, at
// least one, each element at most kMaxDense in magnitude, as DenseWithinRange says.
void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out);

// values = payload, the signs of zeros included.
void DecompressDense(DenseType type, const uint8_t* payload, absl::Span<float> values);

// accumulator = accumulator + factor * payload, rounded after each operation.
void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator);

// values = factor * values.
void Scale(float factor, absl::Span<float> values);

// Whether each of the n elements of a payload is finite and at most kMaxDense in magnitude.
bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DENSE_H_
