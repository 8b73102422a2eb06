// The kernels of quantized_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/launch_cuda-inl.h"
#include "kernels/quantized_cuda-inl.h"
#include "kernels/quantized_cuda.h"

namespace signpost::kernels::cuda {

absl::Status CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                               uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                               Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const QuantizeSegment& segment, uint32_t number) {
        QuantizeBlock(block, rule, segment, number, first_not_packed);
      });
}

absl::Status DecompressQuantized(const BlockRule& rule, const DequantizeSegment* segments,
                                 uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks<kFull>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const DequantizeSegment& segment, uint32_t number) {
        DequantizeBlock(block, rule, segment, number);
      });
}

absl::Status AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                          uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AddQuantizedSegment& segment, uint32_t number) {
        AddQuantizedBlock(block, rule, segment, number);
      });
}

}  // namespace signpost::kernels::cuda
