// The functions of device.h in a build without CUDA.

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/device.h"

namespace signpost::kernels {
namespace {

#ifdef SIGNPOST_WANTED_CUDA
constexpr char kWhy[] =
    "built with --config=cuda, but no nvcc with a libcudart_static.a beside it was found in "
    "$CUDA_HOME, PATH or /usr/local/cuda";
#else
constexpr char kWhy[] = "built without CUDA: build it with --config=cuda where nvcc is installed";
#endif

}  // namespace

std::string DescribeDevices() { return absl::StrCat("cuda: none (", kWhy, ")"); }

absl::Status CheckDevice(int) {
  return absl::InvalidArgumentError(absl::StrCat("this program was ", kWhy));
}

}  // namespace signpost::kernels
