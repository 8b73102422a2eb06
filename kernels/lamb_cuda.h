// lamb.h for workers whose state is on a GPU: the same bytes, but for which NaN it is. types_cuda.h
// says how calls are made.

#ifndef SIGNPOST_KERNELS_LAMB_CUDA_H_
#define SIGNPOST_KERNELS_LAMB_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/lamb.h"
#include "kernels/onebit.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// What UpdateMoments and LambStep take, as far as they do.
struct LambSegment {
  LambRates rates;
  float step_size = 0;
  const uint8_t* gradient = nullptr;  // an averaged one: a dense payload of `type`
  DenseType type = DenseType::kFloat32;
  float* momentum = nullptr;
  float* variance = nullptr;
  float* parameters = nullptr;
  LambSums* sums = nullptr;  // of the segment's first block
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
// Parameters stay.
absl::Status UpdateMoments(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream);
absl::Status LambStep(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                      uint32_t blocks, Stream stream);

// As FloorVariance.
struct FloorSegment {
  FreezeRates rates;
  const float* variance = nullptr;
  float* fresh_variance = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status FloorVariance(const BlockRule& rule, const FloorSegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream);

// As FollowMomentum.
struct FollowSegment {
  FreshRates rates;
  // One of them.
  const float* dense_momentum = nullptr;
  OneBitView momentum;
  // One of them. A dense one becomes dense_momentum, where there is that.
  float* dense_momentum_before = nullptr;
  OneBitView momentum_before;
  const float* inverse_denominator = nullptr;
  float* fresh_variance = nullptr;
  const float* parameters = nullptr;
  LambSums* sums = nullptr;  // of the segment's first block
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status FollowMomentum(const BlockRule& rule, const FollowSegment* segments, uint32_t count,
                            uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_LAMB_CUDA_H_
