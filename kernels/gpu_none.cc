// GPUs of a build without CUDA.

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "kernels/gpu.h"

namespace signpost::kernels::cuda {

// Weak, because tests have others (open_simulated_gpu.cc).
__attribute__((weak)) bool CanOpenGpus() { return false; }

__attribute__((weak)) absl::StatusOr<std::unique_ptr<Gpu>> OpenGpu(int device, absl::string_view) {
  return CheckDevice(device);
}

}  // namespace signpost::kernels::cuda
