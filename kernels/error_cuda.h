// What CUDA's errors mean.

#ifndef SIGNPOST_KERNELS_ERROR_CUDA_H_
#define SIGNPOST_KERNELS_ERROR_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/gpu_messages.h"

namespace signpost::kernels::cuda {

// What happened, and what to do about it.
inline std::string Explain(cudaError_t error) {
  int driver = 0;
  switch (error) {
    case cudaErrorInsufficientDriver:
      cudaDriverGetVersion(&driver);
      return ExplainInsufficientDriver(driver, CUDART_VERSION);
    case cudaErrorNoDevice:
      return "the driver sees no GPU; is CUDA_VISIBLE_DEVICES right?";
    case cudaErrorMemoryAllocation:
      return absl::StrCat(cudaGetErrorString(error),
                          " on the GPU; nvidia-smi shows what runs there");
    case cudaErrorUnsupportedPtxVersion:
      cudaDriverGetVersion(&driver);
      return ExplainUnsupportedPtx(driver, CUDART_VERSION);
    case cudaErrorNoKernelImageForDevice:
      return ExplainNoKernelImage(cudaGetErrorString(error));
    // After these the process cannot use the GPU any more. Any kernel of the process may have done
    // it, training's too.
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMisalignedAddress:
      return absl::StrCat(cudaGetErrorString(error),
                          " (in some kernel of the same process: CUDA_LAUNCH_BLOCKING=1 or "
                          "compute-sanitizer shows in which)");
    default:
      return cudaGetErrorString(error);
  }
}

// Of what a function has returned. Otherwise the next launch on this thread would take it for its
// own.
inline absl::Status StatusOf(cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string why = Explain(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(why);
    // Until somebody changes the machine, or the program: as CheckDevice's.
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNoKernelImageForDevice:
      return absl::InvalidArgumentError(why);
    default:
      return absl::UnavailableError(why);
  }
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ERROR_CUDA_H_
