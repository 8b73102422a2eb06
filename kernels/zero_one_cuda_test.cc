// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/zero_one_cuda.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/formulas.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"
#include "kernels/zero_one.h"

namespace signpost::kernels::cuda {
namespace {

// body(rule, n)
template <class Body>
void ForEachShape(Body body) {
  for (const size_t block : kBlocks) {
    for (const size_t n : LengthsInBlocks(block)) {
      for (const bool is_aligned : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << n << " elements in blocks of " << block << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        body(BlockRule{block}, n);
      }
    }
  }
}

constexpr AdaptiveRates kAdaptiveRates = {.beta1 = 0.9f,
                                          .one_minus_beta1 = 0.1f,
                                          .kept_variance = 0.984f,
                                          .one_minus_kept_variance = 0.016f,
                                          .step_size = 3e-3f,
                                          .inverse_sqrt_correction2 = 1.7f,
                                          .floor = 1e-6f,
                                          .epsilon = 1e-8f,
                                          .decay = 1e-5f,
                                          .updates_variance = true};

TEST(ZeroOneCuda, AdaptiveStepsAreTheCpus) {
  Random random;
  for (const auto& [updates, lifts_zeros] :
       std::vector<std::pair<bool, bool>>{{true, false}, {false, false}, {false, true}}) {
    AdaptiveRates rates = kAdaptiveRates;
    rates.updates_variance = updates;
    rates.lifts_zeros = lifts_zeros;
    for (const DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
      ForEachShape([&](BlockRule rule, size_t n) {
        Guarded<float> gradient(n);  // a payload of `type`
        auto* const payload = reinterpret_cast<uint8_t*>(gradient.data());
        std::vector<float> lost(n);
        kernels::CompressDense(BlockRule(), type, random.Values(n), absl::MakeSpan(lost), payload);
        Guarded<float> m = random.Values(n), v = random.PositiveValues(n), x = random.Values(n);
        if (n > 0) v.data()[n / 2] = 0;
        Guarded<float> our_m = m, our_v = v, our_x = x;
        kernels::AdaptiveStep(rates, type, payload, m.span(), v.span(), x.span());
        RunAdaptiveStep(rule, {{rates, payload, type, our_m.data(), our_v.data(), our_x.data(),
                                static_cast<uint32_t>(n)}});
        EXPECT_TRUE(SameBytes(our_m, m));
        EXPECT_TRUE(SameBytes(our_v, v));
        EXPECT_TRUE(SameBytes(our_x, x));
      });
    }
  }
}

constexpr LocalRates kLocalRates = {.beta1 = 0.9f,
                                    .one_minus_beta1 = 0.1f,
                                    .learning_rate = 3e-4f,
                                    .weight_decay = 0.01f,
                                    .most_update = 0.5f};

// What a local step reads and writes of a span.
struct LocalState {
  LocalState(size_t n, Random& random)
      : momentum(random.Values(n)),
        accumulated(random.Values(n)),
        inverse_denominator(random.PositiveValues(n)),
        parameters(random.Values(n)) {}

  // On the CPU; returns what RunLocalStep does.
  uint32_t Step(const BlockRule& rule, const LocalRates& rates, absl::Span<const float> gradient) {
    const size_t first =
        kernels::LocalStep(rule, rates, gradient, momentum.span(), accumulated.span(),
                           inverse_denominator.span(), parameters.span());
    const bool is_none = first == BlockCount(gradient.size(), rule.block_elements);
    return is_none ? kAllPacked : static_cast<uint32_t>(first);
  }

  LocalSegment Segment(const LocalRates& rates, const void* gradient, GradientType type) {
    return {rates,
            gradient,
            type,
            momentum.data(),
            accumulated.data(),
            inverse_denominator.data(),
            parameters.data(),
            static_cast<uint32_t>(momentum.span().size())};
  }

  void ExpectSame(const LocalState& expected) const {
    EXPECT_TRUE(SameBytes(momentum, expected.momentum));
    EXPECT_TRUE(SameBytes(accumulated, expected.accumulated));
    EXPECT_TRUE(SameBytes(parameters, expected.parameters));
  }

