// The references of the optimizers, held to what they are to be believed for: they train what their
// dense counterparts train, and what they leave out makes no difference.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/onebit_lamb_reference.h"

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

// The loss after training with a learning rate that falls to zero.
template <typename Reference>
double LossAfterTraining(int workers, typename Reference::Options options, int steps,
                         double learning_rate, double weight_decay) {
  const Regression problem;
  Reference reference(workers, Regression::Tensors(), kBlock, options,
                      Regression::RandomParameters(2));
  for (int step = 0; step < steps; ++step) {
    std::vector<Vector> gradients;
    for (int i = 0; i < workers; ++i) {
      gradients.push_back(problem.Gradient(reference.parameters(), i, step));
    }
    reference.Step(gradients, learning_rate * (1 - 1.0 * step / steps), weight_decay);
  }
  return problem.Loss(reference.parameters());
}

TEST(OneBitLambReference, TrainsWhatLambTrains) {
  constexpr int kSteps = 1500;
  for (const int workers : {1, kWorkers}) {
    for (const double weight_decay : {0., 0.01}) {
      const auto loss = [&](int freeze_step) {
        return LossAfterTraining<OneBitLambReference>(workers, {.freeze_step = freeze_step}, kSteps,
                                                      /*learning_rate=*/0.02, weight_decay);
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

}  // namespace
}  // namespace signpost::testing
