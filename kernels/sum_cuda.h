// sum.h for values on a GPU: the same double, but for which NaN it is. types_cuda.h says how calls
// are made.

#ifndef SIGNPOST_KERNELS_SUM_CUDA_H_
#define SIGNPOST_KERNELS_SUM_CUDA_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/block.h"
#include "kernels/sum.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// Doubles of device memory that a sum of n values needs meanwhile: the runs' sums, and theirs.
constexpr size_t SumWorkspace(size_t n) {
  size_t doubles = 0;
  while (n > kSumRun) {
    n = BlockCount(n, kSumRun);
    doubles += n;
  }
  return doubles;
}

// Writes the sum to `sum`, in device memory.
absl::Status Sum(const float* values, size_t n, double* workspace, double* sum, Stream stream);
absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                          Stream stream);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_SUM_CUDA_H_
