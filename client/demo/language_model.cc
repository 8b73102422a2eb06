#include "client/demo/language_model.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/demo/matrix_product.h"

namespace signpost::demo {
namespace {

// Uniform with the given standard deviation. Not normal: that needs a logarithm, which libraries
// round differently.
template <typename Real>
void FillUniform(std::mt19937_64& random, double deviation, absl::Span<Real> values) {
  const double bound = std::sqrt(3.0) * deviation;
  for (Real& value : values) {
    const double unit = static_cast<double>(random() >> 11) * 0x1p-53;  // [0, 1)
    value = static_cast<Real>((2 * unit - 1) * bound);
  }
}

template <typename Real>
void Rectify(absl::Span<Real> values) {
  for (Real& value : values) value = std::max(value, Real{0});
}

// The derivative of Rectify: nothing flows back where nothing came out.
template <typename Real>
void RectifyGradients(absl::Span<const Real> activations, absl::Span<Real> gradients) {
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = activations[i] > 0 ? gradients[i] : Real{0};
  }
}

template <typename Real>
void AddRows(const Real* rows, uint32_t row_count, uint32_t columns, Real* sum) {
  for (uint32_t row = 0; row < row_count; ++row) {
    for (uint32_t i = 0; i < columns; ++i) sum[i] += rows[row * uint64_t{columns} + i];
  }
}

// Turns logits into probabilities; returns -ln of the target's.
template <typename Real>
double Softmax(absl::Span<Real> logits, uint8_t target) {
  const Real highest = *std::max_element(logits.begin(), logits.end());
  const Real target_logit = logits[target];
  Real sum = 0;
  for (Real& logit : logits) {
    logit = std::exp(logit - highest);
    sum += logit;
  }
  for (Real& logit : logits) logit /= sum;
  return std::log(static_cast<double>(sum)) - static_cast<double>(target_logit - highest);
}

}  // namespace

template <typename Real>
LanguageModel<Real>::LanguageModel(const ModelShape& shape, uint64_t seed) : shape_(shape) {
  AddTensor("embedding", {kByteValues, shape.embedding});
  uint32_t inputs = shape.context * shape.embedding;
  for (uint32_t k = 1; k <= shape.layers; ++k) {
    AddLayer(absl::StrCat("hidden", k), inputs, shape.hidden);
    inputs = shape.hidden;
  }
  AddLayer("output", inputs, kByteValues);
  gradients_.resize(parameters_.size());
  activations_.resize(layers_.size() + 1);
  Initialize(seed);
}

template <typename Real>
double LanguageModel<Real>::Loss(const Batch& batch) {
  Embed(batch);
  Forward(batch);
  return SoftmaxLoss(batch);
}

template <typename Real>
double LanguageModel<Real>::LossAndGradients(const Batch& batch) {
  const double loss = Loss(batch);
  Backward(batch);
  EmbeddingGradients(batch);
  return loss;
}

template <typename Real>
uint64_t LanguageModel<Real>::AddTensor(const std::string& name, std::vector<uint64_t> shape) {
  ModelTensor tensor{name, std::move(shape), parameters_.size(), 1};
  for (uint64_t dimension : tensor.shape) tensor.elements *= dimension;
  parameters_.resize(tensor.offset + tensor.elements);
  tensors_.push_back(std::move(tensor));
  return tensors_.back().offset;
}

template <typename Real>
void LanguageModel<Real>::AddLayer(const std::string& name, uint32_t inputs, uint32_t outputs) {
  const uint64_t weight = AddTensor(name + ".weight", {outputs, inputs});
  const uint64_t bias = AddTensor(name + ".bias", {outputs});
  layers_.push_back({weight, bias, inputs, outputs});
}

// Embeddings of deviation 1, hidden weights that keep it through relu (He et al. 2015), biases 0,
// and output weights so small that the model starts close to 8 bits per byte.
template <typename Real>
void LanguageModel<Real>::Initialize(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto fill = [&](uint64_t offset, uint64_t elements, double deviation) {
    FillUniform(random, deviation, parameters().subspan(offset, elements));
  };
  fill(tensors_[0].offset, tensors_[0].elements, 1.0);
  for (const Layer& layer : layers_) {
    const bool is_output = &layer == &layers_.back();
    const double gain = is_output ? 0.1 : std::sqrt(2.0);
    fill(layer.weight, uint64_t{layer.inputs} * layer.outputs, gain / std::sqrt(layer.inputs));
  }
}

