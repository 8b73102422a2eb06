// The kernels of sum_cuda.h, and their launches: a thread block for each run.

#include <type_traits>

#include "kernels/launch_cuda-inl.h"
#include "kernels/sum_cuda-inl.h"
#include "kernels/sum_cuda.h"

namespace signpost::kernels::cuda {
namespace {

template <Term kTerm, class T>
__global__ void __launch_bounds__(kThreads) SumRuns(const T* values, size_t n, double* sums) {
  __shared__ Shared shared;
  DeviceBlock block(shared);
  SumBlock<kTerm>(block, values, n, blockIdx.x, sums);
}

template <Term kTerm>
absl::Status Launch(const float* values, size_t n, double* workspace, double* sum, Stream stream) {
  const auto on_runs = [stream](size_t runs, const auto* terms, size_t count, double* sums) {
    // Sums are not squared again.
    constexpr bool is_first = std::is_same_v<decltype(terms), const float*>;
    SumRuns<is_first ? kTerm : Term::kItself>
        <<<static_cast<uint32_t>(runs), kThreads, 0, stream>>>(terms, count, sums);
    return StatusOf(cudaGetLastError());
  };
  return SumInRuns(values, n, workspace, sum, on_runs);
}

}  // namespace

absl::Status Sum(const float* values, size_t n, double* workspace, double* sum, Stream stream) {
  return Launch<Term::kItself>(values, n, workspace, sum, stream);
}

absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                          Stream stream) {
  return Launch<Term::kSquare>(values, n, workspace, sum, stream);
}

}  // namespace signpost::kernels::cuda
