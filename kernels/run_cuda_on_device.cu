// All memory that the tests take from the heap is the device's too (pinned, and at the same
// addresses), so that it finds their vectors where they are. Tests are skipped where there is no
// device.

#include <cuda_runtime.h>

#include <cstdio>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/device_heap.h"
#include "kernels/run_cuda.h"

namespace signpost::kernels::cuda {
namespace {

class Device final : public testing::Environment {
 public:
  void SetUp() override {
    std::puts(DescribeDevices().c_str());
    constexpr size_t kBytes = size_t{8} << 30;
    const absl::Status status = CheckDevice(0);
    if (!status.ok()) GTEST_SKIP() << "there is no device: " << status;
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, kBytes, cudaHostAllocMapped);
    ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    TakeMemoryFrom(memory, kBytes);
  }
};

const auto* const environment = testing::AddGlobalTestEnvironment(new Device);

// Waits for what was launched.
void Finish(const absl::Status& launched) {
  ASSERT_TRUE(launched.ok()) << launched;
  const cudaError_t error = cudaDeviceSynchronize();
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

template <class Segment, class Launch>
void OnDevice(const BlockRule& rule, const std::vector<Segment>& segments, Launch launch) {
  Finish(launch(rule, segments.data(), static_cast<uint32_t>(segments.size()),
                BlocksOf(rule, segments), /*stream=*/nullptr));
}

template <class Segment, class Launch>
uint32_t CompressOnDevice(const BlockRule& rule, const std::vector<Segment>& segments,
                          Launch launch) {
  const auto first = std::make_unique<uint32_t>(kAllPacked);
  Finish(launch(rule, segments.data(), static_cast<uint32_t>(segments.size()),
                BlocksOf(rule, segments), first.get(), /*stream=*/nullptr));
  return *first;
}

template <class Launch>
double SumOnDevice(absl::Span<const float> values, Launch launch) {
  std::vector<double> workspace(SumWorkspace(values.size()));
  const auto sum = std::make_unique<double>();
  Finish(launch(values.data(), values.size(), workspace.data(), sum.get(), /*stream=*/nullptr));
  return *sum;
}

}  // namespace

uint32_t RunCompressOneBit(const BlockRule& rule, const std::vector<CompressSegment>& segments) {
  return CompressOnDevice(rule, segments, CompressOneBit);
}
uint32_t RunCompressDense(const BlockRule& rule, const std::vector<DenseSegment>& segments) {
  return CompressOnDevice(rule, segments, CompressDense);
}
void RunApplyMomentum(const BlockRule& rule, const std::vector<ApplySegment>& segments) {
  OnDevice(rule, segments, ApplyMomentum);
}
void RunAddOneBit(const BlockRule& rule, const std::vector<AddSegment>& segments) {
  OnDevice(rule, segments, AddOneBit);
}
void RunAddDense(const BlockRule& rule, const std::vector<AddDenseSegment>& segments) {
  OnDevice(rule, segments, AddDense);
}
void RunScale(const BlockRule& rule, const std::vector<ScaleSegment>& segments) {
  OnDevice(rule, segments, Scale);
}
void RunAdamStep(const BlockRule& rule, const std::vector<AdamSegment<AdamRates>>& segments) {
  OnDevice(rule, segments, AdamStep);
}
void RunFreeze(const BlockRule& rule, const std::vector<AdamSegment<FreezeRates>>& segments) {
  OnDevice(rule, segments, Freeze);
}
void RunRefreshStep(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  OnDevice(rule, segments, RefreshStep);
}
void RunThaw(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  OnDevice(rule, segments, Thaw);
}

double RunSum(absl::Span<const float> values) {
  return SumOnDevice(values, [](auto... arguments) { return Sum(arguments...); });
}
double RunSumOfSquares(absl::Span<const float> values) {
  return SumOnDevice(values, [](auto... arguments) { return SumOfSquares(arguments...); });
}

}  // namespace signpost::kernels::cuda
