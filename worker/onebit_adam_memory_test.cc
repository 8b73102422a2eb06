// What a worker keeps for each parameter, beside the parameter and its gradient.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/onebit_adam.h"
#include "worker/resident_bytes.h"

namespace signpost {
namespace {

constexpr size_t kElements = size_t{32} << 20;

// A step in which every chunk is answered with what it sent.
void Step(uint64_t step, const Layout& layout, absl::Span<const float> gradient, OneBitAdam& adam) {
  adam.BeginStep(step, {GroupRates()});
  for (uint32_t chunk = 0; chunk < layout.chunks().size(); ++chunk) {
    Answer answer;
    answer.payload = Payload(layout.PayloadBytes(adam.codec(), chunk));
    adam.Compress(chunk, {absl::MakeConstSpan(gradient)}, answer.payload.data(), nullptr);
    adam.Apply(chunk, std::move(answer));
  }
}

TEST(OneBitAdamMemory, IsTwoNumbersForEachParameterInAnyStage) {
  if (!kMemoryIsTheProgramsOwn) GTEST_SKIP();
  Tensor tensor;
  tensor.set_name("weights");
  tensor.add_shape(kElements);
  JobOptions job;
  job.set_block_elements(4096);
  job.set_chunk_elements(1 << 20);
  job.set_gamma(1.35f);
  const Layout layout = *Layout::Create({tensor}, job);
  std::vector<float> values(kElements, 1.0f);
  const std::vector<float> gradient(kElements, 0.5f);
  OneBitAdam adam(layout, {.freeze_step = 2, .variance_refresh_interval = 0},
                  {{"weights", {kElements}, absl::MakeSpan(values)}});

  const size_t before = ResidentBytes();
  const auto numbers_per_parameter = [before] {
    return static_cast<double>(ResidentBytes() - before) / sizeof(float) / kElements;
  };
  Step(0, layout, gradient, adam);
  EXPECT_NEAR(numbers_per_parameter(), 2, 0.2) << "momentum and variance";
  Step(1, layout, gradient, adam);
  EXPECT_NEAR(numbers_per_parameter(), 2, 0.2) << "momentum and variance";
  Step(2, layout, gradient, adam);
  EXPECT_NEAR(numbers_per_parameter(), 2, 0.2) << "variance and error, and the momentum's signs";
  Step(3, layout, gradient, adam);
  EXPECT_NEAR(numbers_per_parameter(), 2, 0.2) << "variance and error, and the momentum's signs";
}

}  // namespace
}  // namespace signpost
