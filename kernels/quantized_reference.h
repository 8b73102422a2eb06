// The functions of quantized.h as plain loops, one element at a time: what the SIMD variants are
// measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_QUANTIZED_REFERENCE_H_
#define SIGNPOST_KERNELS_QUANTIZED_REFERENCE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/quantized.h"

namespace signpost::kernels::reference {

size_t CompressQuantized(const BlockRule& rule, IntegerType type, absl::Span<const float> values,
                         absl::Span<float> error, QuantizedSpan out);
size_t AggregateQuantized(const BlockRule& rule, IntegerType type,
                          absl::Span<const QuantizedView> contributions, float inverse_count,
                          absl::Span<float> error, QuantizedSpan out);
void DecompressQuantized(const BlockRule& rule, IntegerType type, QuantizedView compressed,
                         absl::Span<float> values);
void AddQuantized(const BlockRule& rule, IntegerType type, QuantizedView addend, float factor,
                  absl::Span<float> accumulator);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_QUANTIZED_REFERENCE_H_
