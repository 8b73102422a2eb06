#include "kernels/lamb.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/every_target.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const uint8_t* PayloadOf(const Values& values) {
  return reinterpret_cast<const uint8_t*>(values.data());
}

constexpr LambRates kByHand = {.beta1 = 0.5f,
                               .one_minus_beta1 = 0.25f,
                               .beta2 = 0.5f,
                               .one_minus_beta2 = 0.5f,
                               .inverse_correction1 = 4,
                               .inverse_sqrt_correction2 = 0.25f,
                               .epsilon = 1,
                               .weight_decay = 0.5f};

TEST(Lamb, ADenseStepGivesTheNumbersComputedByHand) {
  // m = 0.5*2 + 0.25*4 = 2;  v = 0.5*16 + 0.5*(4*4) = 16;
  // update = (2 * 4) / (sqrt(16)*0.25 + 1) + 0.5 * 8 = 4 + 4 = 8;  x = 8 - 0.25 * 8 = 6
  const Values gradient = {4};
  const uint8_t bfloat16[] = {0x80, 0x40};  // 4 as well
  OnEveryTarget([&] {
    for (const bool wide : {true, false}) {
      Values m = {2}, v = {16}, x = {8};
      LambSums sums;
      UpdateMoments({}, kByHand, wide ? DenseType::kFloat32 : DenseType::kBfloat16,
                    wide ? PayloadOf(gradient) : bfloat16, absl::MakeSpan(m), absl::MakeSpan(v), x,
                    &sums);
      EXPECT_EQ(m[0], 2);
      EXPECT_EQ(v[0], 16);
      EXPECT_EQ(x[0], 8) << "the second half moves it";
      EXPECT_EQ(sums.numerator, 64);
      EXPECT_EQ(sums.update, 64);
      LambStep(kByHand, /*step_size=*/0.25f, m, v, absl::MakeSpan(x));
      EXPECT_EQ(x[0], 6);
    }
  });
}

// Of a momentum and the one before.
enum class Forms { kOneBit, kOneBitAfterDense, kDense };
constexpr Forms kAllForms[] = {Forms::kOneBit, Forms::kOneBitAfterDense, Forms::kDense};

TEST(Lamb, AOneBitStepGivesTheNumbersComputedByHand) {
  // g = (-3 - 0.5 * 2) * 2 = -8;  f = 0.5 * 8 + 0.1875 * 64 = 16;  step = -3 * 0.5 = -1.5;
  // update = -1.5 + 0.5 * 1 = -1;  quotient = 0.5 * (4 + 1) = 2.5
  // The second element has no variance, and no say in the quotient.
  const FreshRates rates = {.beta1 = 0.5f,
                            .inverse_one_minus_beta1 = 2,
                            .beta2 = 0.5f,
                            .one_minus_beta2 = 0.1875f,
                            .epsilon = 1,
                            .weight_decay = 0.5f};
  const float scale = 3, scale_before = 2;
  const uint8_t bits = 0b1, bits_before = 0;
  const Values dense = {-3, 3}, dense_before = {2, 2}, d = {0.5f, 0}, x = {1, 2};
  OnEveryTarget([&] {
    for (const Forms forms : kAllForms) {
      Values f = {8, 0}, momentum = dense_before;
      LambSums sums;
      const OneBitView m = {&scale, &bits}, before = {&scale_before, &bits_before};
      if (forms == Forms::kDense) {
        FollowMomentum({}, rates, dense.data(), absl::MakeSpan(momentum), d, absl::MakeSpan(f), x,
                       &sums);
        EXPECT_EQ(momentum, dense);
      } else if (forms == Forms::kOneBitAfterDense) {
        FollowMomentum({}, rates, m, dense_before.data(), d, absl::MakeSpan(f), x, &sums);
      } else {
        FollowMomentum({}, rates, m, before, d, absl::MakeSpan(f), x, &sums);
      }
      EXPECT_EQ(f, (Values{16, 3}));
      EXPECT_EQ(sums.numerator, 1.5f * 1.5f);
      EXPECT_EQ(sums.update, 1 + 1);
      EXPECT_EQ(sums.least_quotient, 2.5f);
    }
  });
}

