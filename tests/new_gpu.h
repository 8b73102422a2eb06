// The GPU of tests that are compiled twice: a simulated one, or with SIGNPOST_REAL_GPU a real one,
// where there is one.

#ifndef SIGNPOST_TESTS_NEW_GPU_H_
#define SIGNPOST_TESTS_NEW_GPU_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#ifndef SIGNPOST_REAL_GPU
#include "kernels/simulated_gpu.h"
#endif

namespace signpost::testing {

// Null where there is none.
inline std::unique_ptr<kernels::cuda::Gpu> NewGpu() {
#ifdef SIGNPOST_REAL_GPU
  absl::StatusOr<std::unique_ptr<kernels::cuda::Gpu>> gpu = kernels::cuda::OpenGpu(0);
  if (gpu.ok()) return *std::move(gpu);
  std::printf("there is no device: %s\n", std::string(gpu.status().message()).c_str());
  return nullptr;
#else
  static uint32_t seed = 0;
  return std::make_unique<kernels::cuda::SimulatedGpu>(++seed);
#endif
}

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_NEW_GPU_H_
