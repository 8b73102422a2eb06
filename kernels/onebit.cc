#include "kernels/onebit.h"

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles onebit-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/onebit-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/onebit-inl.h"

namespace signpost::kernels {

HWY_EXPORT(CompressDenseMomentum);
HWY_EXPORT(CompressOneBitMomentum);
HWY_EXPORT(CompressOneBit);
HWY_EXPORT(DecompressOneBit);
HWY_EXPORT(AggregateOneBit);
HWY_EXPORT(ApplyMomentum);
HWY_EXPORT(AddOneBit);

size_t CompressMomentum(const BlockRule& rule, MomentumRates rates,
                        absl::Span<const float> gradient, const float* momentum,
                        absl::Span<float> error, OneBitSpan out) {
  return HWY_DYNAMIC_DISPATCH(CompressDenseMomentum)(rule, rates, gradient, momentum, error, out);
}

size_t CompressMomentum(const BlockRule& rule, MomentumRates rates,
                        absl::Span<const float> gradient, OneBitView momentum,
                        absl::Span<float> error, OneBitSpan out) {
  return HWY_DYNAMIC_DISPATCH(CompressOneBitMomentum)(rule, rates, gradient, momentum, error, out);
}

size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out) {
  return HWY_DYNAMIC_DISPATCH(CompressOneBit)(rule, values, error, out);
}

void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values) {
  HWY_DYNAMIC_DISPATCH(DecompressOneBit)(rule, compressed, values);
}

size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out) {
  return HWY_DYNAMIC_DISPATCH(AggregateOneBit)(rule, contributions, inverse_count, error, out);
}

void ApplyMomentum(const BlockRule& rule, OneBitView momentum, const UpdateRates& rates,
                   absl::Span<const float> inverse_denominator, absl::Span<float> parameters) {
  HWY_DYNAMIC_DISPATCH(ApplyMomentum)
  (rule, momentum, rates, inverse_denominator, parameters);
}

void AddOneBit(const BlockRule& rule, OneBitView addend, float factor,
               absl::Span<float> accumulator) {
  HWY_DYNAMIC_DISPATCH(AddOneBit)(rule, addend, factor, accumulator);
}

}  // namespace signpost::kernels
