#include "kernels/adam.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/dense.h"
#include "kernels/every_target.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;

const uint8_t* Float32Payload(const Values& values) {
  return reinterpret_cast<const uint8_t*>(values.data());
}

TEST(Adam, StepGivesTheNumbersComputedByHand) {
  // m = 0.5*2 + 0.25*4 = 2;  v = 0.5*16 + 0.5*(4*4) = 16;
  // x = (8 - 0.5*8) - 0.75 * (2 / (sqrt(16)*0.25 + 1)) = 4 - 0.75 = 3.25
  const AdamRates rates = {.beta1 = 0.5f,
                           .one_minus_beta1 = 0.25f,
                           .beta2 = 0.5f,
                           .one_minus_beta2 = 0.5f,
                           .step_size = 0.75f,
                           .inverse_sqrt_correction2 = 0.25f,
                           .epsilon = 1,
                           .decay = 0.5f};
  const Values gradient = {4};
  const uint8_t bfloat16[] = {0x80, 0x40}, float16[] = {0x00, 0x44};  // 4 as well
  const std::pair<DenseType, const uint8_t*> payloads[] = {
      {DenseType::kFloat32, Float32Payload(gradient)},
      {DenseType::kBfloat16, bfloat16},
      {DenseType::kFloat16, float16}};
  OnEveryTarget([&] {
    for (const auto& [type, payload] : payloads) {
      Values m = {2}, v = {16}, x = {8};
      AdamStep(rates, type, payload, absl::MakeSpan(m), absl::MakeSpan(v), absl::MakeSpan(x));
      EXPECT_EQ(m[0], 2);
      EXPECT_EQ(v[0], 16);
      EXPECT_EQ(x[0], 3.25f);
    }
  });
}

constexpr AdamRates kRates = {.beta1 = 0.9f,
                              .one_minus_beta1 = 0.1f,
                              .beta2 = 0.999f,
                              .one_minus_beta2 = 0.001f,
                              .step_size = 3e-3f,
                              .inverse_sqrt_correction2 = 1.7f,
                              .epsilon = 1e-8f,
                              .decay = 1e-5f};

struct State {
  Values momentum, variance, parameters;
};

// The three equations of adam.h, each operation in a statement of its own.
State StepByStep(const AdamRates& rates, const Values& gradient, State state) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float g = gradient[i];
    const float kept_m = rates.beta1 * state.momentum[i];
    const float new_m = rates.one_minus_beta1 * g;
    const float m = kept_m + new_m;
    const float kept_v = rates.beta2 * state.variance[i];
    const float square = g * g;
    const float new_v = rates.one_minus_beta2 * square;
    const float v = kept_v + new_v;
    const float root = std::sqrt(v);
    const float corrected = root * rates.inverse_sqrt_correction2;
    const float denominator = corrected + rates.epsilon;
    const float ratio = m / denominator;
    const float step = rates.step_size * ratio;
    const float decay = rates.decay * state.parameters[i];
    const float decayed = state.parameters[i] - decay;
    state.momentum[i] = m;
    state.variance[i] = v;
    state.parameters[i] = decayed - step;
  }
  return state;
}

// What dense_test holds to be a payload, and what it stands for.
std::pair<Guarded<uint8_t>, Values> SomePayload(DenseType type, size_t n, Random& random) {
  Values numbers = random.Values(n), lost(n);
  Guarded<uint8_t> payload(DenseBytes(type, n));
  CompressDense(BlockRule(), type, numbers, absl::MakeSpan(lost), payload.data());
  DecompressDense(type, payload.data(), absl::MakeSpan(numbers));
  return {std::move(payload), std::move(numbers)};
}

TEST(Adam, StepMatchesTheModel) {
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    const State before = {random.Values(n), random.PositiveValues(n), random.Values(n)};
    for (DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
      const auto [payload, gradient] = SomePayload(type, n, random);
      const State expected = StepByStep(kRates, gradient, before);
      OnEveryTarget([&] {
        Guarded<float> m = before.momentum, v = before.variance, x = before.parameters;
        AdamStep(kRates, type, payload.data(), m.span(), v.span(), x.span());
        EXPECT_TRUE(SameBytes(m, expected.momentum));
        EXPECT_TRUE(SameBytes(v, expected.variance));
        EXPECT_TRUE(SameBytes(x, expected.parameters));
      });
    }
  }
}

TEST(Adam, FreezeLeavesZerosAloneOrLiftsThemToTheFloor) {
  // 1 / (sqrt(9) + 1), and 1 / (sqrt(4 * 4) + 1) of one that is above it.
  FreezeRates rates = {
      .momentum_correction = 1, .variance_correction = 4, .floor = 9, .epsilon = 1};
  OnEveryTarget([&] {
    for (const bool lifts : {false, true}) {
      for (const float floor : {9.0f, 0.0f}) {
        rates.lifts_zeros = lifts;
        rates.floor = floor;
        Values momentum = {2, 2}, variance = {0, 4};
        Freeze(rates, absl::MakeSpan(momentum), absl::MakeSpan(variance));
        EXPECT_EQ(variance, (Values{lifts && floor > 0 ? 0.25f : 0, 0.2f}));
      }
    }
  });
}

TEST(Adam, FreezeGivesTheNumbersComputedByHand) {
  // Corrected variances 16, then 4 (the floor 9 is above it): 1 / (4 + 1) and 1 / (3 + 1).
  const FreezeRates rates = {
      .momentum_correction = 3, .variance_correction = 4, .floor = 9, .epsilon = 1};
  OnEveryTarget([&] {
    Values momentum = {2, -2};
    Values variance = {4, 1};
    Freeze(rates, absl::MakeSpan(momentum), absl::MakeSpan(variance));
    EXPECT_EQ(momentum, (Values{6, -6}));
    EXPECT_EQ(variance, (Values{0.2f, 0.25f}));
  });
}

