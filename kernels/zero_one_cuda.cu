// The kernels of zero_one_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/launch_cuda-inl.h"
#include "kernels/zero_one_cuda-inl.h"
#include "kernels/zero_one_cuda.h"

namespace signpost::kernels::cuda {

absl::Status AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments, uint32_t count,
                          uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AdaptiveSegment& segment, uint32_t number) {
        AdaptiveBlock(block, rule, segment, number);
      });
}

absl::Status LocalStep(const BlockRule& rule, const LocalSegment* segments, uint32_t count,
                       uint32_t blocks, uint32_t* first_left_alone, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const LocalSegment& segment, uint32_t number) {
        LocalBlock(block, rule, segment, number, first_left_alone);
      });
}

}  // namespace signpost::kernels::cuda
