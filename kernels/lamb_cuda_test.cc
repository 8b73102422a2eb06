// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/lamb_cuda.h"

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/lamb.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

// body(rule, n, blocks)
template <class Body>
void ForEachShape(Body body) {
  for (const size_t block : kBlocks) {
    for (const size_t n : LengthsInBlocks(block)) {
      for (const bool is_aligned : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << n << " elements in blocks of " << block << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        body(BlockRule{block}, n, BlockCount(n, block));
      }
    }
  }
}

void ExpectSame(const std::vector<LambSums>& ours, const std::vector<LambSums>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(ours[i].numerator, expected[i].numerator) << "block " << i;
    ASSERT_EQ(ours[i].update, expected[i].update) << "block " << i;
    ASSERT_EQ(ours[i].least_quotient, expected[i].least_quotient) << "block " << i;
  }
}

TEST(LambCuda, StepsAsTheCpuDoes) {
  const LambRates rates = {0.9f, 0.1f, 0.999f, 0.001f, 1.2f, 1.7f, 1e-8f, 1e-2f};
  Random random;
  for (const DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
    ForEachShape([&](const BlockRule& rule, size_t n, size_t blocks) {
      Guarded<float> gradient(n);  // a payload of `type`
      auto* const payload = reinterpret_cast<uint8_t*>(gradient.data());
      std::vector<float> lost(n);
      kernels::CompressDense(BlockRule(), type, random.Values(n), absl::MakeSpan(lost), payload);
      Guarded<float> m = random.Values(n), v = random.PositiveValues(n), x = random.Values(n);
      Guarded<float> our_m = m, our_v = v, our_x = x;
      std::vector<LambSums> sums(blocks), our_sums(blocks);
      const std::vector<LambSegment> segments = {{rates, 0.01f, payload, type, our_m.data(),
                                                  our_v.data(), our_x.data(), our_sums.data(),
                                                  static_cast<uint32_t>(n), 0}};
      kernels::UpdateMoments(rule, rates, type, payload, m.span(), v.span(), x.span(), sums.data());
      RunUpdateMoments(rule, segments);
      EXPECT_TRUE(SameBytes(our_x, x)) << "the second half moves them";
      ExpectSame(our_sums, sums);
      kernels::LambStep(rates, 0.01f, m.span(), v.span(), x.span());
      RunLambStep(rule, segments);
      EXPECT_TRUE(SameBytes(our_m, m));
      EXPECT_TRUE(SameBytes(our_v, v));
      EXPECT_TRUE(SameBytes(our_x, x));
    });
  }
}

TEST(LambCuda, BeginsAFreshVarianceAsTheCpuDoes) {
  const FreezeRates rates = {1.1f, 1.3f, 1e-9f, 1e-8f};
  Random random;
  ForEachShape([&](const BlockRule& rule, size_t n, size_t) {
    const Guarded<float> variance = random.PositiveValues(n);
    Guarded<float> fresh(n), ours(n);
    kernels::FloorVariance(rates, variance.span(), fresh.span());
    RunFloorVariance(rule, {{rates, variance.data(), ours.data(), static_cast<uint32_t>(n), 0}});
    EXPECT_TRUE(SameBytes(ours, fresh));
  });
}

TEST(LambCuda, FollowsAMomentumAsTheCpuDoes) {
  const FreshRates rates = {0.9f, 10, 0.999f, 0.001f, 1e-8f, 1e-2f};
  Random random;
  ForEachShape([&](const BlockRule& rule, size_t n, size_t blocks) {
    const Guarded<float> scales[] = {random.PositiveValues(blocks), random.PositiveValues(blocks)};
    const Guarded<uint8_t> bits[] = {random.Bytes(SignBytes(n)), random.Bytes(SignBytes(n))};
    const OneBitView momentum = {scales[0].data(), bits[0].data()};
    const OneBitView before = {scales[1].data(), bits[1].data()};
    const Guarded<float> dense = random.Values(n), dense_before = random.Values(n);
    const Guarded<float> d = random.PositiveValues(n), x = random.Values(n);
    const Guarded<float> fresh_before = random.PositiveValues(n);
    enum class Forms { kOneBit, kOneBitAfterDense, kDense };
    for (const Forms forms : {Forms::kOneBit, Forms::kOneBitAfterDense, Forms::kDense}) {
      Guarded<float> fresh = fresh_before, our_fresh = fresh_before;
      Guarded<float> replaced = dense_before, our_replaced = dense_before;
      std::vector<LambSums> sums(blocks), our_sums(blocks);
      FollowSegment segment = {.rates = rates,
                               .inverse_denominator = d.data(),
                               .fresh_variance = our_fresh.data(),
                               .parameters = x.data(),
                               .sums = our_sums.data(),
                               .elements = static_cast<uint32_t>(n)};
      if (forms == Forms::kDense) {
        segment.dense_momentum = dense.data();
        segment.dense_momentum_before = our_replaced.data();
        kernels::FollowMomentum(rule, rates, dense.data(), replaced.span(), d.span(), fresh.span(),
                                x.span(), sums.data());
      } else if (forms == Forms::kOneBitAfterDense) {
        segment.momentum = momentum;
        segment.dense_momentum_before = our_replaced.data();
        kernels::FollowMomentum(rule, rates, momentum, dense_before.data(), d.span(), fresh.span(),
                                x.span(), sums.data());
      } else {
        segment.momentum = momentum;
        segment.momentum_before = before;
        kernels::FollowMomentum(rule, rates, momentum, before, d.span(), fresh.span(), x.span(),
                                sums.data());
      }
      RunFollowMomentum(rule, {segment});
      EXPECT_TRUE(SameBytes(our_fresh, fresh));
      EXPECT_TRUE(SameBytes(our_replaced, replaced));
      ExpectSame(our_sums, sums);
    }
  });
}

}  // namespace
}  // namespace signpost::kernels::cuda
