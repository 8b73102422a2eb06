#include "kernels/momentum.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/every_target.h"
#include "kernels/onebit.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MomentumRates kRates = {/*beta1=*/0.9f, /*one_minus_beta1=*/0.1f};

TEST(Momentum, InputAndUseGiveTheNumbersComputedByHand) {
  // 0.5 * 2 + 0.25 * 8 = 3, and 8 - 0.5 * (3 * 2 + 0.25 * 8) = 4. Without a variance there is only
  // decay: 8 - 0.5 * (0.25 * 8) = 7.
  const MomentumRates rates = {.beta1 = 0.5f, .one_minus_beta1 = 0.25f};
  const Values gradient = {8, 8}, momentum = {2, 2};
  OnEveryTarget([&] {
    Values input(2), x = {8, 8};
    MomentumInput(rates, gradient, momentum.data(), absl::MakeSpan(input));
    EXPECT_EQ(input, (Values{3, 3}));
    ApplyDenseMomentum(input, {.learning_rate = 0.5f, .weight_decay = 0.25f}, Values{2, 0},
                       absl::MakeSpan(x));
    EXPECT_EQ(x, (Values{4, 7}));
  });
}

TEST(Momentum, InputMatchesTheModel) {
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    const Values gradient = random.Values(n), momentum = random.Values(n);
    Values expected(n);
    for (size_t i = 0; i < n; ++i) {
      const float kept = kRates.beta1 * momentum[i];
      const float added = kRates.one_minus_beta1 * gradient[i];
      expected[i] = kept + added;
    }
    const Guarded<float> g = gradient, m = momentum;
    OnEveryTarget([&] {
      Guarded<float> input = Values(n, kNan);
      MomentumInput(kRates, g.span(), m.data(), input.span());
      EXPECT_TRUE(SameBytes(input, expected));
    });
  }
}

// What is compressed after that, with an error, is what CompressMomentum compresses.
TEST(Momentum, InputIsTheFirstPartOfCompressMomentum) {
  Random random;
  const size_t n = 12389, blocks = BlockCount(n, BlockRule().block_elements);
  const Values gradient = random.Values(n), momentum = random.Values(n);
  const Values error = random.Values(n);
  OnEveryTarget([&] {
    Values in_one = error, in_two = error, input(n);
    Values scales_of_one(blocks), scales_of_two(blocks);
    std::vector<uint8_t> bits_of_one(SignBytes(n)), bits_of_two(SignBytes(n));
    CompressMomentum(BlockRule(), kRates, gradient, momentum.data(), absl::MakeSpan(in_one),
                     {scales_of_one.data(), bits_of_one.data()});
    MomentumInput(kRates, gradient, momentum.data(), absl::MakeSpan(input));
    CompressOneBit(BlockRule(), input, absl::MakeSpan(in_two),
                   {scales_of_two.data(), bits_of_two.data()});
    EXPECT_TRUE(SameBytes<float>(in_two, in_one));
    EXPECT_TRUE(SameBytes<float>(scales_of_two, scales_of_one));
    EXPECT_TRUE(SameBytes<uint8_t>(bits_of_two, bits_of_one));
  });
}

TEST(Momentum, AppliedMomentumMatchesTheModel) {
  constexpr UpdateRates kRates = {3e-4f, 0.01f, /*most_update=*/0.5f};
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    const Values momentum = random.Values(n), inverse = random.PositiveValues(n);
    const Values parameters = random.Values(n);
    Values expected(n);
    for (size_t i = 0; i < n; ++i) {
      const float followed =
          std::clamp(momentum[i] * inverse[i], -kRates.most_update, kRates.most_update);
      const float decay = kRates.weight_decay * parameters[i];
      const float direction = followed + decay;
      const float step = kRates.learning_rate * direction;
      expected[i] = parameters[i] - step;
    }
    const Guarded<float> m = momentum, d = inverse;
    OnEveryTarget([&] {
      Guarded<float> x = parameters;
      ApplyDenseMomentum(m.span(), kRates, d.span(), x.span());
      EXPECT_TRUE(SameBytes(x, expected));
    });
  }
}

// With p = 1 + 2^-23, p * p rounds to r = 1 + 2^-22 and leaves 2^-46, which a fused multiply-add
// would keep. This is what goes red when the build loses -ffp-contract=off.
TEST(Momentum, ProductsAreRoundedBeforeTheyAreAdded) {
  constexpr float p = 0x1.000002p0f, r = 0x1.000004p0f;
  const Values positive(32, p), negative(32, -p);
  OnEveryTarget([&] {
    Values input(32, kNan), x(32, p), back(32, r);
    MomentumInput({.beta1 = p, .one_minus_beta1 = p}, negative, positive.data(),
                  absl::MakeSpan(input));
    EXPECT_TRUE(SameBytes<float>(input, Values(32, 0.0f))) << "p*p - p*p";
    // m * inverse = -r, wd * x = r.
    ApplyDenseMomentum(negative, {.learning_rate = 1, .weight_decay = p}, positive,
                       absl::MakeSpan(x));
    EXPECT_TRUE(SameBytes<float>(x, Values(32, p)));
    ApplyDenseMomentum(positive, {.learning_rate = p, .weight_decay = 0}, Values(32, 1.0f),
                       absl::MakeSpan(back));
    EXPECT_TRUE(SameBytes<float>(back, Values(32, 0.0f))) << "r - p*p";
  });
}

}  // namespace
}  // namespace signpost::kernels
