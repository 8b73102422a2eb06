// onebit.h for workers whose state is on a GPU: the same bytes, but for which NaN it is.
// types_cuda.h says how calls are made.

#ifndef SIGNPOST_KERNELS_ONEBIT_CUDA_H_
#define SIGNPOST_KERNELS_ONEBIT_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/onebit.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// u = beta1 * momentum + (1 - beta1) * gradient + error as CompressMomentum has it, or without a
// momentum u = gradient + error as CompressOneBit.
struct CompressSegment {
  const void* gradient = nullptr;  // of `type`; null: zeros
  GradientType type = GradientType::kFloat32;
  // At most one of them.
  const float* dense_momentum = nullptr;
  OneBitView momentum;
  float* error = nullptr;
  OneBitSpan out;
  MomentumRates rates;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};

// What CompressMomentum does for each segment. `first_not_packed`, in device memory, is lowered to
// the first block, counted over all segments, that is not packed, if there is one.
absl::Status CompressOneBit(const BlockRule& rule, const CompressSegment* segments, uint32_t count,
                            uint32_t blocks, uint32_t* first_not_packed, Stream stream);

// As ApplyMomentum.
struct ApplySegment {
  OneBitView momentum;
  const float* inverse_denominator = nullptr;
  float* parameters = nullptr;
  UpdateRates rates;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status ApplyMomentum(const BlockRule& rule, const ApplySegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream);

// As DecompressOneBit.
struct DecompressSegment {
  OneBitView compressed;
  float* values = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status DecompressOneBit(const BlockRule& rule, const DecompressSegment* segments,
                              uint32_t count, uint32_t blocks, Stream stream);

// As AddOneBit, but for blocks that are not packed (IsPacked), which add nothing.
struct AddSegment {
  OneBitView addend;
  float factor = 1;
  float* accumulator = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status AddOneBit(const BlockRule& rule, const AddSegment* segments, uint32_t count,
                       uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ONEBIT_CUDA_H_
