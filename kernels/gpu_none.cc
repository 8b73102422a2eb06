// OpenGpu of a build without CUDA.

#include "kernels/device.h"
#include "kernels/gpu.h"

namespace signpost::kernels::cuda {

absl::StatusOr<std::unique_ptr<Gpu>> OpenGpu(int device) { return CheckDevice(device); }

}  // namespace signpost::kernels::cuda
