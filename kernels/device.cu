// The functions of device.h in a build with CUDA.

#include <cuda_runtime.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/device.h"
#include "kernels/error_cuda.h"
#include "kernels/gpu_messages.h"

namespace signpost::kernels {
namespace {

using cuda::StatusOf;

// Whether it will be so until somebody changes the machine, or what the process may see of it.
bool IsForGood(cudaError_t error) {
  return error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice ||
         error == cudaErrorStubLibrary || error == cudaErrorSystemDriverMismatch ||
         error == cudaErrorCompatNotSupportedOnDevice;
}

std::string DescribeDevice(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    return absl::StrCat("cuda: device ", device, " (", StatusOf(error).message(), ")");
  }
  return absl::StrCat("cuda: ", properties.name, ", ", properties.totalGlobalMem >> 30,
                      " GiB, compute ", properties.major, ".", properties.minor);
}

}  // namespace

std::string DescribeDevices() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    return absl::StrCat("cuda: none (", StatusOf(error).message(), ")");
  }
  std::string description;
  for (int device = 0; device < devices; ++device) {
    if (device > 0) description += "\n";
    description += DescribeDevice(device);
  }
  return description;
}

absl::Status CheckDevice(int device) {
  const auto unusable = [device](absl::StatusCode code, const std::string& why) {
    return absl::Status(code, absl::StrCat("GPU ", device, " cannot be used: ", why));
  };
  const auto failed = [&](cudaError_t error, const char* what_to_do = "") {
    const absl::Status status = StatusOf(error);
    return unusable(IsForGood(error) ? absl::StatusCode::kInvalidArgument : status.code(),
                    absl::StrCat(status.message(), what_to_do));
  };
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return failed(error, driver > 0 ? ""
                                    : "; install one, or give the container the GPU (docker run "
                                      "--gpus all, nvidia.com/gpu among a pod's limits)");
  }
  if (device < 0 || device >= devices) {
    return unusable(absl::StatusCode::kInvalidArgument,
                    absl::StrCat("CUDA_VISIBLE_DEVICES and the driver show ", devices,
                                 ", counted from 0; name one of them"));
  }
  cudaDeviceProp properties;
  error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return failed(error);
  const absl::Status capable =
      cuda::CheckCapability(properties.name, properties.major, properties.minor);
  if (capable.ok()) return capable;
  return unusable(capable.code(), std::string(capable.message()));
}

}  // namespace signpost::kernels
