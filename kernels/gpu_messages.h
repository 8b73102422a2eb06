// What any Gpu says, be it a real or a simulated one, and why a real one cannot be used.

#ifndef SIGNPOST_KERNELS_GPU_MESSAGES_H_
#define SIGNPOST_KERNELS_GPU_MESSAGES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace signpost::kernels::cuda {

// INVALID_ARGUMENT, for memory that is not the GPU's. `place` is where it is: "the host's memory".
absl::Status NotHereError(absl::string_view gpu, absl::string_view place);
// INVALID_ARGUMENT, for a stream that is not the GPU's. `whose` it is: "one of GPU 1".
absl::Status NotOursError(absl::string_view gpu, absl::string_view whose);

// RESOURCE_EXHAUSTED, all of these; the sizes are in bytes.
absl::Status NoRoomError(absl::string_view gpu, size_t wanted, size_t free, size_t total);
absl::Status NotPinnedError(absl::string_view gpu, size_t wanted, absl::string_view why);

// FAILED_PRECONDITION.
absl::Status NotSharedError(absl::string_view gpu, absl::string_view why);

// INVALID_ARGUMENT.
absl::Status NotExportedError();

// INVALID_ARGUMENT for a GPU of a compute capability that the kernels are not compiled for.
absl::Status CheckCapability(absl::string_view gpu, int major, int minor);

// What an error of CUDA's means, and what to do about it. Versions are as CUDA counts them, 12040
// for 12.4: which CUDA the driver is for, 0 if there is none, and with which this was built.
std::string ExplainInsufficientDriver(int driver, int built_with);
std::string ExplainUnsupportedPtx(int driver, int built_with);
std::string ExplainNoKernelImage(absl::string_view error);  // in CUDA's words

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_GPU_MESSAGES_H_
