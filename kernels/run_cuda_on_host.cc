#include "kernels/run_cuda.h"
#include "kernels/simulated_gpu.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {

Gpu& TestGpu() {
  static SimulatedGpu gpu(TestSeed());
  gpu.LetKernelsUseAllMemory();
  return gpu;
}

}  // namespace signpost::kernels::cuda
