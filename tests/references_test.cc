// The references of the optimizers, held to what they are to be believed for: they train what their
// dense counterparts train, and what they leave out makes no difference.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/onebit_adam_reference.h"
#include "tests/onebit_lamb_reference.h"
#include "tests/zero_one_adam_reference.h"

namespace signpost::testing {
namespace {

constexpr size_t kBlock = 64;
constexpr int kWorkers = 4;

// A network of two layers, tanh between them, learns another one's outputs by least squares. Its
// tensors: weights and biases of both layers. Each worker draws its own batches.
class Regression {
 public:
  Regression() : teacher_(RandomParameters(1)) {}

  static std::vector<size_t> Tensors() { return {kHidden * kInputs, kHidden, kHidden, 1}; }

  static Vector RandomParameters(int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    Vector parameters(kHidden * kInputs + kHidden + kHidden + 1);
    for (double& x : parameters) x = 0.5 * normal(random);
    return parameters;
  }

  // The mean gradient over a batch drawn for this worker and step.
  Vector Gradient(const Vector& x, int worker, int step) const {
    std::mt19937 random(100 * step + worker);
    Vector gradient(x.size());
    for (int i = 0; i < kBatch; ++i) AddGradient(x, Draw(random), gradient);
    for (double& g : gradient) g /= kBatch;
    return gradient;
  }

  double Loss(const Vector& x) const {
    constexpr int kExamples = 1000;
    std::mt19937 random(-1);
    double loss = 0;
    for (int i = 0; i < kExamples; ++i) {
      const Vector input = Draw(random);
      const double difference = Output(x, input) - Output(teacher_, input);
      loss += difference * difference / 2 / kExamples;
    }
    return loss;
  }

 private:
  static constexpr int kInputs = 8, kHidden = 16, kBatch = 8;

  static Vector Draw(std::mt19937& random) {
    std::normal_distribution<double> normal;
    Vector input(kInputs);
    for (double& value : input) value = normal(random);
    return input;
  }

  static double Hidden(const Vector& x, const Vector& input, int h) {
    double sum = x[kHidden * kInputs + h];
    for (int i = 0; i < kInputs; ++i) sum += x[h * kInputs + i] * input[i];
    return std::tanh(sum);
  }

  static double Output(const Vector& x, const Vector& input) {
    double sum = x.back();
    for (int h = 0; h < kHidden; ++h) {
      sum += x[kHidden * (kInputs + 1) + h] * Hidden(x, input, h);
    }
    return sum;
  }

  void AddGradient(const Vector& x, const Vector& input, Vector& gradient) const {
    const double difference = Output(x, input) - Output(teacher_, input);
    gradient.back() += difference;
    for (int h = 0; h < kHidden; ++h) {
      const double hidden = Hidden(x, input, h);
      const size_t out = kHidden * (kInputs + 1) + h;
      gradient[out] += difference * hidden;
      const double back = difference * x[out] * (1 - hidden * hidden);
      gradient[kHidden * kInputs + h] += back;
      for (int i = 0; i < kInputs; ++i) gradient[h * kInputs + i] += back * input[i];
    }
  }

