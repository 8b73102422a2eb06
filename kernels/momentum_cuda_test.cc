// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/momentum_cuda.h"

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/formulas.h"
#include "kernels/momentum.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

constexpr MomentumRates kRates = {/*beta1=*/0.9f, /*one_minus_beta1=*/0.1f};

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

TEST(MomentumCuda, MakesTheInputThatTheCpuDoes) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Guarded<float> gradient = random.Values(n), momentum = random.Values(n);
    Guarded<float> input(n), expected(n);
    kernels::MomentumInput(kRates, gradient.span(), momentum.data(), expected.span());
    RunMomentumInput(rule, {{.gradient = gradient.data(),
                             .momentum = momentum.data(),
                             .input = input.data(),
                             .rates = kRates,
                             .elements = static_cast<uint32_t>(n)}});
    EXPECT_TRUE(SameBytes(input, expected));
  });
}

// Halves of any bits but those of NaN and infinity.
TEST(MomentumCuda, GradientsOfTwoBytesAreWidenedExactly) {
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Guarded<float> momentum = random.Values(n);
    Guarded<uint16_t> narrow(n);
    Guarded<float> gradient(n);
    for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
      const std::vector<uint8_t> bytes = random.Bytes(2 * n);
      for (size_t i = 0; i < n; ++i) {
        const uint16_t half = (bytes[2 * i] | bytes[2 * i + 1] << 8) & 0xbfff;
        narrow.data()[i] = half;
        gradient.data()[i] = type == GradientType::kBfloat16 ? formulas::WidenBfloat16(half)
                                                             : formulas::WidenFloat16(half);
      }
      Guarded<float> input(n), expected(n);
      kernels::MomentumInput(kRates, gradient.span(), momentum.data(), expected.span());
      RunMomentumInput(rule, {{narrow.data(), type, momentum.data(), input.data(), kRates,
                               static_cast<uint32_t>(n)}});
      EXPECT_TRUE(SameBytes(input, expected));
    }
  });
}

TEST(MomentumCuda, NoGradientIsOneOfZeros) {
  Random random;
  const size_t n = 100;
  const std::vector<float> zeros(n), momentum = random.Values(n);
  std::vector<float> input(n), expected(n);
  kernels::MomentumInput(kRates, zeros, momentum.data(), absl::MakeSpan(expected));
  RunMomentumInput({64}, {{.momentum = momentum.data(),
                           .input = input.data(),
                           .rates = kRates,
                           .elements = static_cast<uint32_t>(n)}});
  EXPECT_TRUE(SameBytes<float>(input, expected));
}

TEST(MomentumCuda, AppliesAsTheCpuDoes) {
  constexpr UpdateRates kRates = {3e-4f, 0.01f, /*most_update=*/0.5f};
  Random random;
  ForEachShape([&](BlockRule rule, size_t n) {
    const Guarded<float> momentum = random.Values(n), inverse = random.PositiveValues(n);
    Guarded<float> x = random.Values(n), expected = x;
    kernels::ApplyDenseMomentum(momentum.span(), kRates, inverse.span(), expected.span());
    RunApplyDenseMomentum(
        rule, {{momentum.data(), inverse.data(), x.data(), kRates, static_cast<uint32_t>(n)}});
    EXPECT_TRUE(SameBytes(x, expected));
  });
}

}  // namespace
}  // namespace signpost::kernels::cuda
