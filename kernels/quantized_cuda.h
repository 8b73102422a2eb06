// quantized.h for workers whose state is on a GPU: the same bytes, but for which NaN it is.
// types_cuda.h says how calls are made.

#ifndef SIGNPOST_KERNELS_QUANTIZED_CUDA_H_
#define SIGNPOST_KERNELS_QUANTIZED_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/quantized.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// As CompressQuantized.
struct QuantizeSegment {
  const void* gradient = nullptr;  // of `gradient_type`; null: zeros
  GradientType gradient_type = GradientType::kFloat32;
  float* error = nullptr;
  QuantizedSpan out;
  IntegerType type = IntegerType::kInt8;  // of `out`
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
// `first_not_packed`, in device memory, is lowered to the first block, counted over all segments,
// that is not packed, if there is one.
absl::Status CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                               uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                               Stream stream);

// As DecompressQuantized.
struct DequantizeSegment {
  QuantizedView compressed;
  IntegerType type = IntegerType::kInt8;
  float* values = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status DecompressQuantized(const BlockRule& rule, const DequantizeSegment* segments,
                                 uint32_t count, uint32_t blocks, Stream stream);

// As AddQuantized, but for blocks that are not packed (IsPacked), which add nothing.
struct AddQuantizedSegment {
  QuantizedView addend;
  IntegerType type = IntegerType::kInt8;
  float factor = 1;
  float* accumulator = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};
absl::Status AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                          uint32_t count, uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_QUANTIZED_CUDA_H_