  const Vector teacher_;
};

template <typename Reference>
const Vector& ParametersOf(const Reference& reference, int) {
  return reference.parameters();
}
const Vector& ParametersOf(const ZeroOneAdamReference& reference, int worker) {
  return reference.parameters(worker);
}

// Trains with a learning rate that falls to zero, and returns the loss of worker 0's parameters.
template <typename Reference>
double LossAfterTraining(Reference& reference, int workers, int steps, double learning_rate,
                         double weight_decay) {
  const Regression problem;
  for (int step = 0; step < steps; ++step) {
    std::vector<Vector> gradients;
    for (int i = 0; i < workers; ++i) {
      gradients.push_back(problem.Gradient(ParametersOf(reference, i), i, step));
    }
    reference.Step(gradients, learning_rate * (1 - 1.0 * step / steps), weight_decay);
  }
  return problem.Loss(ParametersOf(reference, 0));
}

TEST(OneBitLambReference, TrainsWhatLambTrains) {
  constexpr int kSteps = 1500;
  for (const int workers : {1, kWorkers}) {
    for (const double weight_decay : {0., 0.01}) {
      const auto loss = [&](int freeze_step) {
        OneBitLambReference reference(workers, Regression::Tensors(), kBlock,
                                      {.freeze_step = freeze_step},
                                      Regression::RandomParameters(2));
        return LossAfterTraining(reference, workers, kSteps, /*learning_rate=*/0.02, weight_decay);
      };
      const double dense = loss(/*freeze_step=*/kSteps);
      const double compressed = loss(/*freeze_step=*/kSteps / 5);
      const double before = Regression().Loss(Regression::RandomParameters(2));
      EXPECT_LT(dense, 0.02 * before);
      EXPECT_GT(before - compressed, 0.98 * (before - dense))
          << workers << " workers, weight decay " << weight_decay;
    }
  }
}

// A step of two workers, tensors {6, 10}, the second one's gradients `scale` times as large.
struct Scaled {
  explicit Scaled(OneBitLambReference::Options options, double scale)
      : reference(2, {6, 10}, /*block=*/4, options, Vector(16, 0.5)), scale(scale) {}

  void Step() {
    std::vector<Vector> gradients(2, Vector(16));
    for (Vector& gradient : gradients) {
      for (size_t j = 0; j < 16; ++j) gradient[j] = normal(random) * (j < 6 ? 1 : scale);
    }
    reference.Step(gradients, /*learning_rate=*/0.01, /*weight_decay=*/0);
  }

  OneBitLambReference reference;
  double scale;
  std::mt19937 random{7};
  std::normal_distribution<double> normal;
};

// The paper multiplies momenta to a common size before they are compressed, and divides afterwards.
// With blocks that do not straddle tensors that changes nothing: a tensor's bits are the same
// whatever its gradients are multiplied by, and its scales and errors are multiplied by that.
TEST(OneBitLambReference, NeedsNoCommonSizeOfMomenta) {
  constexpr double kScale = 0x1p-20;
  Scaled one({.epsilon = 0, .freeze_step = 3}, 1), other({.epsilon = 0, .freeze_step = 3}, kScale);
  for (int step = 0; step < 20; ++step) {
    one.Step();
    other.Step();
    EXPECT_EQ(one.reference.parameters(), other.reference.parameters());
    for (size_t j = 6; j < 16; ++j) {
      EXPECT_EQ(one.reference.momentum()[j] * kScale, other.reference.momentum()[j]);
      EXPECT_EQ(one.reference.worker_error(1)[j] * kScale, other.reference.worker_error(1)[j]);
    }
  }
}

TEST(OneBitLambReference, ATensorWithoutGradientsBeforeTheFreezeStaysWhereItIs) {
  Scaled tensors({.freeze_step = 3}, /*scale=*/0);
  for (int step = 0; step < 3; ++step) tensors.Step();
  tensors.scale = 1;
  for (int step = 3; step < 20; ++step) {
    tensors.Step();
    for (size_t j = 6; j < 16; ++j) EXPECT_EQ(tensors.reference.parameters()[j], 0.5);
    EXPECT_TRUE(std::isfinite(tensors.reference.parameters()[0]));
  }
}

TEST(ZeroOneAdamReference, TrainsWhatAdamTrains) {
  constexpr int kSteps = 1500, kFreezeStep = kSteps / 5;
  for (const int workers : {1, kWorkers}) {
    for (const double weight_decay : {0., 0.01}) {
      const auto reference_with = [&](ZeroOneAdamReference::Options options) {
        return ZeroOneAdamReference(workers, Regression::Tensors(), kBlock, options,
                                    Regression::RandomParameters(2));
      };
      ZeroOneAdamReference adam =
          reference_with({.beta2 = 0.99, .var_freeze_step = kSteps, .var_update_scaler = kSteps});
      ZeroOneAdamReference compressed =
          reference_with({.beta2 = 0.99, .var_freeze_step = kFreezeStep, .local_step_scaler = 200});
      const auto loss_of = [&](ZeroOneAdamReference& reference) {
        return LossAfterTraining(reference, workers, kSteps, /*learning_rate=*/0.01, weight_decay);
      };
      const double dense = loss_of(adam);
      const double before = Regression().Loss(Regression::RandomParameters(2));
      EXPECT_LT(dense, 0.03 * before);
      EXPECT_GT(before - loss_of(compressed), 0.98 * (before - dense))
          << workers << " workers, weight decay " << weight_decay;
      EXPECT_LT(compressed.sent_bits(), 0.1 * adam.sent_bits());
    }
  }
}

// Parameters after each of `steps` steps of 2 workers that draw gradients at random; weight decay
// and a learning rate that changes included.
template <typename Reference>
std::vector<Vector> Trajectory(Reference reference, int steps) {
  std::vector<Vector> trajectory;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int step = 0; step < steps; ++step) {
    std::vector<Vector> gradients(2, Vector(16));
    for (Vector& gradient : gradients) {
      for (double& g : gradient) g = normal(random);
    }
    reference.Step(gradients, /*learning_rate=*/0.01 / (1 + step % 3), /*weight_decay=*/0.1);
    trajectory.push_back(ParametersOf(reference, 1));
  }
  return trajectory;
}

TEST(ZeroOneAdamReference, IsOneBitAdamIfItUpdatesTheVarianceAndSynchronisesInEveryStep) {
  constexpr int kSteps = 40, kFreezeStep = 10;
  const std::vector<Vector> expected = Trajectory(
      OneBitAdamReference(2, {6, 10}, /*block=*/4, {.freeze_step = kFreezeStep}, Vector(16, 0.5)),
      kSteps);
  const std::vector<Vector> got = Trajectory(ZeroOneAdamReference(2, {6, 10}, /*block=*/4,
                                                                  {.var_freeze_step = kFreezeStep,
                                                                   .var_update_scaler = kFreezeStep,
                                                                   .local_step_clipper = 1},
                                                                  Vector(16, 0.5)),
                                             kSteps);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t j = 0; j < 16; ++j) EXPECT_NEAR(got[step][j], expected[step][j], 1e-12) << step;
  }
}

