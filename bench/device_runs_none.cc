// MeasureOnDevice of a build without CUDA.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/device_runs.h"
#include "kernels/device.h"

namespace signpost::bench {

absl::StatusOr<std::vector<DeviceRun>> MeasureOnDevice(size_t, int, uint32_t) {
  return kernels::CheckDevice(0);
}

}  // namespace signpost::bench
