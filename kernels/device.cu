// The functions of device.h in a build with CUDA.

#include "kernels/device.h"

#include <cuda_runtime.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace signpost::kernels {
namespace {

constexpr int kLeastMajor = 8;  // Ampere: what nvcc_object compiles for

// "12.4", as CUDA counts them.
std::string Version(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// Why there is no device, and what to do.
std::string Explain(cudaError_t error) {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  switch (error) {
    case cudaErrorInsufficientDriver:
      if (driver == 0) return "no NVIDIA driver is installed";
      return absl::StrCat("the NVIDIA driver is for CUDA up to ", Version(driver),
                          " and this program needs ", Version(CUDART_VERSION),
                          "; install a newer driver");
    case cudaErrorNoDevice:
      return "the driver sees no GPU; is CUDA_VISIBLE_DEVICES right?";
    default:
      return cudaGetErrorString(error);
  }
}

std::string DescribeDevice(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return absl::StrCat("cuda: device ", device, " (", Explain(error), ")");
  return absl::StrCat("cuda: ", properties.name, ", ", properties.totalGlobalMem >> 30,
                      " GiB, compute ", properties.major, ".", properties.minor);
}

}  // namespace

std::string DescribeDevices() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return absl::StrCat("cuda: none (", Explain(error), ")");
  std::string description;
  for (int device = 0; device < devices; ++device) {
    if (device > 0) description += "\n";
    description += DescribeDevice(device);
  }
  return description;
}

absl::Status CheckDevice(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("GPU ", device, " cannot be used: ", Explain(error)));
  }
  if (properties.major >= kLeastMajor) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "GPU ", device, ", ", properties.name, ", has compute capability ", properties.major, ".",
      properties.minor, ", and this program is for ", kLeastMajor, ".0 (Ampere) and later"));
}

}  // namespace signpost::kernels
