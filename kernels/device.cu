// DescribeDevices of a build with CUDA.

#include <cuda_runtime.h>

#include <string>

#include "kernels/device.h"

namespace signpost::kernels {
namespace {

std::string Error(cudaError_t error) { return std::string("(") + cudaGetErrorString(error) + ")"; }

std::string DescribeDevice(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return "cuda: device " + std::to_string(device) + " " + Error(error);
  return std::string("cuda: ") + properties.name + ", " +
         std::to_string(properties.totalGlobalMem >> 30) + " GiB, compute " +
         std::to_string(properties.major) + "." + std::to_string(properties.minor);
}

}  // namespace

std::string DescribeDevices() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return "cuda: none " + Error(error);
  std::string description;
  for (int device = 0; device < devices; ++device) {
    if (device > 0) description += "\n";
    description += DescribeDevice(device);
  }
  return description;
}

}  // namespace signpost::kernels
