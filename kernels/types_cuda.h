// What the CUDA kernels' headers share.
//
// Each call takes many spans at once, of a chunk's tensors say, because each launch takes
// microseconds. They are described by an array of segments in device memory, in the
// order of their first_block: 0 for the first, and then the number of blocks before it; none is
// empty. All pointers in them are device memory. Those to numbers of four bytes are multiples of 4,
// and where they are multiples of 16, as tensors mostly are, accesses are of 16 bytes.
//
// Calls only put work on `stream`: they allocate nothing, wait for nothing, and what they read and
// write must stay until the stream has come past them. UNAVAILABLE when the device refuses a
// launch, with its reason; what a kernel does wrong shows where the stream is waited for.

#ifndef SIGNPOST_KERNELS_TYPES_CUDA_H_
#define SIGNPOST_KERNELS_TYPES_CUDA_H_

#include <cstdint>

struct CUstream_st;

namespace signpost::kernels::cuda {

using Stream = CUstream_st*;  // cudaStream_t

// As training computed it; widened exactly.
enum class GradientType : uint32_t { kFloat32, kBfloat16, kFloat16 };

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_TYPES_CUDA_H_