  Guarded<float> momentum, accumulated, inverse_denominator, parameters;
};

TEST(ZeroOneCuda, LocalStepsAreTheCpusAndLeaveTheSameBlocksAlone) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Guarded<float> gradient = random.Gradient(n, rule);
    LocalState ours(n, random), expected = ours;
    const uint32_t first = expected.Step(rule, kLocalRates, gradient.span());
    EXPECT_EQ(
        RunLocalStep(rule, {ours.Segment(kLocalRates, gradient.data(), GradientType::kFloat32)}),
        first);
    ours.ExpectSame(expected);
  });
}

// Infinity, which rounding to fp16 would clip, stays.
uint16_t Narrow(GradientType type, float value) {
  if (type == GradientType::kBfloat16) return formulas::RoundToBfloat16(value);
  if (std::isinf(value)) return value > 0 ? 0x7c00 : 0xfc00;
  return formulas::RoundToFloat16(value);
}

TEST(ZeroOneCuda, GradientsOfTwoBytesAreWidenedExactly) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
      const std::vector<float> values = random.Gradient(n, rule);
      Guarded<uint16_t> narrow(n);
      std::vector<float> widened(n);
      for (size_t i = 0; i < n; ++i) {
        const uint16_t half = Narrow(type, values[i]);
        narrow.data()[i] = half;
        widened[i] = type == GradientType::kBfloat16 ? formulas::WidenBfloat16(half)
                                                     : formulas::WidenFloat16(half);
      }
      LocalState ours(n, random), expected = ours;
      const uint32_t first = expected.Step(rule, kLocalRates, widened);
      EXPECT_EQ(RunLocalStep(rule, {ours.Segment(kLocalRates, narrow.data(), type)}), first);
      ours.ExpectSame(expected);
    }
  });
}

// Each with rates of its own; the first has no gradient, the second no parameters.
TEST(ZeroOneCuda, SegmentsMayLackAGradientOrParameters) {
  const BlockRule rule{64};
  const LocalRates others = {0.8f, 0.2f, 1e-2f, 0.1f};
  const size_t n = 100;
  Random random;
  const std::vector<float> zeros(n), gradient = random.Values(n);
  LocalState first(n, random), expected_first = first;
  LocalState second(n, random), expected_second = second;
  LocalState third(n, random), expected_third = third;
  expected_first.Step(rule, kLocalRates, zeros);
  kernels::LocalStep(rule, others, gradient, expected_second.momentum.span(),
                     expected_second.accumulated.span(), {}, {});
  expected_third.Step(rule, kLocalRates, gradient);

  LocalSegment of_second = second.Segment(others, gradient.data(), GradientType::kFloat32);
  of_second.inverse_denominator = of_second.parameters = nullptr;
  of_second.first_block = 2;
  LocalSegment of_third = third.Segment(kLocalRates, gradient.data(), GradientType::kFloat32);
  of_third.first_block = 4;
  EXPECT_EQ(RunLocalStep(rule, {first.Segment(kLocalRates, nullptr, GradientType::kFloat32),
                                of_second, of_third}),
            kAllPacked);
  first.ExpectSame(expected_first);
  second.ExpectSame(expected_second);
  third.ExpectSame(expected_third);
}

TEST(ZeroOneCuda, BlocksThatAreLeftAloneCountOverAllSegments) {
  const BlockRule rule{64};
  Random random;
  const std::vector<float> fine = random.Values(100);
  std::vector<float> spoilt = fine;
  spoilt[99] = std::numeric_limits<float>::infinity();
  LocalState first(100, random), second(100, random), third(100, random);
  LocalSegment of_second = second.Segment(kLocalRates, spoilt.data(), GradientType::kFloat32);
  of_second.first_block = 2;
  LocalSegment of_third = third.Segment(kLocalRates, spoilt.data(), GradientType::kFloat32);
  of_third.first_block = 4;
  EXPECT_EQ(RunLocalStep(rule, {first.Segment(kLocalRates, fine.data(), GradientType::kFloat32),
                                of_second, of_third}),
            3u);
}

}  // namespace
}  // namespace signpost::kernels::cuda
