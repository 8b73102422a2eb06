// For tests: an OpenGpu, and a CanOpenGpus, that take the place of the others, and simulate GPUs 0
// and 1. All memory of the host's is theirs, so that PyTorch's tensors can play at being on a GPU.
// With SIMULATED_FAULT_OF_WORKER=N, that of a node's worker fails after N operations.

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/simulated_gpu.h"

namespace signpost::kernels::cuda {

bool CanOpenGpus() { return true; }

absl::StatusOr<std::unique_ptr<Gpu>> OpenGpu(int device, absl::string_view whose) {
  if (device > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("GPU ", device, " cannot be used: 2 GPUs are simulated"));
  }
  auto gpu = std::make_unique<SimulatedGpu>(/*seed=*/device);
  gpu->AppendToName(whose);
  const char* const fault = std::getenv("SIMULATED_FAULT_OF_WORKER");  // a number
  uint64_t operations;
  if (fault != nullptr && !whose.empty() && absl::SimpleAtoi(fault, &operations)) {
    gpu->FailOperationAfter(operations);
  }
  gpu->OwnAllMemory();
  return gpu;
}

}  // namespace signpost::kernels::cuda

// For programs that use the library: all that was put on such GPUs is done when it returns.
extern "C" __attribute__((visibility("default"))) void signpost_finish_simulated_gpus() {
  signpost::kernels::cuda::SimulatedGpu::FinishAll();
}
