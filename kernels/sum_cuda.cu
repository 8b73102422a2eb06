// The kernels of sum_cuda.h, and their launches: a thread block for each run.

#include <cstdint>
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
absl::Status LaunchRuns(const float* values, size_t n, double* workspace, double* sum,
                        Stream stream) {
  absl::Status status;
  SumInRuns<kTerm>(values, n, workspace, sum,
                   [&](auto term, size_t runs, const auto* terms, size_t count, double* sums) {
                     using T = std::remove_cvref_t<decltype(*terms)>;
                     status.Update(Launch<SumRuns<term, T>>(static_cast<uint32_t>(runs), stream,
                                                            terms, count, sums));
                   });
  return status;
}

}  // namespace

absl::Status Sum(const float* values, size_t n, double* workspace, double* sum, Stream stream) {
  return LaunchRuns<Term::kItself>(values, n, workspace, sum, stream);
}

absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                          Stream stream) {
  return LaunchRuns<Term::kSquare>(values, n, workspace, sum, stream);
}

}  // namespace signpost::kernels::cuda
