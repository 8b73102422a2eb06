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
//   cuda: not built in (build with --config=cuda where nvcc is installed)
// Needs no driver to start.
std::string DescribeDevices();

// OK if the kernels run on that device. INVALID_ARGUMENT otherwise, with the reason and what to do:
// built without CUDA, no driver or an old one, no such GPU, or one that is too old.
absl::Status CheckDevice(int device);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DEVICE_H_
