// What the CUDA kernels' thread blocks compute, on the host, against the CPU kernels: the same
// bytes.

#include "kernels/adam_cuda.h"

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/adam.h"
#include "kernels/dense.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

// What an optimizer keeps of a span, a variance that is zero here and there, and a gradient: a
// payload of `type`.
struct State {
  State(size_t n, DenseType type, Random& random)
      : gradient(n),
        momentum(random.Values(n)),
        variance(random.PositiveValues(n)),
        parameters(random.Values(n)) {
    std::vector<float> lost(n);
    kernels::CompressDense(BlockRule(), type, random.Values(n), absl::MakeSpan(lost),
                           reinterpret_cast<uint8_t*>(gradient.data()));
    if (n > 0) variance.data()[n / 2] = 0;
  }

  const uint8_t* payload() const { return reinterpret_cast<const uint8_t*>(gradient.data()); }

  template <class Rates>
  std::vector<AdamSegment<Rates>> Segments(const Rates& rates, DenseType type) {
    return {{rates, payload(), type, momentum.data(), variance.data(), parameters.data(),
             static_cast<uint32_t>(gradient.span().size()), 0}};
  }

  void ExpectSame(const State& expected) const {
    EXPECT_TRUE(SameBytes(momentum, expected.momentum));
    EXPECT_TRUE(SameBytes(variance, expected.variance));
    EXPECT_TRUE(SameBytes(parameters, expected.parameters));
  }

  Guarded<float> gradient, momentum, variance, parameters;
};

// body(rule, ours, expected)
template <class Body>
void ForEachShape(DenseType type, Body body) {
  Random random;
  for (const size_t block : kBlocks) {
    for (const size_t n : LengthsInBlocks(block)) {
      for (const bool is_aligned : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << n << " elements in blocks of " << block << (is_aligned ? ", aligned" : ""));
        const AlignedMemory memory(is_aligned);
        State ours(n, type, random);
        State expected = ours;
        body(BlockRule{block}, ours, expected);
        ours.ExpectSame(expected);
      }
    }
  }
}

TEST(AdamCuda, StepsAsTheCpuDoes) {
  const AdamRates rates = {0.9f, 0.1f, 0.999f, 0.001f, 3e-3f, 1.7f, 1e-8f, 1e-5f};
  for (const DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
    ForEachShape(type, [&](BlockRule rule, State& ours, State& expected) {
      kernels::AdamStep(rates, type, expected.payload(), expected.momentum.span(),
                        expected.variance.span(), expected.parameters.span());
      RunAdamStep(rule, ours.Segments(rates, type));
    });
  }
}

TEST(AdamCuda, FreezesAsTheCpuDoes) {
  for (const bool lifts_zeros : {false, true}) {
    const FreezeRates rates = {1.1f, 1.3f, 1e-9f, 1e-8f, lifts_zeros};
    ForEachShape(DenseType::kFloat32, [&](BlockRule rule, State& ours, State& expected) {
      kernels::Freeze(rates, expected.momentum.span(), expected.variance.span());
      RunFreeze(rule, ours.Segments(rates, DenseType::kFloat32));
    });
  }
}

TEST(AdamCuda, RefreshesAndThawsAsTheCpuDoes) {
  const RefreshRates rates = {0.9f, 0.1f, 0.8f, 0.2f, 3e-3f, 1e-8f, 1e-5f, /*most_update=*/0.5f};
  for (const DenseType type : {DenseType::kFloat32, DenseType::kBfloat16, DenseType::kFloat16}) {
    ForEachShape(type, [&](BlockRule rule, State& ours, State& expected) {
      kernels::RefreshStep(rates, type, expected.payload(), expected.momentum.span(),
                           expected.variance.span(), expected.parameters.span());
      RunRefreshStep(rule, ours.Segments(rates, type));
      ours.ExpectSame(expected);
      kernels::Thaw(rates.epsilon, expected.variance.span());
      RunThaw(rule, ours.Segments(rates, type));
    });
  }
}

}  // namespace
}  // namespace signpost::kernels::cuda
