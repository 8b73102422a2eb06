// adam.h for workers whose state is on a GPU: the same bytes, but for which NaN it is. types_cuda.h
// says how calls are made.

#ifndef SIGNPOST_KERNELS_ADAM_CUDA_H_
#define SIGNPOST_KERNELS_ADAM_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// What the functions of adam.h take, as far as they do.
template <class Rates>
struct AdamSegment {
  Rates rates;
  const uint8_t* gradient = nullptr;  // an averaged one: a dense payload of `type`
  DenseType type = DenseType::kFloat32;
  float* momentum = nullptr;
  float* variance = nullptr;  // or inverse denominators
  float* parameters = nullptr;
  uint32_t elements = 0;
  uint32_t first_block = 0;
};

absl::Status AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments, uint32_t count,
                      uint32_t blocks, Stream stream);
// Parameters stay.
absl::Status Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments, uint32_t count,
                    uint32_t blocks, Stream stream);
absl::Status RefreshStep(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                         uint32_t count, uint32_t blocks, Stream stream);
// Of rates only epsilon, and of the rest only `variance` is looked at.
absl::Status Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments, uint32_t count,
                  uint32_t blocks, Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ADAM_CUDA_H_
