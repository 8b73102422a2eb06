// dense.h for workers whose state is on a GPU: the same bytes, but for which NaN it is.
// types_cuda.h says how calls are made.

#ifndef SIGNPOST_KERNELS_DENSE_CUDA_H_
#define SIGNPOST_KERNELS_DENSE_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// As CompressDense. With kFloat32 the error may be null, and counts as zeros.
struct DenseSegment {
  const void* gradient = nullptr;  // of `gradient_type`; null: zeros
  GradientType gradient_type = GradientType::kFloat32;
  DenseType type = DenseType::kFloat32;  // of `out`
  float* error = nullptr;
  uint8_t* out = nullptr;  // at a multiple of what a number takes
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
// `first_not_packed`, in device memory, is lowered to the first block, counted over all segments,
// that is not packed, if there is one.
absl::Status CompressDense(const BlockRule& rule, const DenseSegment* segments, uint32_t count,
                           uint32_t blocks, uint32_t* first_not_packed, Stream stream);

// As AggregateDense of fp32 contributions, without an error. `contributions`, in device memory, has
// where each rank's is; of each the elements from `first` on count.
struct AggregateDenseSegment {
  const float* const* contributions = nullptr;
  uint32_t ranks = 0;  // >= 1
  float inverse_count = 1;
  size_t first = 0;
  float* out = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status AggregateDense(const BlockRule& rule, const AggregateDenseSegment* segments,
                            uint32_t count, uint32_t blocks, Stream stream);

// As DecompressDense.
struct DecompressDenseSegment {
  const uint8_t* compressed = nullptr;  // as DenseSegment::out; null: zeros
  DenseType type = DenseType::kFloat32;
  float* values = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status DecompressDense(const BlockRule& rule, const DecompressDenseSegment* segments,
                             uint32_t count, uint32_t blocks, Stream stream);

// As AddDense, but for blocks that are not packed (kNotPacked), which add nothing.
struct AddDenseSegment {
  const uint8_t* addend = nullptr;  // as DenseSegment::out
  DenseType type = DenseType::kFloat32;
  float factor = 1;
  float* accumulator = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status AddDense(const BlockRule& rule, const AddDenseSegment* segments, uint32_t count,
                      uint32_t blocks, Stream stream);

// As Scale.
struct ScaleSegment {
  float factor = 1;
  float* values = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status Scale(const BlockRule& rule, const ScaleSegment* segments, uint32_t count,
                   uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_DENSE_CUDA_H_
