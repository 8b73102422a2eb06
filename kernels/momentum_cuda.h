// momentum.h for workers whose state is on a GPU: the same bytes, but for which NaN it is.
// types_cuda.h says how calls are made; blocks are only how the work is cut up.

#ifndef SIGNPOST_KERNELS_MOMENTUM_CUDA_H_
#define SIGNPOST_KERNELS_MOMENTUM_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/momentum.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// As MomentumInput.
struct MomentumInputSegment {
  const void* gradient = nullptr;  // of `gradient_type`; null: zeros
  GradientType gradient_type = GradientType::kFloat32;
  const float* momentum = nullptr;
  float* input = nullptr;
  MomentumRates rates;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status MomentumInput(const BlockRule& rule, const MomentumInputSegment* segments,
                           uint32_t count, uint32_t blocks, Stream stream);

// As ApplyDenseMomentum.
struct ApplyDenseSegment {
  const float* momentum = nullptr;
  const float* inverse_denominator = nullptr;
  float* parameters = nullptr;
  UpdateRates rates;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status ApplyDenseMomentum(const BlockRule& rule, const ApplyDenseSegment* segments,
                                uint32_t count, uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_MOMENTUM_CUDA_H_
