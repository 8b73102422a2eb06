// DeepSpeed's 1-bit LAMB (deepspeed/runtime/fp16/onebit/lamb.py at 38327e0) for all workers at
// once: its counters and its order of doing things, tensors' momenta of a common size included.
// Double precision, no messages; nothing in here is shared with the system that it is compared to.
//
// Not as there, but as docs/algorithms.md says what is followed: an element without a variance gets
// no update, and has no say in the factor; a trust ratio that is clipped to 1 is part of the mean,
// and a tensor that never had one keeps 1; and buffers, unless they are kAsThere, are one for each
// tensor instead of one for all, exchanged as deepspeed_allreduce_reference.h says. There the zeros
// that follow the one buffer do not stay zeros, but keep the last answer, which this does not have.

#ifndef SIGNPOST_TESTS_DEEPSPEED_ONEBIT_LAMB_REFERENCE_H_
#define SIGNPOST_TESTS_DEEPSPEED_ONEBIT_LAMB_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/deepspeed_allreduce_reference.h"

namespace signpost::testing {

class DeepSpeedOneBitLambReference {
 public:
  // By their names there.
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
    int freeze_step = 100000;
    double max_coeff = 10, min_coeff = 0.01, coeff_beta = 0.9;
    double factor_max = 4, factor_min = 0.5, factor_threshold = 0.1;
    DeepSpeedBuffers buffers = DeepSpeedBuffers::kAsFollowed;
  };