class TwoWorkers {
 public:
  explicit TwoWorkers(ZeroOneAdamReference::Options options)
      : reference(2, {6, 10}, /*block=*/4, options, Vector(16, 0.5)) {}

  void Step(double learning_rate, double weight_decay, double size = 1) {
    std::vector<Vector> gradients(2, Vector(16));
    for (Vector& gradient : gradients) {
      for (double& g : gradient) g = size * normal_(random_);
    }
    reference.Step(gradients, learning_rate, weight_decay);
  }

  ZeroOneAdamReference reference;

 private:
  std::mt19937 random_{7};
  std::normal_distribution<double> normal_;
};

TEST(ZeroOneAdamReference, WorkersAreTheSameWhenTheySynchroniseWhichIsLessAndLessOften) {
  TwoWorkers two({.var_freeze_step = 5, .local_step_scaler = 4, .local_step_clipper = 4});
  std::vector<int> synchronised;
  for (int step = 0; step < 24; ++step) {
    two.Step(/*learning_rate=*/0.01, /*weight_decay=*/0.1);
    const ZeroOneAdamReference& reference = two.reference;
    EXPECT_EQ(reference.parameters(0) == reference.parameters(1), reference.is_synchronised());
    EXPECT_EQ(reference.momentum(0) == reference.momentum(1), reference.is_synchronised());
    if (step >= 5 && reference.is_synchronised()) synchronised.push_back(step);
  }
  EXPECT_EQ(synchronised, std::vector<int>({5, 6, 7, 8, 10, 12, 16, 20}));
}

TEST(ZeroOneAdamReference, UpdatesTheVarianceLessAndLessOften) {
  TwoWorkers two({.var_freeze_step = 100, .var_update_scaler = 3});
  std::vector<int> updates;
  for (int step = 0; step < 30; ++step) {
    const Vector before = two.reference.variance();
    two.Step(/*learning_rate=*/0.01, /*weight_decay=*/0.1);
    if (two.reference.variance() != before) updates.push_back(step);
  }
  EXPECT_EQ(updates, std::vector<int>({0, 1, 2, 3, 5, 7, 9, 13, 17, 21, 29}));
}

