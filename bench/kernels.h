// How fast the kernels go through memory, each against the same machine in the same seconds.

#ifndef SIGNPOST_BENCH_KERNELS_H_
#define SIGNPOST_BENCH_KERNELS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/figures.pb.h"
#include "kernels/target.h"

namespace signpost::bench {

struct KernelsOptions {
  size_t elements = size_t{16} << 20;  // of each array: by default far more than caches hold
  int rounds = 15;                     // timed, after one that is not
  kernels::Target target = kernels::SupportedTargets().back();
};

constexpr int kBytesPerElement = 90;

// For each kernel a figure in GB/s, then each once more in Gelem/s. Bytes are those that must be
// read and written, once each; scales do not count. The bound is what one core moves when it
// changes as many bytes in place, in turns with the kernel; kernels that mostly read may go beyond
// it. The peer, which takes turns too, is a loop that reads, changes and writes the same arrays and
// computes nothing: 1 would be all that memory allows.
//
// Runs on the calling thread, whose time on a core is what counts, and puts other kernels of the
// process on `target` meanwhile. Takes up to kBytesPerElement of memory for each element and, with
// the defaults, half a minute.
Figures MeasureKernels(const KernelsOptions& options);

// RESOURCE_EXHAUSTED when there is less memory than that here.
absl::Status CheckMemory(const KernelsOptions& options);

// The same of the CUDA kernels on the first device, timed by the device. The bound is a copy within
// its memory that moves as many bytes, in turns with the kernel. Errors as MeasureOnDevice.
struct DeviceKernelsOptions {
  size_t elements = 100'000'000;
  int rounds = 15;
};
absl::StatusOr<Figures> MeasureDeviceKernels(const DeviceKernelsOptions& options);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_KERNELS_H_
