// DescribeDevices of a build without CUDA.

#include <string>

#include "kernels/device.h"

namespace signpost::kernels {

std::string DescribeDevices() {
  return "cuda: not built in (build with --config=cuda where nvcc is installed)";
}

}  // namespace signpost::kernels
