#include "kernels/quantized.h"

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles quantized-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantized-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/quantized-inl.h"

namespace signpost::kernels {

HWY_EXPORT(CompressQuantized);
HWY_EXPORT(AggregateQuantized);
HWY_EXPORT(DecompressQuantized);
HWY_EXPORT(AddQuantized);

size_t CompressQuantized(const BlockRule& rule, IntegerType type, absl::Span<const float> values,
                         absl::Span<float> error, QuantizedSpan out) {
  return HWY_DYNAMIC_DISPATCH(CompressQuantized)(rule, type, values, error, out);
}

size_t AggregateQuantized(const BlockRule& rule, IntegerType type,
                          absl::Span<const QuantizedView> contributions, float inverse_count,
                          absl::Span<float> error, QuantizedSpan out) {
  return HWY_DYNAMIC_DISPATCH(AggregateQuantized)(rule, type, contributions, inverse_count, error,
                                                  out);
}

void DecompressQuantized(const BlockRule& rule, IntegerType type, QuantizedView compressed,
                         absl::Span<float> values) {
  HWY_DYNAMIC_DISPATCH(DecompressQuantized)(rule, type, compressed, values);
}

void AddQuantized(const BlockRule& rule, IntegerType type, QuantizedView addend, float factor,
                  absl::Span<float> accumulator) {
  HWY_DYNAMIC_DISPATCH(AddQuantized)(rule, type, addend, factor, accumulator);
}

}  // namespace signpost::kernels
