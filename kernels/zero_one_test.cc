#include "kernels/zero_one.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/every_target.h"
#include "kernels/momentum.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DenseType kTypes[] = {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16};

const uint8_t* Float32Payload(const Values& values) {
  return reinterpret_cast<const uint8_t*>(values.data());
}

// A payload, and the numbers that dense_test holds to be what it stands for.
struct Payload {
  Payload(DenseType type, Values gradient) : bytes(DenseBytes(type, gradient.size())) {
    Values lost(gradient.size());
    CompressDense(BlockRule(), type, gradient, absl::MakeSpan(lost), bytes.data());
    DecompressDense(type, bytes.data(), absl::MakeSpan(gradient));
    values = std::move(gradient);
  }

  Guarded<uint8_t> bytes;
  Values values;
};

// For numbers that can be computed by hand.
constexpr AdaptiveRates kPlainRates = {.beta1 = 0.5f,
                                       .one_minus_beta1 = 0.25f,
                                       .kept_variance = 0.5f,
                                       .one_minus_kept_variance = 0.5f,
                                       .step_size = 0.75f,
                                       .inverse_sqrt_correction2 = 0.25f,
                                       .floor = 0,
                                       .epsilon = 1,
                                       .decay = 0.5f,
                                       .updates_variance = true};

TEST(ZeroOne, AdaptiveStepGivesTheNumbersComputedByHand) {
  // v = 0.5*16 + 0.5*(4*4) = 16;  m = 0.5*2 + 0.25*4 = 2;
  // x = (8 - 0.5*8) - 0.75 * (2 / (sqrt(16)*0.25 + 1)) = 4 - 0.75 = 3.25
  const Values gradient = {4};
  const uint8_t bfloat16[] = {0x80, 0x40}, float16[] = {0x00, 0x44};  // 4 as well
  const std::pair<DenseType, const uint8_t*> payloads[] = {
      {DenseType::kFloat32, Float32Payload(gradient)},
      {DenseType::kBfloat16, bfloat16},
      {DenseType::kFloat16, float16}};
  OnEveryTarget([&] {
    for (const auto& [type, payload] : payloads) {
      Values m = {2}, v = {16}, x = {8};
      AdaptiveStep(kPlainRates, type, payload, absl::MakeSpan(m), absl::MakeSpan(v),
                   absl::MakeSpan(x));
      EXPECT_EQ(m[0], 2);
      EXPECT_EQ(v[0], 16);
      EXPECT_EQ(x[0], 3.25f);
    }
  });
}

TEST(ZeroOne, AdaptiveStepRaisesVariancesToTheFloorWhereItDividesByThemOnly) {
  // As above, but sqrt(144)*0.25 + 1 = 4. The second one's first gradient: v = 0.5*(4*4) = 8.
  AdaptiveRates rates = kPlainRates;
  rates.floor = 144;
  const Values gradient = {4, 4};
  OnEveryTarget([&] {
    Values m = {2, 2}, v = {16, 0}, x = {8, 8};
    AdaptiveStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(m),
                 absl::MakeSpan(v), absl::MakeSpan(x));
    EXPECT_EQ(v, (Values{16, 8}));
    EXPECT_EQ(x, (Values{3.625f, 3.625f}));
  });
}

TEST(ZeroOne, AdaptiveStepBetweenTwoUpdatesLeavesTheVariance) {
  AdaptiveRates rates = kPlainRates;
  rates.updates_variance = false;
  const Values gradient(3, 4.0f);
  OnEveryTarget([&] {
    Values m(3, 2.0f), v = {16, 144, 1}, x(3, 8.0f);
    AdaptiveStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(m),
                 absl::MakeSpan(v), absl::MakeSpan(x));
    EXPECT_EQ(m, Values(3, 2.0f));
    EXPECT_EQ(v, (Values{16, 144, 1}));
    EXPECT_EQ(x, (Values{3.25f, 3.625f, 2.8f}));  // the last: 4 - 0.75 * (2 / 1.25)
  });
}

