// Runs each kernel, on arrays of so many elements, for a program that counts instructions: the
// calls of CountedRun are those whose names are printed. On AVX2, which valgrind knows too.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "bench/kernel_runs.h"
#include "hwy/nanobenchmark.h"
#include "kernels/target.h"

// Highway's library calls it when it is loaded, and its own reads RDTSCP, which valgrind does not
// know where the processor does not say that it has it, as in some virtual machines.
uint64_t hwy::platform::TimerResolution() { return 1; }

namespace signpost::bench {

extern "C" [[gnu::noinline]] void CountedRun(const KernelRun& kernel) { kernel.run(); }

void RunKernels(size_t elements) {
  kernels::UseTarget(kernels::Target::kAvx2);
  for (const KernelRun& kernel : MakeKernelRuns(elements)) {
    kernel.run();  // resolves the symbols that it needs
    CountedRun(kernel);
    std::cout << kernel.name << std::endl;
  }
}

}  // namespace signpost::bench

int main(int argc, char** argv) {
  if (argc != 2) return EXIT_FAILURE;
  signpost::bench::RunKernels(std::strtoul(argv[1], nullptr, 10));
}
