// The CUDA kernels that a program has, so that they can be loaded before there is work for them.
//
// CUDA loads a kernel when it is first launched, which may take memory and wait for all that the
// GPU does: the freeze step's hundreds of steps after the first, unless they are loaded by then.

#ifndef SIGNPOST_KERNELS_KERNEL_LIST_CUDA_H_
#define SIGNPOST_KERNELS_KERNEL_LIST_CUDA_H_

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "kernels/error_cuda.h"

namespace signpost::kernels::cuda {

// One kernel in the list of all. There are only static ones, which enter it before main, or when a
// library is loaded; it does not change from then on.
class ListedKernel {
 public:
  explicit ListedKernel(const void* kernel) : kernel_(kernel), next_(last_) { last_ = this; }
  ListedKernel(const ListedKernel&) = delete;
  ListedKernel& operator=(const ListedKernel&) = delete;

  const void* kernel() const { return kernel_; }

  // Loads all of them on the thread's device. UNAVAILABLE and RESOURCE_EXHAUSTED, as a launch;
  // INVALID_ARGUMENT when the driver cannot make machine code of them for it.
  static absl::Status LoadAll() {
    for (const ListedKernel* listed = last_; listed != nullptr; listed = listed->next_) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, listed->kernel_);
      if (error != cudaSuccess) return StatusOf(error);
    }
    return absl::OkStatus();
  }

 private:
  static inline const ListedKernel* last_ = nullptr;

  const void* const kernel_;
  const ListedKernel* const next_;
};

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_KERNEL_LIST_CUDA_H_
