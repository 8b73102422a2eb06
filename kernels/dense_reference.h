// The functions of dense.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_DENSE_REFERENCE_H_
#define SIGNPOST_KERNELS_DENSE_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/dense.h"

namespace signpost::kernels::reference {

// Element i of a dense payload.
float LoadDense(DenseType type, const uint8_t* payload, size_t i);

// Rounds a value that is finite, or kNotPacked, to `type`, writes it to element i and returns what
// was written.
float StoreDense(DenseType type, float value, uint8_t* payload, size_t i);

// What a payload has for a block of `length` elements from `begin` on that is not packed.
void StoreNotPacked(DenseType type, uint8_t* payload, size_t begin, size_t length);

size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out);
void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out);
void DecompressDense(DenseType type, const uint8_t* payload, absl::Span<float> values);
void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator);
void Scale(float factor, absl::Span<float> values);
bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_DENSE_REFERENCE_H_
