// For tests: the functions of *_cuda.h on memory of the host's, done when they return.
//
// run_cuda_on_host.cc runs the thread blocks there, one after the other, where there is no GPU;
// run_cuda_on_device.cu launches the kernels. The same tests hold for both.

#ifndef SIGNPOST_KERNELS_RUN_CUDA_H_
#define SIGNPOST_KERNELS_RUN_CUDA_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/sum_cuda.h"

namespace signpost::kernels::cuda {

// What the compressing ones return where all blocks are packed; otherwise the first that is not.
inline constexpr uint32_t kAllPacked = std::numeric_limits<uint32_t>::max();

uint32_t RunCompressOneBit(const BlockRule& rule, const std::vector<CompressSegment>& segments);
uint32_t RunCompressDense(const BlockRule& rule, const std::vector<DenseSegment>& segments);
void RunApplyMomentum(const BlockRule& rule, const std::vector<ApplySegment>& segments);
void RunAddOneBit(const BlockRule& rule, const std::vector<AddSegment>& segments);
void RunAddDense(const BlockRule& rule, const std::vector<AddDenseSegment>& segments);
void RunScale(const BlockRule& rule, const std::vector<ScaleSegment>& segments);
void RunAdamStep(const BlockRule& rule, const std::vector<AdamSegment<AdamRates>>& segments);
void RunFreeze(const BlockRule& rule, const std::vector<AdamSegment<FreezeRates>>& segments);
void RunRefreshStep(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments);
void RunThaw(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments);

double RunSum(absl::Span<const float> values);
double RunSumOfSquares(absl::Span<const float> values);

// Of all segments.
template <class Segment>
uint32_t BlocksOf(const BlockRule& rule, const std::vector<Segment>& segments) {
  const Segment& last = segments.back();
  return last.first_block + BlockCount(last.elements, rule.block_elements);
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_RUN_CUDA_H_