template <typename Real>
void LanguageModel<Real>::Embed(const Batch& batch) {
  const Real* table = parameters_.data() + tensors_[0].offset;
  std::vector<Real>& embedded = activations_[0];
  embedded.resize(batch.size() * layers_[0].inputs);
  Real* out = embedded.data();
  for (const uint8_t* window : batch) {
    for (uint32_t i = 0; i < shape_.context; ++i) {
      out = std::copy_n(table + uint64_t{window[i]} * shape_.embedding, shape_.embedding, out);
    }
  }
}

template <typename Real>
void LanguageModel<Real>::Forward(const Batch& batch) {
  const uint32_t rows = batch.size();
  for (size_t k = 0; k < layers_.size(); ++k) {
    const Layer& layer = layers_[k];
    std::vector<Real>& out = activations_[k + 1];
    out.resize(uint64_t{rows} * layer.outputs);
    for (uint32_t row = 0; row < rows; ++row) {
      std::copy_n(&parameters_[layer.bias], layer.outputs, &out[uint64_t{row} * layer.outputs]);
    }
    Multiply(Product<Real>{.transpose_b = true,
                           .add_to_c = true,
                           .rows = rows,
                           .columns = layer.outputs,
                           .inner = layer.inputs,
                           .a = activations_[k].data(),
                           .b = &parameters_[layer.weight],
                           .c = out.data()});
    if (k + 1 < layers_.size()) Rectify(absl::MakeSpan(out));
  }
}

template <typename Real>
double LanguageModel<Real>::SoftmaxLoss(const Batch& batch) {
  auto logits = absl::MakeSpan(activations_.back());
  double sum = 0;
  for (size_t row = 0; row < batch.size(); ++row) {
    sum += Softmax(logits.subspan(row * kByteValues, kByteValues), batch[row][shape_.context]);
  }
  return sum / static_cast<double>(batch.size());
}

template <typename Real>
void LanguageModel<Real>::Backward(const Batch& batch) {
  const uint32_t rows = batch.size();
  const Real inverse_rows = Real{1} / static_cast<Real>(rows);
  // d loss / d logit = (p - [is target]) / rows
  input_gradients_ = activations_.back();
  for (uint32_t row = 0; row < rows; ++row) {
    input_gradients_[row * uint64_t{kByteValues} + batch[row][shape_.context]] -= 1;
  }
  for (Real& gradient : input_gradients_) gradient *= inverse_rows;

  for (size_t k = layers_.size(); k-- > 0;) {
    const Layer& layer = layers_[k];
    std::swap(output_gradients_, input_gradients_);
    Multiply(Product<Real>{.transpose_a = true,
                           .rows = layer.outputs,
                           .columns = layer.inputs,
                           .inner = rows,
                           .a = output_gradients_.data(),
                           .b = activations_[k].data(),
                           .c = &gradients_[layer.weight]});
    std::fill_n(&gradients_[layer.bias], layer.outputs, Real{0});
    AddRows(output_gradients_.data(), rows, layer.outputs, &gradients_[layer.bias]);
    input_gradients_.resize(uint64_t{rows} * layer.inputs);
    Multiply(Product<Real>{.rows = rows,
                           .columns = layer.inputs,
                           .inner = layer.outputs,
                           .a = output_gradients_.data(),
                           .b = &parameters_[layer.weight],
                           .c = input_gradients_.data()});
    if (k > 0) {
      RectifyGradients(absl::MakeConstSpan(activations_[k]), absl::MakeSpan(input_gradients_));
    }
  }
}

template <typename Real>
void LanguageModel<Real>::EmbeddingGradients(const Batch& batch) {
  Real* table = gradients_.data() + tensors_[0].offset;
  std::fill_n(table, tensors_[0].elements, Real{0});
  const Real* gradient = input_gradients_.data();
  for (const uint8_t* window : batch) {
    for (uint32_t i = 0; i < shape_.context; ++i, gradient += shape_.embedding) {
      AddRows(gradient, 1, shape_.embedding, table + uint64_t{window[i]} * shape_.embedding);
    }
  }
}

template class LanguageModel<float>;
template class LanguageModel<double>;

}  // namespace signpost::demo
