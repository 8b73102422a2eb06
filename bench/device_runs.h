// The CUDA kernels that steps are made of, timed by the device against copying as many bytes.

#ifndef SIGNPOST_BENCH_DEVICE_RUNS_H_
#define SIGNPOST_BENCH_DEVICE_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace signpost::bench {

struct DeviceRun {
  std::string name;
  double bytes_per_element = 0;      // that must be read and written, once each
  std::vector<double> seconds;       // of the kernel on `elements`
  std::vector<double> copy_seconds;  // each of a copy, in turns with it, that moves as many bytes
};

// On the first device, with seven arrays of `elements` floats, which all of them share, filled with
// random numbers before each. Compressing and applying are measured in one launch, and as a worker
// does it: one for each chunk of chunk_elements, a multiple of 4096.
// INVALID_ARGUMENT for more than 2^32 - 1 of them.
// UNAVAILABLE when there is no device, or this program was built without CUDA, with the reason and
// what to do; RESOURCE_EXHAUSTED when its memory is too small.
absl::StatusOr<std::vector<DeviceRun>> MeasureOnDevice(size_t elements, int rounds,
                                                       uint32_t chunk_elements);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_DEVICE_RUNS_H_
