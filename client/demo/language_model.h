// A byte-level neural language model: given `context` bytes, a distribution over the next one.
//
//   h_0 = the embeddings of the context's bytes, one behind the other   [context * embedding]
//   h_k = relu(W_k h_{k-1} + b_k)   for k = 1 .. layers                 [hidden]
//   p   = softmax(W h_layers + b)                                       [256]
//
// After Bengio et al., A Neural Probabilistic Language Model (JMLR 2003), on bytes.

#ifndef SIGNPOST_CLIENT_DEMO_LANGUAGE_MODEL_H_
#define SIGNPOST_CLIENT_DEMO_LANGUAGE_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace signpost::demo {

inline constexpr uint32_t kByteValues = 256;

struct ModelShape {
  uint32_t context = 16;    // bytes the model sees
  uint32_t embedding = 32;  // numbers per byte seen
  uint32_t hidden = 1024;   // units per hidden layer
  uint32_t layers = 3;      // hidden layers, at least 1
};

// One named piece of the parameter vector, row-major.
struct ModelTensor {
  std::string name;  // "embedding", "hidden1.weight", "hidden1.bias", ..., "output.bias"
  std::vector<uint64_t> shape;
  uint64_t offset = 0;    // in elements
  uint64_t elements = 0;  // product of shape
};

// What the model is to predict: windows of context + 1 bytes, of which the last is the target.
// windows[i] points into text that outlives the batch.
using Batch = std::vector<const uint8_t*>;

// The model and its scratch memory. Not thread-safe. Real is float, or double to check the maths.
template <typename Real>
class LanguageModel {
 public:
  // The same seed gives the same parameters on every machine. All members of shape are at least 1.
  LanguageModel(const ModelShape& shape, uint64_t seed);

  uint32_t window_bytes() const { return shape_.context + 1; }
  absl::Span<const ModelTensor> tensors() const { return tensors_; }

  // All parameters, tensor after tensor without gaps.
  absl::Span<Real> parameters() { return absl::MakeSpan(parameters_); }
  // Of the mean loss of the last Gradients(); as parameters().
  absl::Span<const Real> gradients() const { return gradients_; }

  // The mean over the batch of -ln p(target), in nats. The batch is not empty.
  double Loss(const Batch& batch);

  // Also leaves the derivatives of the loss in gradients().
  double LossAndGradients(const Batch& batch);

 private:
  struct Layer {            // of the hidden layers and the output
    uint64_t weight, bias;  // offsets
    uint32_t inputs, outputs;
  };

  uint64_t AddTensor(const std::string& name, std::vector<uint64_t> shape);
  void AddLayer(const std::string& name, uint32_t inputs, uint32_t outputs);
  void Initialize(uint64_t seed);

  void Embed(const Batch& batch);
  void Forward(const Batch& batch);
  double SoftmaxLoss(const Batch& batch);
  void Backward(const Batch& batch);
  void EmbeddingGradients(const Batch& batch);

  const ModelShape shape_;
  std::vector<ModelTensor> tensors_;
  std::vector<Layer> layers_;
  std::vector<Real> parameters_;
  std::vector<Real> gradients_;
  // activations_[k] is layer k's input [batch, inputs]; the last one is the logits, then the
  // probabilities.
  std::vector<std::vector<Real>> activations_;
  std::vector<Real> output_gradients_, input_gradients_;  // of the layer that Backward is at
};

extern template class LanguageModel<float>;
extern template class LanguageModel<double>;

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_LANGUAGE_MODEL_H_
