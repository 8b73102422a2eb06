// The kernels of momentum_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/launch_cuda-inl.h"
#include "kernels/momentum_cuda-inl.h"
#include "kernels/momentum_cuda.h"

namespace signpost::kernels::cuda {

absl::Status MomentumInput(const BlockRule& rule, const MomentumInputSegment* segments,
                           uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const MomentumInputSegment& segment, uint32_t number) {
        MomentumInputBlock(block, rule, segment, number);
      });
}

absl::Status ApplyDenseMomentum(const BlockRule& rule, const ApplyDenseSegment* segments,
                                uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const ApplyDenseSegment& segment, uint32_t number) {
        ApplyDenseBlock(block, rule, segment, number);
      });
}

}  // namespace signpost::kernels::cuda
