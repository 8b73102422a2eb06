// The kernels of lamb_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/lamb_cuda-inl.h"
#include "kernels/lamb_cuda.h"
#include "kernels/launch_cuda-inl.h"

namespace signpost::kernels::cuda {

absl::Status UpdateMoments(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream) {
  return LaunchOnBlocks<4>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const LambSegment& segment, uint32_t number) {
        UpdateMomentsBlock(block, rule, segment, number);
      });
}

absl::Status LambStep(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                      uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const LambSegment& segment, uint32_t number) {
        LambStepBlock(block, rule, segment, number);
      });
}

absl::Status FloorVariance(const BlockRule& rule, const FloorSegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const FloorSegment& segment, uint32_t number) {
        FloorBlock(block, rule, segment, number);
      });
}

absl::Status FollowMomentum(const BlockRule& rule, const FollowSegment* segments, uint32_t count,
                            uint32_t blocks, Stream stream) {
  return LaunchOnBlocks<5>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const FollowSegment& segment, uint32_t number) {
        FollowBlock(block, rule, segment, number);
      });
}

}  // namespace signpost::kernels::cuda
