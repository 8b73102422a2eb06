// What a thread block does in the kernels of sum_cuda.h: one run.

#ifndef SIGNPOST_KERNELS_SUM_CUDA_INL_H_
#define SIGNPOST_KERNELS_SUM_CUDA_INL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

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
  const auto length = static_cast<uint32_t>(Min(kSumRun, n - begin));
  Shared& shared = block.shared();
  double(&lanes)[kSumLanes] = shared.sums;
  const T* terms = values + begin;
  if constexpr (std::is_same_v<T, float>) {
    // Read by all threads in quads first: a lane's terms lie apart, and half the threads have none.
    static_assert(kSumRun == kTileElements);
    block.Phase([&](uint32_t thread) {
      ForEachQuad(thread, length, [&](uint32_t at, uint32_t count, uint32_t) {
        const Quad quad = LoadQuad(values + begin + at, count);
        for (uint32_t k = 0; k < kQuadElements; ++k) shared.u[at + k] = quad.v[k];
      });
    });
    terms = shared.u;
  }
  block.Phase([&](uint32_t thread) {
    if (thread >= kSumLanes) return;
    double sum = 0;
    SIGNPOST_UNROLL(8)
    for (uint32_t i = thread; i < length; i += kSumLanes) {
      const double value = terms[i];
      sum = sum + (kTerm == Term::kSquare ? value * value : value);
    }
    lanes[thread] = sum;
  });
  FoldLanes(block, lanes);
  block.Phase([&](uint32_t thread) {
    if (thread == 0) sums[number] = lanes[0];
  });
}

template <Term kTerm>
using TermConstant = std::integral_constant<Term, kTerm>;

// Calls on_runs(term, run_count, values, n, sums), which is to do SumBlock for each run, for the
// values, and then for their runs' sums until one is left, which is `sum`.
template <Term kTerm, class OnRuns>
void SumInRuns(const float* values, size_t n, double* workspace, double* sum, OnRuns on_runs) {
  size_t runs = n <= kSumRun ? 1 : BlockCount(n, kSumRun);
  double* sums = runs == 1 ? sum : workspace;
  on_runs(TermConstant<kTerm>(), runs, values, n, sums);
  while (runs > 1) {
    const double* const terms = sums;
    const size_t count = runs;
    sums += count;
    runs = BlockCount(count, kSumRun);
    if (runs == 1) sums = sum;
    on_runs(TermConstant<Term::kItself>(), runs, terms, count, sums);
  }
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_SUM_CUDA_INL_H_
