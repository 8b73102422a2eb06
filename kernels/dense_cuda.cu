// The kernels of dense_cuda.h, and their launches: a thread block for each block.

#include <cstdint>

#include "kernels/dense_cuda-inl.h"
#include "kernels/dense_cuda.h"
#include "kernels/launch_cuda-inl.h"

namespace signpost::kernels::cuda {

absl::Status CompressDense(const BlockRule& rule, const DenseSegment* segments, uint32_t count,
                           uint32_t blocks, uint32_t* first_not_packed, Stream stream) {
  return LaunchOnBlocks<4>(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const DenseSegment& segment, uint32_t number) {
        CompressDenseBlock(block, rule, segment, number, first_not_packed);
      });
}

absl::Status AggregateDense(const BlockRule& rule, const AggregateDenseSegment* segments,
                            uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AggregateDenseSegment& segment, uint32_t number) {
        AggregateDenseBlock(block, rule, segment, number);
      });
}

absl::Status DecompressDense(const BlockRule& rule, const DecompressDenseSegment* segments,
                             uint32_t count, uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const DecompressDenseSegment& segment, uint32_t number) {
        DecompressDenseBlock(block, rule, segment, number);
      });
}

absl::Status AddDense(const BlockRule& rule, const AddDenseSegment* segments, uint32_t count,
                      uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const AddDenseSegment& segment, uint32_t number) {
        AddDenseBlock(block, rule, segment, number);
      });
}

absl::Status Scale(const BlockRule& rule, const ScaleSegment* segments, uint32_t count,
                   uint32_t blocks, Stream stream) {
  return LaunchOnBlocks(
      segments, count, blocks, stream,
      [=] __device__(DeviceBlock & block, const ScaleSegment& segment, uint32_t number) {
        ScaleBlock(block, rule, segment, number);
      });
}

}  // namespace signpost::kernels::cuda
