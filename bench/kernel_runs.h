// Every kernel on arrays of its own, for whoever measures them.

#ifndef SIGNPOST_BENCH_KERNEL_RUNS_H_
#define SIGNPOST_BENCH_KERNEL_RUNS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "bench/traffic.h"

namespace signpost::bench {

struct KernelRun {
  std::string name;
  Streams streams;            // what must be read and written; scales do not count
  std::function<void()> run;  // as often as one likes
};

// Runs on arrays of `elements` with the same contents each time. They share the arrays, about 60
// bytes per element, and keep them.
std::vector<KernelRun> MakeKernelRuns(size_t elements);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_KERNEL_RUNS_H_
