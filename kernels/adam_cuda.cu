// The kernels of adam_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/adam_cuda-inl.h"
#include "kernels/adam_cuda.h"
#include "kernels/launch_cuda-inl.h"

namespace signpost::kernels::cuda {

absl::Status AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments, uint32_t count,
                      uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AdamSegment<AdamRates>& segment, uint32_t number) {
        AdamBlock(block, rule, segment, number);
      });
}

absl::Status Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments, uint32_t count,
                    uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AdamSegment<FreezeRates>& segment,
                     uint32_t number) { FreezeBlock(block, rule, segment, number); });
}

absl::Status RefreshStep(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                         uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AdamSegment<RefreshRates>& segment,
                     uint32_t number) { RefreshBlock(block, rule, segment, number); });
}

absl::Status Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments, uint32_t count,
                  uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AdamSegment<RefreshRates>& segment,
                     uint32_t number) { ThawBlock(block, rule, segment, number); });
}

}  // namespace signpost::kernels::cuda
