// The CUDA kernels against the CPU kernels: the same bytes.

#include "kernels/sum_cuda.h"

#include <iterator>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/run_cuda.h"
#include "kernels/sum.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

TEST(SumCuda, IsWhatTheCpuComesTo) {
  Random random;
  std::vector<size_t> lengths(std::begin(kLengths), std::end(kLengths));
  lengths.push_back(size_t{4096} * 4096 + 5000);  // the runs' sums make more than one run
  for (const size_t n : lengths) {
    for (const bool is_aligned : {false, true}) {
      SCOPED_TRACE(testing::Message() << n << " values" << (is_aligned ? ", aligned" : ""));
      const AlignedMemory memory(is_aligned);
      const Guarded<float> values = random.Values(n);
      EXPECT_EQ(RunSum(values.span()), kernels::Sum(values.span()));
      EXPECT_EQ(RunSumOfSquares(values.span()), kernels::SumOfSquares(values.span()));
    }
  }
}

TEST(SumCuda, WorkspaceHoldsTheSumsOfAllRounds) {
  EXPECT_EQ(SumWorkspace(0), 0);
  EXPECT_EQ(SumWorkspace(4096), 0);
  EXPECT_EQ(SumWorkspace(4097), 2);
  EXPECT_EQ(SumWorkspace(size_t{4096} * 4096), 4096);
  EXPECT_EQ(SumWorkspace(size_t{4096} * 4096 + 1), 4097 + 2);
}

}  // namespace
}  // namespace signpost::kernels::cuda
