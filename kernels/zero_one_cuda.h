// zero_one.h for workers whose state is on a GPU: the same bytes, but for which NaN it is.
// types_cuda.h says how calls are made.

#ifndef SIGNPOST_KERNELS_ZERO_ONE_CUDA_H_
#define SIGNPOST_KERNELS_ZERO_ONE_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/types_cuda.h"
#include "kernels/zero_one.h"

namespace signpost::kernels::cuda {

// As AdaptiveStep. Blocks are only how the work is cut up.
struct AdaptiveSegment {
  AdaptiveRates rates;
  const uint8_t* gradient = nullptr;  // an averaged one: a dense payload of `type`
  DenseType type = DenseType::kFloat32;
  float* momentum = nullptr;
  float* variance = nullptr;
  float* parameters = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments, uint32_t count,
                          uint32_t blocks, Stream stream);

// As LocalStep.
struct LocalSegment {
  LocalRates rates;
  const void* gradient = nullptr;  // of `gradient_type`; null: zeros
  GradientType gradient_type = GradientType::kFloat32;
  float* momentum = nullptr;
  float* accumulated = nullptr;
  const float* inverse_denominator = nullptr;
  float* parameters = nullptr;  // null: they stay, and inverse denominators are not looked at
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
// `first_left_alone`, in device memory, is lowered to the first block, counted over all segments,
// that is left alone, if there is one.
absl::Status LocalStep(const BlockRule& rule, const LocalSegment* segments, uint32_t count,
                       uint32_t blocks, uint32_t* first_left_alone, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ZERO_ONE_CUDA_H_
