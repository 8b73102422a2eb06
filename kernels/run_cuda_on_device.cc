// All memory that the tests take from the heap is pinned, which the device reaches at the same
// addresses, so that it finds their vectors where they are. Tests are skipped where there is no
// device.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/device_heap.h"
#include "kernels/run_cuda.h"

namespace signpost::kernels::cuda {
namespace {

// To the end of the process, as the heap is on it.
Gpu* gpu = nullptr;

class Device final : public testing::Environment {
 public:
  void SetUp() override {
    std::puts(DescribeDevices().c_str());
    if (absl::Status status = CheckDevice(0); !status.ok()) {
      GTEST_SKIP() << "there is no device: " << status;
    }
    absl::StatusOr<std::unique_ptr<Gpu>> opened = OpenGpu(0);
    ASSERT_TRUE(opened.ok()) << opened.status();
    gpu = opened->release();
    constexpr size_t kBytes = size_t{1} << 30;
    absl::StatusOr<Owned<uint8_t>> memory = gpu->AllocatePinned(kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    TakeMemoryFrom(memory->release(), kBytes);
  }
};

const auto* const environment = testing::AddGlobalTestEnvironment(new Device);

}  // namespace

Gpu& TestGpu() { return *gpu; }

}  // namespace signpost::kernels::cuda