TEST(Adam, FreezeGivesNoUpdateWhereThereWasNoGradient) {
  FreezeRates rates = {
      .momentum_correction = 1, .variance_correction = 4, .floor = 9, .epsilon = 1e-8f};
  for (const bool lifts_zeros : {false, true}) {
    rates.lifts_zeros = lifts_zeros;
    const float of_zero = lifts_zeros ? 1 / (3 + 1e-8f) : 0;
    OnEveryTarget([&] {
      Values momentum(3, 1.0f);
      Values variance = {0.0f, -0.0f, std::numeric_limits<float>::quiet_NaN()};
      Freeze(rates, absl::MakeSpan(momentum), absl::MakeSpan(variance));
      EXPECT_TRUE(SameBytes<float>(variance, Values{of_zero, of_zero, 0}));
    });
  }
}

TEST(Adam, FreezeMatchesTheModel) {
  Random random;
  for (float floor : {0.0f, 1e-4f}) {
    const FreezeRates rates = {
        .momentum_correction = 1.1f, .variance_correction = 1.3f, .floor = floor, .epsilon = 1e-8f};
    for (size_t n : kLengths) {
      SCOPED_TRACE(n);
      const Values m = random.Values(n), v = random.PositiveValues(n);
      Values corrected(n), inverse(n);
      for (size_t i = 0; i < n; ++i) {
        corrected[i] = m[i] * 1.1f;
        const float floored = std::max(v[i] * 1.3f, floor);
        inverse[i] = v[i] > 0 ? 1 / (std::sqrt(floored) + 1e-8f) : 0;
      }
      OnEveryTarget([&] {
        Guarded<float> momentum = m, variance = v;
        Freeze(rates, momentum.span(), variance.span());
        EXPECT_TRUE(SameBytes(momentum, corrected));
        EXPECT_TRUE(SameBytes(variance, inverse));
      });
    }
  }
}

TEST(Adam, RefreshStepGivesTheNumbersComputedByHand) {
  // m = 0.5*2 + 0.25*4 = 2;  x = (8 - 0.5*8) - 0.75 * (2 * 0.25) = 3.625;
  // v = (1/0.25 - 1)^2 = 9, and 0.75*9 + 0.5*(4*4) = 14.75; where it was 0, 0.5*(4*4) = 8.
  const RefreshRates rates = {.beta1 = 0.5f,
                              .one_minus_beta1 = 0.25f,
                              .kept_variance = 0.75f,
                              .one_minus_kept_variance = 0.5f,
                              .learning_rate = 0.75f,
                              .epsilon = 1,
                              .decay = 0.5f};
  const Values gradient = {4, 4};
  OnEveryTarget([&] {
    Values m = {2, 2}, d = {0.25f, 0}, x = {8, 8};
    RefreshStep(rates, DenseType::kFloat32, Float32Payload(gradient), absl::MakeSpan(m),
                absl::MakeSpan(d), absl::MakeSpan(x));
    EXPECT_EQ(m, (Values{2, 2}));
    EXPECT_EQ(d, (Values{14.75f, 8}));
    EXPECT_EQ(x, (Values{3.625f, 4})) << "without a variance there is no update";
  });
}

TEST(Adam, RefreshStepAndThawMatchTheModel) {
  const RefreshRates rates = {.beta1 = 0.9f,
                              .one_minus_beta1 = 0.1f,
                              .kept_variance = 0.82f,
                              .one_minus_kept_variance = 0.18f,
                              .learning_rate = 3e-3f,
                              .epsilon = 1e-3f,
                              .decay = 1e-5f,
                              .most_update = 0.5f};
  Random random;
  for (size_t n : kLengths) {
    SCOPED_TRACE(n);
    Values inverse = random.PositiveValues(n);
    if (n > 0) inverse[n / 2] = 0;
    const State before = {random.Values(n), inverse, random.Values(n)};
    for (DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
      const auto [payload, gradient] = SomePayload(type, n, random);
      State expected = before;
      Values thawed(n);
      for (size_t i = 0; i < n; ++i) {
        const float g = gradient[i], d = inverse[i];
        const float kept_m = rates.beta1 * before.momentum[i];
        const float new_m = rates.one_minus_beta1 * g;
        const float m = kept_m + new_m;
        const float inverted = 1 / d;
        const float root = inverted - rates.epsilon;
        const float v = d > 0 ? root * root : 0;
        const float decay = rates.decay * before.parameters[i];
        const float decayed = before.parameters[i] - decay;
        const float update = std::clamp(m * d, -rates.most_update, rates.most_update);
        const float step = rates.learning_rate * update;
        const float kept_v = rates.kept_variance * v;
        const float square = g * g;
        const float new_v = rates.one_minus_kept_variance * square;
        expected.momentum[i] = m;
        expected.variance[i] = kept_v + new_v;
        expected.parameters[i] = decayed - step;
        thawed[i] = v;
      }
      OnEveryTarget([&] {
        Guarded<float> m = before.momentum, d = before.variance, x = before.parameters;
        RefreshStep(rates, type, payload.data(), m.span(), d.span(), x.span());
        EXPECT_TRUE(SameBytes(m, expected.momentum));
        EXPECT_TRUE(SameBytes(d, expected.variance));
        EXPECT_TRUE(SameBytes(x, expected.parameters));
        Guarded<float> only_d = before.variance;
        Thaw(rates.epsilon, only_d.span());
        EXPECT_TRUE(SameBytes(only_d, thawed));
      });
    }
  }
}

}  // namespace
}  // namespace signpost::kernels
