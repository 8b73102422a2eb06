// How kernels are launched, those on blocks of segments above all.

#ifndef SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_
#define SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/error_cuda.h"
#include "kernels/kernel_list_cuda.h"
#include "kernels/thread_block_cuda-inl.h"
#include "kernels/types_cuda.h"

namespace signpost::kernels::cuda {

template <auto* kKernel>
inline const ListedKernel kListed(reinterpret_cast<const void*>(kKernel));

// Launches kKernel(arguments...), of kThreads threads. It is in the list because this is how it is
// launched: there is no other place in which kernels are.
template <auto* kKernel, class... Arguments>
absl::Status Launch(uint32_t thread_blocks, Stream stream, Arguments... arguments) {
  void* addresses[] = {&arguments...};
  return StatusOf(cudaLaunchKernel(kListed<kKernel>.kernel(), dim3(thread_blocks), dim3(kThreads),
                                   addresses, /*sharedMem=*/0, stream));
}

// As many thread blocks as there are blocks: body(block, segment, number) is what each does.
template <uint32_t kAtOnce, class Segment, class Body>
__global__ void __launch_bounds__(kThreads, kAtOnce)
    OnBlocks(const Segment* segments, uint32_t count, Body body) {
  __shared__ Shared shared;
  DeviceBlock block(shared);
  // A copy in registers: by reference, each quad would read what it needs of it again, since for
  // all that the compiler knows the quad before has written there.
  const Segment segment = SegmentOfBlock(segments, count, blockIdx.x);
  body(block, segment, blockIdx.x);
}

// With kAtOnce, for kernels that the compiler would give a few registers too many, a multiprocessor
// has room for so many thread blocks; kFull is all of its threads.
inline constexpr uint32_t kFull = 2048 / kThreads;
template <uint32_t kAtOnce = 0, class Segment, class Body>
absl::Status LaunchOnBlocks(const Segment* segments, uint32_t count, uint32_t blocks, Stream stream,
                            Body body) {
  if (blocks == 0) return absl::OkStatus();
  return Launch<OnBlocks<kAtOnce, Segment, Body>>(blocks, stream, segments, count, body);
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_LAUNCH_CUDA_INL_H_