  DeepSpeedOneBitLambReference(size_t workers, const std::vector<size_t>& tensors, Options options,
                               Vector parameters)
      : options_(options),
        allreduce_(workers,
                   options.buffers == DeepSpeedBuffers::kAsFollowed
                       ? tensors
                       : std::vector<size_t>{parameters.size()},
                   options.buffers),
        x_(parameters),
        m_(x_.size()),
        v_(x_.size()),
        fresh_v_(x_.size()) {
    size_t first = 0;
    for (const size_t elements : tensors) {
      tensors_.push_back({.first = first, .end = first + elements});
      first += elements;
    }
  }

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    ++step_;
    if (step_ == 1) return;  // "initialize": what it has to compress is zero
    if (!lamb_freeze_key_) {
      WarmUp(MeanOf(gradients), lr, weight_decay);
    } else {
      Compressed(gradients, lr, weight_decay);
    }
    if (step_ >= options_.freeze_step) lamb_freeze_key_ = true;
  }

  const Vector& parameters() const { return x_; }
  const Vector& momentum() const { return m_; }
  // One of those that get_lamb_coeffs returns there: what the tensor's last update was multiplied
  // by, the learning rate apart.
  double lamb_coeff(size_t tensor) const { return tensors_[tensor].lamb_coeff; }
  double closest_decision() const { return allreduce_.closest_decision(); }

 private:
  struct Tensor {
    size_t first, end;
    bool has_ratio = false;
    double lamb_coeff_freeze = 0, last_factor = 1, scaling_coeff = 0;
    double lamb_coeff = 1;
  };

  void WarmUp(const Vector& g, double lr, double weight_decay) {
    m_ = MomentumWith(g);
    for (size_t j = 0; j < g.size(); ++j) {
      v_[j] = options_.beta2 * v_[j] + (1 - options_.beta2) * g[j] * g[j];
    }
    if (step_ == options_.freeze_step) fresh_v_ = v_;
    const Vector update = Sum(AdamUpdate(), weight_decay);
    for (Tensor& tensor : tensors_) {
      const double weight_norm = Norm(x_, tensor), update_norm = Norm(update, tensor);
      tensor.lamb_coeff = 1;
      if (weight_norm != 0 && update_norm != 0) {
        tensor.lamb_coeff = std::min(weight_norm / update_norm, options_.max_coeff);
        tensor.lamb_coeff = std::max(tensor.lamb_coeff, options_.min_coeff);
        tensor.lamb_coeff_freeze = options_.coeff_beta * tensor.lamb_coeff_freeze +
                                   (1 - options_.coeff_beta) * tensor.lamb_coeff;
        tensor.has_ratio = true;
      }
      Move(tensor, lr, update);
    }
  }

  void Compressed(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    if (step_ == options_.freeze_step + 1) ScaleMomenta();
    std::vector<Vector> momenta;
    for (const Vector& g : gradients) {
      Vector& m = momenta.emplace_back(MomentumWith(g));
      ForEach([&](const Tensor& tensor, size_t j) { m[j] *= tensor.scaling_coeff; });
    }
    const Vector last_m = m_;
    m_ = allreduce_.Mean(momenta);
    ForEach([&](const Tensor& tensor, size_t j) { m_[j] /= tensor.scaling_coeff; });
    for (size_t j = 0; j < m_.size(); ++j) {
      const double g = (m_[j] - options_.beta1 * last_m[j]) / (1 - options_.beta1);
      fresh_v_[j] = options_.beta2 * fresh_v_[j] + (1 - options_.beta2) * g * g;
    }
    const Vector adam = AdamUpdate(), update = Sum(adam, weight_decay);
    for (Tensor& tensor : tensors_) {
      double factor = LargestQuotient(tensor);
      if (weight_decay > 0) {
        const double share = std::min(1.0, Norm(adam, tensor) / Norm(update, tensor));
        factor = factor * share + (1 - share);
      }
      factor = std::max(std::min(factor, options_.factor_max), options_.factor_min);
      factor = std::min(factor, tensor.last_factor * (1 + options_.factor_threshold));
      factor = std::max(factor, tensor.last_factor * (1 - options_.factor_threshold));
      tensor.last_factor = factor;
      tensor.lamb_coeff = (tensor.has_ratio ? tensor.lamb_coeff_freeze : 1) * factor;
      Move(tensor, lr, update);
    }
  }

  // By what each tensor's momentum is multiplied to have the mean of their root mean squares.
  void ScaleMomenta() {
    double united_scale = 0;
    for (const Tensor& tensor : tensors_) united_scale += RootMeanSquare(m_, tensor);
    united_scale /= tensors_.size();
    for (Tensor& tensor : tensors_) {
      tensor.scaling_coeff = united_scale / RootMeanSquare(m_, tensor);
    }
  }

  double LargestQuotient(const Tensor& tensor) const {
    double largest = 0;
    for (size_t j = tensor.first; j < tensor.end; ++j) {
      if (v_[j] == 0) continue;
      largest = std::max(
          largest, (std::sqrt(v_[j]) + options_.eps) / (std::sqrt(fresh_v_[j]) + options_.eps));
    }
    return largest;
  }

  Vector MomentumWith(const Vector& gradient) const {
    Vector m = m_;
    for (size_t j = 0; j < m.size(); ++j) {
      m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradient[j];
    }
    return m;
  }

  Vector AdamUpdate() const {
    Vector update(m_.size());
    for (size_t j = 0; j < m_.size(); ++j) {
      if (v_[j] > 0) update[j] = m_[j] / (std::sqrt(v_[j]) + options_.eps);
    }
    return update;
  }

  Vector Sum(Vector update, double weight_decay) const {
    for (size_t j = 0; j < x_.size(); ++j) update[j] += weight_decay * x_[j];
    return update;
  }

  void Move(const Tensor& tensor, double lr, const Vector& update) {
    for (size_t j = tensor.first; j < tensor.end; ++j) x_[j] -= lr * tensor.lamb_coeff * update[j];
  }

  template <class Do>
  void ForEach(Do what) const {
    for (const Tensor& tensor : tensors_) {
      for (size_t j = tensor.first; j < tensor.end; ++j) what(tensor, j);
    }
  }

  static double Norm(const Vector& vector, const Tensor& tensor) {
    double squares = 0;
    for (size_t j = tensor.first; j < tensor.end; ++j) squares += vector[j] * vector[j];
    return std::sqrt(squares);
  }

  static double RootMeanSquare(const Vector& vector, const Tensor& tensor) {
    return Norm(vector, tensor) / std::sqrt(tensor.end - tensor.first);
  }

  const Options options_;
  DeepSpeedAllreduceReference allreduce_;
  std::vector<Tensor> tensors_;
  int step_ = 0;
  bool lamb_freeze_key_ = false;
  Vector x_, m_, v_, fresh_v_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_DEEPSPEED_ONEBIT_LAMB_REFERENCE_H_