TEST(Lamb, ABlockWithoutVarianceHasAnInfiniteQuotient) {
  const float scale = 1;
  const uint8_t bits[5] = {};
  const Values zeros(37);
  OnEveryTarget([&] {
    Values f(37);
    LambSums sums;
    FollowMomentum({}, {}, {&scale, bits}, zeros.data(), zeros, absl::MakeSpan(f), zeros, &sums);
    EXPECT_EQ(sums.least_quotient, kInfinity);
    EXPECT_EQ(sums.numerator, 0);
  });
}

TEST(Lamb, TheFreshVarianceBeginsAsTheFrozenOne) {
  const FreezeRates rates = {
      .momentum_correction = 1, .variance_correction = 2, .floor = 6, .epsilon = 1e-8f};
  const Values variance = {4, 1, 0, -0.0f};
  OnEveryTarget([&] {
    Values fresh(4, 7);
    FloorVariance(rates, variance, absl::MakeSpan(fresh));
    EXPECT_EQ(fresh, (Values{8, 6, 0, 0}));
  });
}

// The order of block.h, each operation in a statement of its own.
float SumOfSquares(const Values& values) {
  Values lanes(128);
  for (size_t i = 0; i < values.size(); ++i) {
    const float square = values[i] * values[i];
    lanes[i % 128] += square;
  }
  for (size_t width = 64; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

// body(rule, n)
template <class Body>
void ForEachShape(Body body) {
  for (const size_t block : kBlocks) {
    for (const size_t n : kLengths) {
      SCOPED_TRACE(testing::Message() << n << " elements in blocks of " << block);
      body(BlockRule{block}, n);
    }
  }
}

void ExpectSame(const std::vector<LambSums>& sums, const std::vector<LambSums>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(sums[i].numerator, expected[i].numerator) << "block " << i;
    ASSERT_EQ(sums[i].update, expected[i].update) << "block " << i;
    ASSERT_EQ(sums[i].least_quotient, expected[i].least_quotient) << "block " << i;
  }
}

constexpr LambRates kRates = {.beta1 = 0.9f,
                              .one_minus_beta1 = 0.1f,
                              .beta2 = 0.999f,
                              .one_minus_beta2 = 0.001f,
                              .inverse_correction1 = 1.2f,
                              .inverse_sqrt_correction2 = 1.7f,
                              .epsilon = 1e-8f,
                              .weight_decay = 1e-2f};

float UpdateOf(float m, float v, float x) {
  const float corrected = m * kRates.inverse_correction1;
  const float root = std::sqrt(v);
  const float scaled = root * kRates.inverse_sqrt_correction2;
  const float denominator = scaled + kRates.epsilon;
  const float step = corrected / denominator;
  const float decay = kRates.weight_decay * x;
  return step + decay;
}

TEST(Lamb, DenseStepsMatchTheModel) {
  Random random;
  ForEachShape([&](const BlockRule& rule, size_t n) {
    const Values gradient = random.Values(n), x_before = random.Values(n);
    Values m = random.Values(n), v = random.PositiveValues(n), x = x_before, updates(n);
    const Values m_before = m, v_before = v;
    for (size_t i = 0; i < n; ++i) {
      const float kept_m = kRates.beta1 * m[i];
      const float new_m = kRates.one_minus_beta1 * gradient[i];
      m[i] = kept_m + new_m;
      const float kept_v = kRates.beta2 * v[i];
      const float square = gradient[i] * gradient[i];
      const float new_v = kRates.one_minus_beta2 * square;
      v[i] = kept_v + new_v;
      updates[i] = UpdateOf(m[i], v[i], x[i]);
      const float step = 0.01f * updates[i];
      x[i] = x[i] - step;
    }
    std::vector<LambSums> expected;
    for (size_t begin = 0; begin < n; begin += rule.block_elements) {
      const size_t end = std::min(begin + rule.block_elements, n);
      const auto part = [&](const Values& values) {
        return Values(values.begin() + begin, values.begin() + end);
      };
      expected.push_back({SumOfSquares(part(x_before)), SumOfSquares(part(updates)), 0});
    }
    const Guarded<float> payload = gradient;
    OnEveryTarget([&] {
      Guarded<float> our_m = m_before, our_v = v_before, our_x = x_before;
      std::vector<LambSums> sums(expected.size());
      UpdateMoments(rule, kRates, DenseType::kFloat32,
                    reinterpret_cast<const uint8_t*>(payload.data()), our_m.span(), our_v.span(),
                    our_x.span(), sums.data());
      LambStep(kRates, 0.01f, our_m.span(), our_v.span(), our_x.span());
      EXPECT_TRUE(SameBytes(our_m, m));
      EXPECT_TRUE(SameBytes(our_v, v));
      EXPECT_TRUE(SameBytes(our_x, x));
      ExpectSame(sums, expected);
    });
  });
}

TEST(Lamb, OneBitStepsMatchTheModel) {
  const FreshRates rates = {.beta1 = 0.9f,
                            .inverse_one_minus_beta1 = 10,
                            .beta2 = 0.999f,
                            .one_minus_beta2 = 0.001f,
                            .epsilon = 1e-8f,
                            .weight_decay = 1e-2f};
  Random random;
  ForEachShape([&](const BlockRule& rule, size_t n) {
    const size_t blocks = BlockCount(n, rule.block_elements);
    const Guarded<float> scales[] = {random.PositiveValues(blocks), random.PositiveValues(blocks)};
    const Guarded<uint8_t> bits[] = {random.Bytes(SignBytes(n)), random.Bytes(SignBytes(n))};
    const auto decompressed = [&](int which) {
      Values values(n);
      for (size_t i = 0; i < n; ++i) {
        const float scale = scales[which].span()[i / rule.block_elements];
        values[i] = (bits[which].span()[i / 8] >> (i % 8) & 1) != 0 ? -scale : scale;
      }
      return values;
    };
    const Values m = decompressed(0), before = decompressed(1);
    const Values x = random.Values(n), f_before = random.PositiveValues(n);
    const Values d = random.PositiveValues(n);
    Values f = f_before;
    std::vector<LambSums> expected;
    for (size_t begin = 0; begin < n; begin += rule.block_elements) {
      Values steps, updates;
      float least = kInfinity;
      for (size_t i = begin; i < std::min(begin + rule.block_elements, n); ++i) {
        const float decayed = rates.beta1 * before[i];
        const float difference = m[i] - decayed;
        const float g = difference * rates.inverse_one_minus_beta1;
        const float kept = rates.beta2 * f[i];
        const float square = g * g;
        const float added = rates.one_minus_beta2 * square;
        f[i] = kept + added;
        steps.push_back(m[i] * d[i]);
        const float decay = rates.weight_decay * x[i];
        updates.push_back(steps.back() + decay);
        const float root = std::sqrt(f[i]);
        const float denominator = root + rates.epsilon;
        const float quotient = d[i] * denominator;
        if (d[i] > 0) least = std::min(least, quotient);
      }
      expected.push_back({SumOfSquares(steps), SumOfSquares(updates), least});
    }
    const Guarded<float> our_m = m, our_before = before, our_d = d, our_x = x;
    OnEveryTarget([&] {
      for (const Forms forms : kAllForms) {
        Guarded<float> our_f = f_before, replaced = before;
        std::vector<LambSums> sums(blocks);
        const OneBitView momentum = {scales[0].data(), bits[0].data()};
        if (forms == Forms::kDense) {
          FollowMomentum(rule, rates, our_m.data(), replaced.span(), our_d.span(), our_f.span(),
                         our_x.span(), sums.data());
          EXPECT_TRUE(SameBytes(replaced, m));
        } else if (forms == Forms::kOneBitAfterDense) {
          FollowMomentum(rule, rates, momentum, our_before.data(), our_d.span(), our_f.span(),
                         our_x.span(), sums.data());
        } else {
          FollowMomentum(rule, rates, momentum, OneBitView{scales[1].data(), bits[1].data()},
                         our_d.span(), our_f.span(), our_x.span(), sums.data());
        }
        EXPECT_TRUE(SameBytes(our_f, f));
        ExpectSame(sums, expected);
      }
    });
  });
}

}  // namespace
}  // namespace signpost::kernels
