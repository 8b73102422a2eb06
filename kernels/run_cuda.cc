#include "kernels/run_cuda.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kernels/sum_cuda.h"

namespace signpost::kernels::cuda {
namespace {

constexpr Stream kStream = nullptr;

// Waits for what was put on the stream.
void Finish(const absl::Status& put) {
  ASSERT_TRUE(put.ok()) << put;
  const absl::StatusOr<Owned<CUevent_st>> event = TestGpu().NewEvent();
  ASSERT_TRUE(event.ok()) << event.status();
  absl::Status status = TestGpu().Record(event->get(), kStream);
  status.Update(TestGpu().Await(event->get()));
  ASSERT_TRUE(status.ok()) << status;
}

// launch(segments, count, blocks) puts a kernel on the stream.
template <class Segment, class Launch>
void Run(const BlockRule& rule, const std::vector<Segment>& segments, Launch launch) {
  const Segment& last = segments.back();
  Finish(launch(segments.data(), static_cast<uint32_t>(segments.size()),
                last.first_block + BlockCount(last.elements, rule.block_elements)));
}

}  // namespace

uint32_t RunCompressOneBit(const BlockRule& rule, const std::vector<CompressSegment>& segments) {
  const auto first = std::make_unique<uint32_t>(kAllPacked);
  Run(rule, segments, [&](auto... arguments) {
    return TestGpu().CompressOneBit(rule, arguments..., first.get(), kStream);
  });
  return *first;
}

uint32_t RunCompressDense(const BlockRule& rule, const std::vector<DenseSegment>& segments) {
  const auto first = std::make_unique<uint32_t>(kAllPacked);
  Run(rule, segments, [&](auto... arguments) {
    return TestGpu().CompressDense(rule, arguments..., first.get(), kStream);
  });
  return *first;
}

uint32_t RunCompressQuantized(const BlockRule& rule, const std::vector<QuantizeSegment>& segments) {
  const auto first = std::make_unique<uint32_t>(kAllPacked);
  Run(rule, segments, [&](auto... arguments) {
    return TestGpu().CompressQuantized(rule, arguments..., first.get(), kStream);
  });
  return *first;
}

void RunMomentumInput(const BlockRule& rule, const std::vector<MomentumInputSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().MomentumInput(rule, arguments..., kStream); });
}

void RunApplyMomentum(const BlockRule& rule, const std::vector<ApplySegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().ApplyMomentum(rule, arguments..., kStream); });
}

void RunApplyDenseMomentum(const BlockRule& rule, const std::vector<ApplyDenseSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().ApplyDenseMomentum(rule, arguments..., kStream); });
}

void RunDecompressOneBit(const BlockRule& rule, const std::vector<DecompressSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().DecompressOneBit(rule, arguments..., kStream); });
}

void RunDecompressQuantized(const BlockRule& rule, const std::vector<DequantizeSegment>& segments) {
  Run(rule, segments, [&](auto... arguments) {
    return TestGpu().DecompressQuantized(rule, arguments..., kStream);
  });
}

void RunDecompressDense(const BlockRule& rule,
                        const std::vector<DecompressDenseSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().DecompressDense(rule, arguments..., kStream); });
}

void RunAggregateDense(const BlockRule& rule, const std::vector<AggregateDenseSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AggregateDense(rule, arguments..., kStream); });
}

void RunAddOneBit(const BlockRule& rule, const std::vector<AddSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AddOneBit(rule, arguments..., kStream); });
}

void RunAddQuantized(const BlockRule& rule, const std::vector<AddQuantizedSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AddQuantized(rule, arguments..., kStream); });
}

void RunAddDense(const BlockRule& rule, const std::vector<AddDenseSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AddDense(rule, arguments..., kStream); });
}

void RunScale(const BlockRule& rule, const std::vector<ScaleSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().Scale(rule, arguments..., kStream); });
}

void RunAdamStep(const BlockRule& rule, const std::vector<AdamSegment<AdamRates>>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AdamStep(rule, arguments..., kStream); });
}

void RunFreeze(const BlockRule& rule, const std::vector<AdamSegment<FreezeRates>>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().Freeze(rule, arguments..., kStream); });
}

void RunRefreshStep(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().RefreshStep(rule, arguments..., kStream); });
}

void RunThaw(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().Thaw(rule, arguments..., kStream); });
}

void RunUpdateMoments(const BlockRule& rule, const std::vector<LambSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().UpdateMoments(rule, arguments..., kStream); });
}

void RunLambStep(const BlockRule& rule, const std::vector<LambSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().LambStep(rule, arguments..., kStream); });
}

void RunFloorVariance(const BlockRule& rule, const std::vector<FloorSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().FloorVariance(rule, arguments..., kStream); });
}

void RunFollowMomentum(const BlockRule& rule, const std::vector<FollowSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().FollowMomentum(rule, arguments..., kStream); });
}

void RunAdaptiveStep(const BlockRule& rule, const std::vector<AdaptiveSegment>& segments) {
  Run(rule, segments,
      [&](auto... arguments) { return TestGpu().AdaptiveStep(rule, arguments..., kStream); });
}

uint32_t RunLocalStep(const BlockRule& rule, const std::vector<LocalSegment>& segments) {
  const auto first = std::make_unique<uint32_t>(kAllPacked);
  Run(rule, segments, [&](auto... arguments) {
    return TestGpu().LocalStep(rule, arguments..., first.get(), kStream);
  });
  return *first;
}

double RunSum(absl::Span<const float> values) {
  std::vector<double> workspace(SumWorkspace(values.size()));
  const auto sum = std::make_unique<double>();
  Finish(TestGpu().Sum(values.data(), values.size(), workspace.data(), sum.get(), kStream));
  return *sum;
}

double RunSumOfSquares(absl::Span<const float> values) {
  std::vector<double> workspace(SumWorkspace(values.size()));
  const auto sum = std::make_unique<double>();
  Finish(
      TestGpu().SumOfSquares(values.data(), values.size(), workspace.data(), sum.get(), kStream));
  return *sum;
}

}  // namespace signpost::kernels::cuda
