// How kernels on blocks of segments are launched.

#ifndef SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_
#define SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/error_cuda.h"
#include "kernels/thread_block_cuda-inl.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

// As many thread blocks as there are blocks: body(block, segment, number) is what each does.
template <class Segment, class Body>
__global__ void __launch_bounds__(kThreads)
    OnBlocks(const Segment* segments, uint32_t count, Body body) {
  __shared__ Shared shared;
  DeviceBlock block(shared);
  body(block, SegmentOfBlock(segments, count, blockIdx.x), blockIdx.x);
}

template <class Segment, class Body>
absl::Status LaunchOnBlocks(const Segment* segments, uint32_t count, uint32_t blocks, Stream stream,
                            Body body) {
  if (blocks == 0) return absl::OkStatus();
  OnBlocks<<<blocks, kThreads, 0, stream>>>(segments, count, body);
  return StatusOf(cudaGetLastError());
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_