TEST(ZeroOne, AnElementWithoutAVarianceIsLiftedToTheFloorIfThatIsWanted) {
  // As with a variance of 144 above.
  AdaptiveRates rates = kPlainRates;
  rates.updates_variance = false;
  rates.lifts_zeros = true;
  const Values gradient(3, 4.0f);
  const Values variance = {0, 1, kNan};
  for (const auto& [floor, first] : {std::pair(144.0f, 3.625f), std::pair(0.0f, 4.0f)}) {
    rates.floor = floor;
    OnEveryTarget([&] {
      Values m(3, 2.0f), v = variance, x(3, 8.0f);
      AdaptiveStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(m),
                   absl::MakeSpan(v), absl::MakeSpan(x));
      EXPECT_TRUE(SameBytes<float>(v, variance));
      EXPECT_EQ(x[0], first) << "without a floor it only decays";
      if (floor > 0) {
        EXPECT_EQ(x[1], 3.625f);
      }
      EXPECT_EQ(x[2], 4.0f) << "what is no number is not lifted";
    });
  }
}

TEST(ZeroOne, AnElementWithoutAVarianceOnlyDecays) {
  AdaptiveRates rates = kPlainRates;
  rates.updates_variance = false;
  rates.epsilon = 0;
  const Values gradient(3, 4.0f);
  const Values none = {0.0f, -0.0f, kNan};
  for (const float floor : {0.0f, 144.0f}) {
    rates.floor = floor;
    OnEveryTarget([&] {
      Values m(3, 2.0f), v = none, x(3, 8.0f);
      AdaptiveStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(m),
                   absl::MakeSpan(v), absl::MakeSpan(x));
      EXPECT_EQ(m, Values(3, 2.0f));
      EXPECT_TRUE(SameBytes<float>(v, none));
      EXPECT_EQ(x, Values(3, 4.0f));
    });
  }
}

struct AdaptiveState {
  Values momentum, variance, parameters;
};

constexpr AdaptiveRates kAdaptiveRates = {.beta1 = 0.9f,
                                          .one_minus_beta1 = 0.1f,
                                          .kept_variance = 0.984f,
                                          .one_minus_kept_variance = 0.016f,
                                          .step_size = 3e-3f,
                                          .inverse_sqrt_correction2 = 1.7f,
                                          .floor = 0,
                                          .epsilon = 1e-8f,
                                          .decay = 1e-5f,
                                          .updates_variance = true};

// The equations of zero_one.h, each operation in a statement of its own.
AdaptiveState StepByStep(const AdaptiveRates& rates, const Values& gradient, AdaptiveState state) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float g = gradient[i];
    float& v = state.variance[i];
    if (rates.updates_variance) {
      const float kept_v = rates.kept_variance * v;
      const float square = g * g;
      const float new_v = rates.one_minus_kept_variance * square;
      v = kept_v + new_v;
    }
    const float kept_m = rates.beta1 * state.momentum[i];
    const float new_m = rates.one_minus_beta1 * g;
    const float m = kept_m + new_m;
    const float root = std::sqrt(std::max(v, rates.floor));
    const float corrected = root * rates.inverse_sqrt_correction2;
    const float denominator = corrected + rates.epsilon;
    const float ratio = v > 0 ? m / denominator : 0;
    const float step = rates.step_size * ratio;
    const float decay = rates.decay * state.parameters[i];
    const float decayed = state.parameters[i] - decay;
    state.momentum[i] = m;
    state.parameters[i] = decayed - step;
  }
  return state;
}

TEST(ZeroOne, AdaptiveStepMatchesTheModel) {
  Random random;
  for (const bool updates : {true, false}) {
    for (const float floor : {0.0f, 1e-6f}) {
      AdaptiveRates rates = kAdaptiveRates;
      rates.updates_variance = updates;
      rates.floor = floor;
      for (const size_t n : kLengths) {
        SCOPED_TRACE(n);
        const AdaptiveState before = {random.Values(n), random.PositiveValues(n), random.Values(n)};
        for (const DenseType type : kTypes) {
          const Payload payload(type, random.Values(n));
          const AdaptiveState expected = StepByStep(rates, payload.values, before);
          OnEveryTarget([&] {
            Guarded<float> m = before.momentum, v = before.variance, x = before.parameters;
            AdaptiveStep(rates, type, payload.bytes.data(), m.span(), v.span(), x.span());
            EXPECT_TRUE(SameBytes(m, expected.momentum));
            EXPECT_TRUE(SameBytes(v, expected.variance));
            EXPECT_TRUE(SameBytes(x, expected.parameters));
          });
        }
      }
    }
  }
}

