// The kernels of onebit_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/launch_cuda-inl.h"
#include "kernels/onebit_cuda-inl.h"
#include "kernels/onebit_cuda.h"

namespace signpost::kernels::cuda {

absl::Status CompressOneBit(const BlockRule& rule, const CompressSegment* segments, uint32_t count,
                            uint32_t blocks, uint32_t* first_not_packed, Stream stream) {
  return LaunchOnBlocks<5>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const CompressSegment& segment, uint32_t number) {
        CompressBlock(block, rule, segment, number, first_not_packed);
      });
}

absl::Status ApplyMomentum(const BlockRule& rule, const ApplySegment* segments, uint32_t count,
                           uint32_t blocks, Stream stream) {
  return LaunchOnBlocks<kFull>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const ApplySegment& segment, uint32_t number) {
        ApplyBlock(block, rule, segment, number);
      });
}

absl::Status DecompressOneBit(const BlockRule& rule, const DecompressSegment* segments,
                              uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const DecompressSegment& segment, uint32_t number) {
        DecompressBlock(block, rule, segment, number);
      });
}

absl::Status AddOneBit(const BlockRule& rule, const AddSegment* segments, uint32_t count,
                       uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AddSegment& segment, uint32_t number) {
        AddBlock(block, rule, segment, number);
      });
}

}  // namespace signpost::kernels::cuda
