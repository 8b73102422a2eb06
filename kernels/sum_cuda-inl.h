// What a thread block does in the kernels of sum_cuda.h: one run.

#ifndef SIGNPOST_KERNELS_SUM_CUDA_INL_H_
#define SIGNPOST_KERNELS_SUM_CUDA_INL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/block.h"
#include "kernels/sum.h"
#include "kernels/sum_cuda.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

enum class Term { kItself, kSquare };

// sums[number] = the sum of run `number` of the values' terms.
template <Term kTerm, class Block, class T>
SIGNPOST_DEVICE void SumBlock(Block& block, const T* values, size_t n, uint32_t number,
                              double* sums) {
  const size_t begin = number * kSumRun;
  const size_t end = Min(begin + kSumRun, n);
  double(&lanes)[kSumLanes] = block.shared().sums;
  block.Phase([&](uint32_t thread) {
    if (thread >= kSumLanes) return;
    double sum = 0;
    SIGNPOST_UNROLL(8)
    for (size_t i = begin + thread; i < end; i += kSumLanes) {
      const double value = values[i];
      sum = sum + (kTerm == Term::kSquare ? value * value : value);
    }
    lanes[thread] = sum;
  });
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    block.Phase([&](uint32_t thread) {
      if (thread < width) lanes[thread] += lanes[thread + width];
    });
  }
  block.Phase([&](uint32_t thread) {
    if (thread == 0) sums[number] = lanes[0];
  });
}

// Calls on_runs(run_count, values, n, sums) for the values, and then for their runs' sums until one
// is left, which is `sum`: it does SumBlock for each run, of squares only of the values. Returns
// the first error.
template <class OnRuns>
auto SumInRuns(const float* values, size_t n, double* workspace, double* sum, OnRuns on_runs) {
  size_t runs = n <= kSumRun ? 1 : BlockCount(n, kSumRun);
  double* sums = runs == 1 ? sum : workspace;
  auto status = on_runs(runs, values, n, sums);
  while (runs > 1 && status.ok()) {
    const double* const terms = sums;
    const size_t count = runs;
    sums += count;
    runs = BlockCount(count, kSumRun);
    if (runs == 1) sums = sum;
    status = on_runs(runs, terms, count, sums);
  }
  return status;
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_SUM_CUDA_INL_H_
