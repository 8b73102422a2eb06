#include "kernels/dense.h"

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/highway_targets.h"

// Compiles dense-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense-inl.h"
#include "hwy/foreach_target.h"
#include "kernels/dense-inl.h"

namespace signpost::kernels {

HWY_EXPORT(CompressDense);
HWY_EXPORT(AggregateDense);
HWY_EXPORT(DecompressDense);
HWY_EXPORT(AddDense);
HWY_EXPORT(Scale);
HWY_EXPORT(DenseWithinRange);

size_t CompressDense(const BlockRule& rule, DenseType type, absl::Span<const float> gradient,
                     absl::Span<float> error, uint8_t* out) {
  return HWY_DYNAMIC_DISPATCH(CompressDense)(rule, type, gradient, error, out);
}

void AggregateDense(DenseType type, absl::Span<const uint8_t* const> contributions, size_t n,
                    float inverse_count, absl::Span<float> error, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(AggregateDense)(type, contributions, n, inverse_count, error, out);
}

void DecompressDense(DenseType type, const uint8_t* payload, absl::Span<float> values) {
  HWY_DYNAMIC_DISPATCH(DecompressDense)(type, payload, values);
}

void AddDense(DenseType type, const uint8_t* addend, float factor, absl::Span<float> accumulator) {
  HWY_DYNAMIC_DISPATCH(AddDense)(type, addend, factor, accumulator);
}

void Scale(float factor, absl::Span<float> values) { HWY_DYNAMIC_DISPATCH(Scale)(factor, values); }

bool DenseWithinRange(DenseType type, const uint8_t* payload, size_t elements) {
  return HWY_DYNAMIC_DISPATCH(DenseWithinRange)(type, payload, elements);
}

}  // namespace signpost::kernels