TEST(ZeroOne, AdaptiveStepsThatAllUpdateAreAdams) {
  const AdamRates adam = {.beta1 = kAdaptiveRates.beta1,
                          .one_minus_beta1 = kAdaptiveRates.one_minus_beta1,
                          .beta2 = kAdaptiveRates.kept_variance,
                          .one_minus_beta2 = kAdaptiveRates.one_minus_kept_variance,
                          .step_size = kAdaptiveRates.step_size,
                          .inverse_sqrt_correction2 = kAdaptiveRates.inverse_sqrt_correction2,
                          .epsilon = kAdaptiveRates.epsilon,
                          .decay = kAdaptiveRates.decay};
  Random random;
  for (const size_t n : kLengths) {
    SCOPED_TRACE(n);
    Values variance = random.PositiveValues(n);
    for (float& v : variance) v = std::max(v, std::numeric_limits<float>::denorm_min());
    const AdaptiveState before = {random.Values(n), variance, random.Values(n)};
    for (const DenseType type : kTypes) {
      const Payload payload(type, random.Values(n));
      OnEveryTarget([&] {
        Guarded<float> m = before.momentum, v = before.variance, x = before.parameters;
        Guarded<float> adams_m = m, adams_v = v, adams_x = x;
        AdaptiveStep(kAdaptiveRates, type, payload.bytes.data(), m.span(), v.span(), x.span());
        AdamStep(adam, type, payload.bytes.data(), adams_m.span(), adams_v.span(), adams_x.span());
        EXPECT_TRUE(SameBytes(m, adams_m));
        EXPECT_TRUE(SameBytes(v, adams_v));
        EXPECT_TRUE(SameBytes(x, adams_x));
      });
    }
  }
}

TEST(ZeroOne, LocalStepGivesTheNumbersComputedByHand) {
  // m = 0.5*2 + 0.25*8 = 3;  u = 1 + 0.5*3 = 2.5;  x = 8 - 0.5*(3*2 + 0.25*8) = 4. Without a
  // variance there is only decay: x = 8 - 0.5*(0.25*8) = 7.
  const LocalRates rates = {
      .beta1 = 0.5f, .one_minus_beta1 = 0.25f, .learning_rate = 0.5f, .weight_decay = 0.25f};
  const Values gradient = {8, 8}, inverse = {2, 0};
  OnEveryTarget([&] {
    Values m = {2, 2}, u = {1, 1}, x = {8, 8};
    EXPECT_EQ(LocalStep(BlockRule(), rates, gradient, absl::MakeSpan(m), absl::MakeSpan(u), inverse,
                        absl::MakeSpan(x)),
              1);
    EXPECT_EQ(m, (Values{3, 3}));
    EXPECT_EQ(u, (Values{2.5f, 2.5f}));
    EXPECT_EQ(x, (Values{4, 7}));
  });
}

struct LocalState {
  Values momentum, accumulated, parameters;
  size_t first_left_alone;
};

constexpr LocalRates kLocalRates = {.beta1 = 0.9f,
                                    .one_minus_beta1 = 0.1f,
                                    .learning_rate = 3e-4f,
                                    .weight_decay = 0.01f,
                                    .most_update = 0.5f};

// Likewise. `parameters` may be empty.
LocalState StepByStep(const BlockRule& rule, const LocalRates& rates, const Values& gradient,
                      const Values& inverse, LocalState state) {
  const size_t n = gradient.size(), blocks = BlockCount(n, rule.block_elements);
  std::vector<bool> is_left_alone(blocks);
  for (size_t i = 0; i < n; ++i) {
    if (!std::isfinite(gradient[i]) || std::abs(gradient[i]) > kMaxDense) {
      is_left_alone[i / rule.block_elements] = true;
    }
  }
  state.first_left_alone = static_cast<size_t>(
      std::find(is_left_alone.begin(), is_left_alone.end(), true) - is_left_alone.begin());
  for (size_t i = 0; i < n; ++i) {
    if (is_left_alone[i / rule.block_elements]) continue;
    const float kept_m = rates.beta1 * state.momentum[i];
    const float new_m = rates.one_minus_beta1 * gradient[i];
    const float m = kept_m + new_m;
    const float added = rates.learning_rate * m;
    state.momentum[i] = m;
    state.accumulated[i] = state.accumulated[i] + added;
    if (state.parameters.empty()) continue;
    const float followed = std::clamp(m * inverse[i], -rates.most_update, rates.most_update);
    const float decay = rates.weight_decay * state.parameters[i];
    const float direction = followed + decay;
    const float step = rates.learning_rate * direction;
    state.parameters[i] = state.parameters[i] - step;
  }
  return state;
}

