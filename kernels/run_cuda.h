// For tests: a GPU's kernels on memory of the host's, done when they return.
//
// Where there is no GPU, run_cuda_on_host.cc simulates one; run_cuda_on_device.cc has a real one.
// The same tests hold for both.

#ifndef SIGNPOST_KERNELS_RUN_CUDA_H_
#define SIGNPOST_KERNELS_RUN_CUDA_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "kernels/gpu.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "kernels/zero_one_cuda.h"

namespace signpost::kernels::cuda {

// Its kernels reach what the tests have of operator new, at the same addresses.
Gpu& TestGpu();

// What the compressing ones return where all blocks are packed; otherwise the first that is not. So
// does RunLocalStep, of blocks that are left alone.
inline constexpr uint32_t kAllPacked = std::numeric_limits<uint32_t>::max();

uint32_t RunCompressOneBit(const BlockRule& rule, const std::vector<CompressSegment>& segments);
uint32_t RunCompressDense(const BlockRule& rule, const std::vector<DenseSegment>& segments);
uint32_t RunCompressQuantized(const BlockRule& rule, const std::vector<QuantizeSegment>& segments);
void RunMomentumInput(const BlockRule& rule, const std::vector<MomentumInputSegment>& segments);
void RunApplyMomentum(const BlockRule& rule, const std::vector<ApplySegment>& segments);
void RunApplyDenseMomentum(const BlockRule& rule, const std::vector<ApplyDenseSegment>& segments);
void RunDecompressOneBit(const BlockRule& rule, const std::vector<DecompressSegment>& segments);
void RunDecompressQuantized(const BlockRule& rule, const std::vector<DequantizeSegment>& segments);
void RunDecompressDense(const BlockRule& rule, const std::vector<DecompressDenseSegment>& segments);
void RunAggregateDense(const BlockRule& rule, const std::vector<AggregateDenseSegment>& segments);
void RunAddOneBit(const BlockRule& rule, const std::vector<AddSegment>& segments);
void RunAddQuantized(const BlockRule& rule, const std::vector<AddQuantizedSegment>& segments);
void RunAddDense(const BlockRule& rule, const std::vector<AddDenseSegment>& segments);
void RunScale(const BlockRule& rule, const std::vector<ScaleSegment>& segments);
void RunAdamStep(const BlockRule& rule, const std::vector<AdamSegment<AdamRates>>& segments);
void RunFreeze(const BlockRule& rule, const std::vector<AdamSegment<FreezeRates>>& segments);
void RunRefreshStep(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments);
void RunThaw(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments);
void RunUpdateMoments(const BlockRule& rule, const std::vector<LambSegment>& segments);
void RunLambStep(const BlockRule& rule, const std::vector<LambSegment>& segments);
void RunFloorVariance(const BlockRule& rule, const std::vector<FloorSegment>& segments);
void RunFollowMomentum(const BlockRule& rule, const std::vector<FollowSegment>& segments);
void RunAdaptiveStep(const BlockRule& rule, const std::vector<AdaptiveSegment>& segments);
uint32_t RunLocalStep(const BlockRule& rule, const std::vector<LocalSegment>& segments);

double RunSum(absl::Span<const float> values);
double RunSumOfSquares(absl::Span<const float> values);

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_RUN_CUDA_H_
