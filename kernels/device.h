// The GPUs that this process can see.

#ifndef SIGNPOST_KERNELS_DEVICE_H_
#define SIGNPOST_KERNELS_DEVICE_H_

#include <string>

#include "absl/status/status.h"

namespace signpost::kernels {

// One line per GPU for a person to read, without a newline at the end:
//   cuda: NVIDIA H200, 139 GiB, compute 9.0
// or why there is none:
//   cuda: none (no NVIDIA driver is installed)
//   cuda: none (built without CUDA: build it with --config=cuda where nvcc is installed)
// Needs no driver to start.
std::string DescribeDevices();

// OK if the kernels run on that device. Otherwise, with the reason and what to do,
// INVALID_ARGUMENT: built without CUDA, no driver or an old one, no such GPU, or one that is too
// old; and where it may be gone some time, as when the GPU's memory is full, or the system starts,
// UNAVAILABLE or RESOURCE_EXHAUSTED.
absl::Status CheckDevice(int device);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DEVICE_H_
