#include "client/demo/language_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace signpost::demo {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr ModelShape kSmall = {.context = 3, .embedding = 4, .hidden = 8, .layers = 2};

// All windows of a text, which outlives the batch.
Batch WindowsOf(absl::string_view text, uint32_t window_bytes) {
  Batch batch;
  for (size_t i = 0; i + window_bytes <= text.size(); ++i) {
    batch.push_back(reinterpret_cast<const uint8_t*>(text.data()) + i);
  }
  return batch;
}

template <typename Real>
const ModelTensor& Tensor(const LanguageModel<Real>& model, absl::string_view name) {
  for (const ModelTensor& tensor : model.tensors()) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return model.tensors()[0];
}

// The model of the worked example: one input, one hidden unit, all parameters zero except
//   embedding of 'a' = 2, hidden weight = 3, output weight of 'b' = 0.2.
struct WorkedExample {
  explicit WorkedExample(double hidden_bias) {
    for (double& parameter : model.parameters()) parameter = 0;
    At("embedding", 'a') = 2;
    At("hidden1.weight", 0) = 3;
    At("hidden1.bias", 0) = hidden_bias;
    At("output.weight", 'b') = 0.2;
  }
  double& At(absl::string_view name, uint64_t i) {
    return model.parameters()[Tensor(model, name).offset + i];
  }
  double Gradient(absl::string_view name, uint64_t i) {
    return model.gradients()[Tensor(model, name).offset + i];
  }
  LanguageModel<double> model{{.context = 1, .embedding = 1, .hidden = 1, .layers = 1}, 1};
};

// Five operations deep with numbers around 1: a few units in the last place.
constexpr double kExact = 1e-14;

TEST(LanguageModel, AgreesWithAnExampleWorkedByHand) {
  // h = relu(3 * 2 - 1) = 5; the logit of 'b' is 0.2 * 5 = 1, all 255 others are 0.
  WorkedExample example(/*hidden_bias=*/-1);
  const double e = std::numbers::e;
  EXPECT_NEAR(example.model.Loss(WindowsOf("ac", 2)), std::log(255 + e), kExact);
  EXPECT_NEAR(example.model.LossAndGradients(WindowsOf("ab", 2)), std::log(255 + e) - 1, kExact);

  const double p = e / (255 + e);  // of 'b'
  const double hidden_gradient = (p - 1) * 0.2;
  EXPECT_NEAR(example.Gradient("output.bias", 'b'), p - 1, kExact);
  EXPECT_NEAR(example.Gradient("output.bias", 'c'), 1 / (255 + e), kExact);
  EXPECT_NEAR(example.Gradient("output.weight", 'b'), (p - 1) * 5, kExact);
  EXPECT_NEAR(example.Gradient("output.weight", 'c'), 5 / (255 + e), kExact);
  EXPECT_NEAR(example.Gradient("hidden1.bias", 0), hidden_gradient, kExact);
  EXPECT_NEAR(example.Gradient("hidden1.weight", 0), hidden_gradient * 2, kExact);
  EXPECT_NEAR(example.Gradient("embedding", 'a'), hidden_gradient * 3, kExact);
  EXPECT_EQ(example.Gradient("embedding", 'b'), 0);
}

TEST(LanguageModel, SendsNothingBackThroughASilentUnit) {
  WorkedExample example(/*hidden_bias=*/-7);  // h = relu(3 * 2 - 7) = 0
  EXPECT_NEAR(example.model.LossAndGradients(WindowsOf("ab", 2)), std::log(256), kExact);
  EXPECT_EQ(example.Gradient("hidden1.weight", 0), 0);
  EXPECT_EQ(example.Gradient("hidden1.bias", 0), 0);
  EXPECT_EQ(example.Gradient("embedding", 'a'), 0);
}

TEST(LanguageModel, HasTheGradientsOfFiniteDifferences) {
  LanguageModel<double> model(kSmall, 1);
  const Batch batch = WindowsOf("to be, or not to be", model.window_bytes());
  model.LossAndGradients(batch);
  // A central difference is off by O(h^2) times the third derivative, and by the rounding of the
  // loss (about 1e-15) divided by h: both are below 1e-9.
  constexpr double h = 1e-5;
  const std::vector<double> gradients(model.gradients().begin(), model.gradients().end());
  for (const ModelTensor& tensor : model.tensors()) {
    for (uint64_t i = tensor.offset; i < tensor.offset + tensor.elements; ++i) {
      double& parameter = model.parameters()[i];
      const double original = parameter;
      parameter = original + h;
      const double above = model.Loss(batch);
      parameter = original - h;
      const double below = model.Loss(batch);
      parameter = original;
      ASSERT_NEAR(gradients[i], (above - below) / (2 * h), 1e-9)
          << tensor.name << " element " << i - tensor.offset;
    }
  }
}

TEST(LanguageModel, ComputesTheSameInFloatAsInDouble) {
  LanguageModel<float> single(kSmall, 1);
  LanguageModel<double> twice(kSmall, 1);
  const Batch batch = WindowsOf("to be, or not to be", single.window_bytes());
  // Sums of up to 16 products of numbers around 1, each rounded to 2^-24: below 1e-5.
  EXPECT_NEAR(single.LossAndGradients(batch), twice.LossAndGradients(batch), 1e-5);
  EXPECT_THAT(single.gradients(), Pointwise(DoubleNear(1e-5), twice.gradients()));
}

TEST(LanguageModel, KnowsNothingAtFirst) {
  LanguageModel<float> model({}, 1);
  const std::string text = "Four score and seven years ago our fathers brought forth";
  const double bits = model.Loss(WindowsOf(text, model.window_bytes())) / std::numbers::ln2;
  EXPECT_NEAR(bits, 8, 0.1);  // log2(256), and what logits of deviation 0.1 add
}

TEST(LanguageModel, LearnsATextByHeart) {
  LanguageModel<float> model(kSmall, 1);
  const Batch batch = WindowsOf("abcdabcdabcd", model.window_bytes());
  for (int step = 0; step < 500; ++step) {
    model.LossAndGradients(batch);
    for (uint64_t i = 0; i < model.parameters().size(); ++i) {
      model.parameters()[i] -= 0.1f * model.gradients()[i];
    }
  }
  EXPECT_LT(model.Loss(batch), 0.05);
}

TEST(LanguageModel, StartsFromItsSeed) {
  LanguageModel<float> model(kSmall, 1), same(kSmall, 1), other(kSmall, 2);
  EXPECT_EQ(model.parameters(), same.parameters());
  EXPECT_NE(model.parameters(), other.parameters());
}

TEST(LanguageModel, HasItsTensorsOneBehindTheOther) {
  LanguageModel<float> model(kSmall, 1);
  std::vector<std::string> names;
  uint64_t elements = 0;
  for (const ModelTensor& tensor : model.tensors()) {
    names.push_back(tensor.name);
    EXPECT_EQ(tensor.offset, elements);
    elements += tensor.elements;
  }
  EXPECT_EQ(elements, model.parameters().size());
  EXPECT_EQ(elements, model.gradients().size());
  EXPECT_THAT(names, ElementsAre("embedding", "hidden1.weight", "hidden1.bias", "hidden2.weight",
                                 "hidden2.bias", "output.weight", "output.bias"));
  EXPECT_THAT(Tensor(model, "embedding").shape, ElementsAre(256, 4));
  EXPECT_THAT(Tensor(model, "hidden1.weight").shape, ElementsAre(8, 3 * 4));
  EXPECT_THAT(Tensor(model, "output.weight").shape, ElementsAre(256, 8));
}

}  // namespace
}  // namespace signpost::demo