TEST(ZeroOne, LocalStepMatchesTheModel) {
  Random random;
  for (const size_t block : kBlocks) {
    const BlockRule rule{block};
    for (const size_t n : kLengths) {
      SCOPED_TRACE(testing::Message() << n << " elements in blocks of " << block);
      const Values gradient = random.Gradient(n, rule);
      Values inverse = random.PositiveValues(n);
      const LocalState before = {random.Values(n), random.Values(n), random.Values(n)};
      const LocalState expected = StepByStep(rule, kLocalRates, gradient, inverse, before);
      const Guarded<float> g = gradient, d = inverse;
      OnEveryTarget([&] {
        Guarded<float> m = before.momentum, u = before.accumulated, x = before.parameters;
        EXPECT_EQ(LocalStep(rule, kLocalRates, g.span(), m.span(), u.span(), d.span(), x.span()),
                  expected.first_left_alone);
        EXPECT_TRUE(SameBytes(m, expected.momentum));
        EXPECT_TRUE(SameBytes(u, expected.accumulated));
        EXPECT_TRUE(SameBytes(x, expected.parameters));
      });
    }
  }
}

TEST(ZeroOne, LocalStepWithoutParametersDoesTheRest) {
  Random random;
  const BlockRule rule{256};
  for (const size_t n : kLengths) {
    SCOPED_TRACE(n);
    const Values gradient = random.Gradient(n, rule);
    const LocalState before = {random.Values(n), random.Values(n), {}};
    const LocalState expected = StepByStep(rule, kLocalRates, gradient, {}, before);
    const Guarded<float> g = gradient;
    OnEveryTarget([&] {
      Guarded<float> m = before.momentum, u = before.accumulated;
      EXPECT_EQ(LocalStep(rule, kLocalRates, g.span(), m.span(), u.span(), {}, {}),
                expected.first_left_alone);
      EXPECT_TRUE(SameBytes(m, expected.momentum));
      EXPECT_TRUE(SameBytes(u, expected.accumulated));
    });
  }
}

// So an interval of one step is 1-bit Adam's.
TEST(ZeroOne, LocalStepMakesTheInputsOfMomentumAndFollowsThemAsItDoes) {
  Random random;
  const size_t n = 12389;
  const Values gradient = random.Values(n), momentum = random.Values(n);
  const Values inverse = random.PositiveValues(n), parameters = random.Values(n);
  constexpr UpdateRates kUpdateRates = {kLocalRates.learning_rate, kLocalRates.weight_decay,
                                        kLocalRates.most_update};
  OnEveryTarget([&] {
    Values m = momentum, u(n), x = parameters, input(n), followed = parameters;
    LocalStep(BlockRule(), kLocalRates, gradient, absl::MakeSpan(m), absl::MakeSpan(u), inverse,
              absl::MakeSpan(x));
    MomentumInput({kLocalRates.beta1, kLocalRates.one_minus_beta1}, gradient, momentum.data(),
                  absl::MakeSpan(input));
    ApplyDenseMomentum(input, kUpdateRates, inverse, absl::MakeSpan(followed));
    EXPECT_TRUE(SameBytes<float>(m, input));
    EXPECT_TRUE(SameBytes<float>(x, followed));
  });
}

TEST(ZeroOne, LocalStepLeavesABlockAloneWhoseGradientIsOutOfRange) {
  const float beyond = std::nextafter(kMaxDense, kInfinity);
  const BlockRule rule{40};
  const size_t n = 100;  // the last block has 20
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity, beyond, -beyond}) {
    for (const size_t at : {0, 39, 40, 71, 72, 79, 80, 99}) {
      SCOPED_TRACE(testing::Message() << bad << " at " << at);
      Values gradient(n, 1.0f);
      gradient[at] = bad;
      const size_t block = at / 40;
      OnEveryTarget([&] {
        Values m(n), u(n), x(n);
        EXPECT_EQ(LocalStep(rule, kLocalRates, gradient, absl::MakeSpan(m), absl::MakeSpan(u),
                            Values(n, 1.0f), absl::MakeSpan(x)),
                  block);
        for (size_t i = 0; i < n; ++i) {
          const bool moves = i / 40 != block;
          ASSERT_EQ(m[i] != 0, moves) << i;
          ASSERT_EQ(u[i] != 0, moves) << i;
          ASSERT_EQ(x[i] != 0, moves) << i;
        }
      });
    }
  }
}

