// The functions of onebit.h as plain loops, one element at a time, in the words of the paper: what
// the SIMD variants are measured against, and what runs on a processor that has none of them.

#ifndef SIGNPOST_KERNELS_ONEBIT_REFERENCE_H_
#define SIGNPOST_KERNELS_ONEBIT_REFERENCE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/onebit.h"

namespace signpost::kernels::reference {

size_t CompressDenseMomentum(const BlockRule& rule, MomentumRates rates,
                             absl::Span<const float> gradient, const float* momentum,
                             absl::Span<float> error, OneBitSpan out);
size_t CompressOneBitMomentum(const BlockRule& rule, MomentumRates rates,
                              absl::Span<const float> gradient, OneBitView momentum,
                              absl::Span<float> error, OneBitSpan out);
size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out);
void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values);
size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out);
void ApplyMomentum(const BlockRule& rule, OneBitView momentum, const UpdateRates& rates,
                   absl::Span<const float> inverse_denominator, absl::Span<float> parameters);
void AddOneBit(const BlockRule& rule, OneBitView addend, float factor,
               absl::Span<float> accumulator);

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_ONEBIT_REFERENCE_H_
