// The references of DeepSpeed's 1-bit Adam and 1-bit LAMB, buffers as there, against numbers of
// DeepSpeed's own: its classes and its CompressedBackend at 38327e0 have taken these steps in fp32
// on a CPU (PyTorch 1.13), two ranks on a thread each, with bits packed by numpy. Both tensors of
// 1-bit Adam are followed by zeros there; 1-bit LAMB's buffer is not.

#include <gtest/gtest.h>

#include <vector>

#include "tests/deepspeed_onebit_adam_reference.h"
#include "tests/deepspeed_onebit_lamb_reference.h"

namespace signpost::testing {
namespace {

constexpr size_t kWorkers = 2, kElements = 16;
constexpr int kSteps = 12, kFreezeStep = 5;
const std::vector<size_t> kTensors = {11, 5};

// Values are below 2. A step rounds each some twenty times, by at most 2^-24 each, and the numbers
// below have six decimals, rounded by less than 2^-20.
constexpr double kTolerance = kSteps * 20 * 0x1p-24 + 0x1p-20;

Vector InitialParameters() {
  Vector parameters(kElements);
  for (int j = 0; j < static_cast<int>(kElements); ++j) parameters[j] = j / 32.0 - 0.25;
  return parameters;
}

// Exact in fp32.
Vector GradientOf(int rank, int step) {
  Vector gradient(kElements);
  for (int j = 0; j < static_cast<int>(kElements); ++j) {
    gradient[j] = ((5 * rank + 7 * step + 3 * j * j + j * (step + 1)) % 17 - 8) / 8.0;
  }
  return gradient;
}

template <class Reference>
void TakeSteps(Reference& reference, double lr) {
  for (int step = 0; step < kSteps; ++step) {
    reference.Step({GradientOf(/*rank=*/0, step), GradientOf(/*rank=*/1, step)}, lr,
                   /*weight_decay=*/0.1);
  }
  ASSERT_GT(reference.closest_decision(), kTolerance)
      << "fp32 may decide otherwise than the reference; choose other gradients";
}

void ExpectNear(const Vector& values, const Vector& wanted, const char* what) {
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t j = 0; j < values.size(); ++j) {
    EXPECT_NEAR(values[j], wanted[j], kTolerance) << what << " " << j;
  }
}

TEST(DeepSpeedReferences, OneBitAdamHasDeepSpeedsNumbers) {
  DeepSpeedOneBitAdamReference reference(
      kWorkers, kTensors, {.freeze_step = kFreezeStep, .buffers = DeepSpeedBuffers::kAsThere},
      InitialParameters());
  TakeSteps(reference, /*lr=*/0.01);
  ExpectNear(reference.parameters(),
             {-0.380424, -0.157291, -0.588910, -0.286785, -0.102819, -0.245964, 0.032380, -0.093809,
              -0.223441, -0.111170, 0.520930, 0.312185, 0.103269, 0.206464, 0.082180, 0.187727},
             "parameter");
  // Three scales: that of the first tensor's first half, that of what its second half has beside
  // zeros, and that of the second tensor's first half.
  ExpectNear(reference.momentum(),
             {-0.072457, 0.072457, 0.072457, 0.072457, 0.072457, 0.072457, -0.072457, -0.072457,
              0.073431, 0.073431, -0.073431, 0.033707, -0.033707, -0.033707, -0.033707, 0.033707},
             "momentum");
}

TEST(DeepSpeedReferences, OneBitLambHasDeepSpeedsNumbers) {
  DeepSpeedOneBitLambReference reference(
      kWorkers, kTensors, {.freeze_step = kFreezeStep, .buffers = DeepSpeedBuffers::kAsThere},
      InitialParameters());
  TakeSteps(reference, /*lr=*/0.5);
  ExpectNear(reference.parameters(),
             {-0.633985, -0.086881, -1.047598, -0.577757, 0.034566, -0.259772, 0.063260, -0.245633,
              -0.580440, -0.153828, 1.063536, 0.808825, 0.007373, 0.273187, -0.171789, 0.193711},
             "parameter");
  // Two scales, one for each half of the buffer; tensors have what they are multiplied by.
  ExpectNear(reference.momentum(),
             {0.047739, 0.047739, 0.047739, 0.047739, 0.047739, 0.047739, -0.047739, -0.047739,
              0.053555, 0.053555, -0.053555, 0.063303, 0.063303, 0.063303, -0.063303, 0.063303},
             "momentum");
  ExpectNear({reference.lamb_coeff(0), reference.lamb_coeff(1)}, {0.021259, 0.015697},
             "coefficient");
}

}  // namespace
}  // namespace signpost::testing