// What all errors together still owe to element j's mean.
double Owed(const ZeroOneAdamReference& reference, size_t j) {
  return reference.server_error()[j] +
         (reference.worker_error(0)[j] + reference.worker_error(1)[j]) / 2;
}

TEST(ZeroOneAdamReference, ErrorsGoOnInUnitsOfTheMomentumOrAreReset) {
  constexpr int kFreezeStep = 9;
  for (const bool resets : {false, true}) {
    TwoWorkers two({.bias_correction = false,
                    .var_freeze_step = kFreezeStep,
                    .var_update_scaler = 3,
                    .resets_errors = resets});
    const ZeroOneAdamReference& reference = two.reference;
    for (int step = 0; step < kFreezeStep; ++step) two.Step(0.01, /*weight_decay=*/0);
    Vector expected(16);
    for (size_t j = 0; j < 16; ++j) {
      const double owed = resets ? 0 : (1 - 0.9) * Owed(reference, j);
      expected[j] = 0.9 * reference.momentum(0)[j] + owed;
      EXPECT_NE(Owed(reference, j), 0);
    }
    two.Step(0.01, /*weight_decay=*/0, /*size=*/0);
    for (size_t j = 0; j < 16; ++j) {
      EXPECT_NEAR(reference.momentum(0)[j] + Owed(reference, j), expected[j], 1e-12);
    }
  }
}

TEST(ZeroOneAdamReference, SendsLessAndLess) {
  ZeroOneAdamReference reference(
      1, {4096}, /*block=*/4096,
      {.var_freeze_step = 20, .var_update_scaler = 4, .local_step_scaler = 8}, Vector(4096));
  const auto bits_of = [&](int steps) {
    const double before = reference.sent_bits();
    for (int i = 0; i < steps; ++i) reference.Step({Vector(4096, 1)}, 0.01, 0);
    return reference.sent_bits() - before;
  };
  const double one_bit = 1 + 32. / 4096;
  EXPECT_DOUBLE_EQ(bits_of(20), 10 * 32 + 10 * one_bit);  // updates: 0-4, 6, 8, 10, 12, 16
  EXPECT_DOUBLE_EQ(bits_of(8), 8 * one_bit);
  EXPECT_DOUBLE_EQ(bits_of(8), 4 * one_bit);
  EXPECT_DOUBLE_EQ(bits_of(8), 2 * one_bit);
  EXPECT_DOUBLE_EQ(bits_of(8), 1 * one_bit);
  EXPECT_DOUBLE_EQ(bits_of(160), 10 * one_bit);
}

TEST(ZeroOneAdamReference, WeightDecayIsInNoMomentum) {
  TwoWorkers two({.var_freeze_step = 5, .local_step_scaler = 1, .local_step_clipper = 4});
  for (int step = 0; step < 30; ++step) two.Step(0.01, /*weight_decay=*/1, /*size=*/0);
  for (double m : two.reference.momentum(0)) EXPECT_EQ(m, 0);
  for (double x : two.reference.parameters(0)) EXPECT_NEAR(x, 0.5 * std::exp(-0.3), 0.002);
}

TEST(ZeroOneAdamReference, NothingMovesWithoutALearningRate) {
  TwoWorkers two({.var_freeze_step = 5, .local_step_scaler = 1, .local_step_clipper = 4});
  for (int step = 0; step < 30; ++step) two.Step(0.01, /*weight_decay=*/1);
  while (!two.reference.is_synchronised()) two.Step(0.01, /*weight_decay=*/1);
  const Vector before = two.reference.parameters(0);
  for (int step = 0; step < 9; ++step) {
    two.Step(/*learning_rate=*/0, /*weight_decay=*/1);
    EXPECT_EQ(two.reference.parameters(0), before);
  }
  for (double m : two.reference.momentum(0)) EXPECT_LT(std::abs(m), 10);
}

}  // namespace
}  // namespace signpost::testing
