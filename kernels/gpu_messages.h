// What any Gpu says, be it a real or a simulated one.

#ifndef SIGNPOST_KERNELS_GPU_MESSAGES_H_
#define SIGNPOST_KERNELS_GPU_MESSAGES_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace signpost::kernels::cuda {

// INVALID_ARGUMENT, for memory that is not the GPU's. `place` is where it is: "the host's memory".
absl::Status NotHereError(absl::string_view gpu, absl::string_view place);

// RESOURCE_EXHAUSTED, all of these; the sizes are in bytes.
absl::Status NoRoomError(absl::string_view gpu, size_t wanted, size_t free, size_t total);
absl::Status NoPinnedRoomError(absl::string_view gpu, size_t wanted);
absl::Status NotPinnedError(absl::string_view gpu, size_t wanted, absl::string_view why);

// FAILED_PRECONDITION.
absl::Status NotSharedError(absl::string_view gpu, absl::string_view why);

// INVALID_ARGUMENT.
absl::Status NotExportedError();

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_GPU_MESSAGES_H_