TEST(ZeroOne, LocalStepTakesTheLargestGradients) {
  const Values gradient = {kMaxDense, -kMaxDense};
  OnEveryTarget([&] {
    Values m(2), u(2);
    EXPECT_EQ(
        LocalStep(BlockRule(), kLocalRates, gradient, absl::MakeSpan(m), absl::MakeSpan(u), {}, {}),
        1);
    EXPECT_EQ(m, (Values{0.1f * kMaxDense, -0.1f * kMaxDense}));
  });
}

// With p = 1 + 2^-23, p * p rounds to r = 1 + 2^-22 and leaves 2^-46, which a fused multiply-add
// would keep. This is what goes red when the build loses -ffp-contract=off.
constexpr float p = 0x1.000002p0f, r = 0x1.000004p0f;

TEST(ZeroOne, ProductsOfAnAdaptiveStepAreRoundedBeforeTheyAreAdded) {
  const auto step = [](const AdaptiveRates& rates, float g, float& m, float& v, float& x) {
    const Values gradient(32, g);
    Values ms(32, m), vs(32, v), xs(32, x);
    AdaptiveStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(ms),
                 absl::MakeSpan(vs), absl::MakeSpan(xs));
    m = ms[0], v = vs[0], x = xs[0];
    EXPECT_TRUE(SameBytes<float>(xs, Values(32, x)));
  };
  OnEveryTarget([&] {
    float m = p, v = -p, x = p;
    step({.beta1 = p,
          .one_minus_beta1 = p,
          .kept_variance = p,
          .one_minus_kept_variance = 1,
          .decay = p,
          .updates_variance = true},
         -p, m, v, x);
    EXPECT_EQ(m, 0) << "p*p - p*p";
    EXPECT_EQ(v, 0) << "p*-p + p*p";
    EXPECT_EQ(x, p - r) << "p - p*p";

    m = p, v = 1, x = r;
    step({.beta1 = 1, .step_size = p, .inverse_sqrt_correction2 = 1}, 0, m, v, x);
    EXPECT_EQ(x, 0) << "r - p * (p / 1)";

    m = 1, v = r, x = 0;  // whose root rounds to p
    step({.beta1 = 1, .step_size = 1, .inverse_sqrt_correction2 = p, .epsilon = -1}, 0, m, v, x);
    EXPECT_EQ(x, -0x1p22f) << "1 / (p*p - 1)";
  });
}

TEST(ZeroOne, ProductsOfALocalStepAreRoundedBeforeTheyAreAdded) {
  const auto step = [](const LocalRates& rates, float g, float d, float& m, float& u, float& x) {
    const Values gradient(32, g), inverse(32, d);
    Values ms(32, m), us(32, u), xs(32, x);
    LocalStep(BlockRule(), rates, gradient, absl::MakeSpan(ms), absl::MakeSpan(us), inverse,
              absl::MakeSpan(xs));
    m = ms[0], u = us[0], x = xs[0];
    EXPECT_TRUE(SameBytes<float>(xs, Values(32, x)));
  };
  OnEveryTarget([&] {
    float m = p, u = 0, x = 0;
    step({.beta1 = p, .one_minus_beta1 = p}, -p, 0, m, u, x);
    EXPECT_EQ(m, 0) << "p*p - p*p";

    m = p, u = -r, x = r;
    step({.beta1 = 1, .learning_rate = p}, 0, 1, m, u, x);
    EXPECT_EQ(u, 0) << "-r + p*p";
    EXPECT_EQ(x, 0) << "r - p * (p*1 + 0)";

    m = -p, x = p;
    step({.beta1 = 1, .learning_rate = 1, .weight_decay = p}, 0, p, m, u, x);
    EXPECT_EQ(x, p) << "-p*p + p*p";
  });
}

}  // namespace
}  // namespace signpost::kernels
