// The functions of device.h in a build without CUDA.

#include <string>

#include "kernels/device.h"

namespace signpost::kernels {

std::string DescribeDevices() {
  return "cuda: not built in (build with --config=cuda where nvcc is installed)";
}

absl::Status CheckDevice(int) {
  return absl::InvalidArgumentError(
      "this program was built without CUDA: build it with --config=cuda where nvcc is installed");
}

}  // namespace signpost::kernels
