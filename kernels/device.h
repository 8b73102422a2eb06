// The GPUs that this process can see.

#ifndef SIGNPOST_KERNELS_DEVICE_H_
#define SIGNPOST_KERNELS_DEVICE_H_

#include <string>

namespace signpost::kernels {

// One line per GPU for a person to read, without a newline at the end:
//   cuda: NVIDIA H200, 139 GiB, compute 9.0
// or why there is none:
//   cuda: none (no CUDA-capable device is detected)
//   cuda: not built in (build with --config=cuda where nvcc is installed)
// Needs no driver to start.
std::string DescribeDevices();

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DEVICE_H_
