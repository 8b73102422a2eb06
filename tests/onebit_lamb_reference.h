// 1-bit LAMB (arXiv:2104.06069, Algorithm 2) for all workers at once, written down from the paper:
// LAMB (arXiv:1904.00962) until the freeze step, then one-bit rounds of the momentum, in which each
// tensor's step is the frozen mean of its trust ratios times a factor that follows a variance
// estimated from the momentum itself. Double precision throughout, no messages, no packing; nothing
// in here is shared with the system that it is compared to.
//
// Added to the paper: bias corrections, decoupled weight decay inside the trust ratio and its share
// of the factor (both as in DeepSpeed), the variance floor, block-wise scales, and what happens to
// norms and variances that are zero.
//
// Left out of the paper: scaling tensors' momenta to a common size before compression. Blocks do
// not straddle tensors, a block's signs do not change when it is multiplied by c > 0, and its scale
// and error are multiplied by c: what comes back, divided by c again, is what came without.
//
// Ratios, factors and the maximum are continuous in what goes in, so fp32 is compared within its
// rounding, where the signs are the same. The reconstructed gradient takes the momenta's rounding
// times (1 + beta1) / (1 - beta1), and the fresh variance, as its square, twice that, relatively.

#ifndef SIGNPOST_TESTS_ONEBIT_LAMB_REFERENCE_H_
#define SIGNPOST_TESTS_ONEBIT_LAMB_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/exchange_reference.h"

namespace signpost::testing {

class OneBitLambReference {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, gamma = 1.35, variance_floor = 0.01;
    bool bias_correction = true;  // of momentum, variance and the mean of the trust ratios
    int freeze_step = 1;
    int variance_refresh_interval = 0;
    ReferenceCodec warm_up_codec = ReferenceCodec::kExact, codec = ReferenceCodec::kOneBit,
                   variance_codec = ReferenceCodec::kExact;
    double max_coeff = 10, min_coeff = 0.01, coeff_beta = 0.9;
    double factor_max = 4, factor_min = 0.5, factor_threshold = 0.1;
    double most_update = 10;  // after the freeze, with bias correction
  };

  // `tensors`: the number of elements of each; blocks do not straddle them.
  OneBitLambReference(int workers, std::vector<size_t> tensors, size_t block, Options options,
                      Vector parameters)
      : options_(options),
        exchange_(workers, tensors, block, options.gamma),
        x_(parameters),
        m_(x_.size()),
        v_(x_.size()),
        fresh_v_(x_.size()) {
    size_t first = 0;
    for (size_t elements : tensors) {
      tensors_.push_back({first, first + elements});
      first += elements;
    }
  }

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const int frozen = step_ - options_.freeze_step;
    if (frozen < 0) {
      WarmUp(exchange_.Mean(gradients, options_.warm_up_codec), learning_rate, weight_decay);
    } else if (Refreshes(frozen)) {
      // What is lost of a gradient is so much of a momentum.
      Refresh(exchange_.MeanApart(gradients, options_.variance_codec, 1 - options_.beta1),
              learning_rate, weight_decay);
    } else {
      if (frozen == 0) Freeze();
      if (Refreshes(frozen - 1)) StartAnew();
      OneBit(gradients, learning_rate, weight_decay);
    }
    ++step_;
  }

  const Vector& parameters() const { return x_; }
  const Vector& momentum() const { return m_; }
  const Vector& fresh_variance() const { return fresh_v_; }  // from the freeze step on
  const Vector& worker_error(int worker) const { return exchange_.worker_error(worker); }
  const Vector& server_error() const { return exchange_.server_error(); }
  // What the tensor's last update was multiplied by, the learning rate apart.
  double coefficient(size_t tensor) const { return tensors_[tensor].coefficient; }
  double factor(size_t tensor) const { return tensors_[tensor].factor; }
  double closest_decision() const { return exchange_.closest_decision(); }

 private:
  struct Tensor {
    size_t first, end;
    // The moving average of the trust ratios, and of 1, by which it is divided.
    double average = 0, weight = 0;
    double frozen_coefficient = 1;
    double factor = 1;
    double coefficient = 1;
  };

  double Correction(double beta, double t) const {
    return options_.bias_correction ? 1 - std::pow(beta, t) : 1;
  }

  bool Refreshes(int frozen) const {
    const int interval = options_.variance_refresh_interval;
    return interval > 0 && frozen > 0 && frozen % interval == 0;
  }

  // LAMB on the mean gradient, and the moving average of each tensor's trust ratio.
  void WarmUp(const Vector& gradient, double learning_rate, double weight_decay) {
    const double correction1 = Correction(options_.beta1, step_ + 1);
    const double correction2 = Correction(options_.beta2, step_ + 1);
    Vector update(x_.size());
    for (size_t j = 0; j < x_.size(); ++j) {
      const double g = gradient[j];
      m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
      v_[j] = options_.beta2 * v_[j] + (1 - options_.beta2) * g * g;
      update[j] = (m_[j] / correction1) / (std::sqrt(v_[j] / correction2) + options_.epsilon) +
                  weight_decay * x_[j];
    }
    for (Tensor& tensor : tensors_) {
      tensor.coefficient = 1;
      const double norm = Norm(x_, tensor), update_norm = Norm(update, tensor);
      if (norm > 0 && update_norm > 0) {
        tensor.coefficient = std::clamp(norm / update_norm, options_.min_coeff, options_.max_coeff);
        const double beta = options_.coeff_beta;
        tensor.average = beta * tensor.average + (1 - beta) * tensor.coefficient;
        tensor.weight = beta * tensor.weight + (1 - beta);
      }
      Update(tensor, learning_rate, update);
    }
  }

  void Freeze() {
    const double correction1 = Correction(options_.beta1, options_.freeze_step);
    const double correction2 = Correction(options_.beta2, options_.freeze_step);
    for (double& m : m_) m /= correction1;
    for (double& v : v_) v /= correction2;
    for (Tensor& tensor : tensors_) {
      // A tensor that never had a trust ratio keeps LAMB's 1.
      if (tensor.weight > 0) {
        tensor.frozen_coefficient = tensor.average / (options_.bias_correction ? tensor.weight : 1);
      }
    }
    // What was lost of gradients is so much of a momentum.
    exchange_.ScaleErrors(1 - options_.beta1);
    StartAnew();
  }

  // With a variance that is frozen from here on.
  void StartAnew() {
    for (Tensor& tensor : tensors_) {
      double mean = 0;
      for (size_t j = tensor.first; j < tensor.end; ++j) {
        mean += v_[j] / (tensor.end - tensor.first);
      }
      for (size_t j = tensor.first; j < tensor.end; ++j) {
        if (v_[j] > 0) v_[j] = std::max(v_[j], options_.variance_floor * mean);
      }
      tensor.factor = 1;
    }
    fresh_v_ = v_;
  }

  // What the paper does not have: the gradients travel by themselves, the variance catches up on
  // the steps since it was last estimated, and trust ratios are the last step's.
  void Refresh(const Vector& gradient, double learning_rate, double weight_decay) {
    const double kept = std::pow(options_.beta2, options_.variance_refresh_interval);
    Vector update(x_.size());
    for (size_t j = 0; j < x_.size(); ++j) {
      const double g = gradient[j];
      m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
      const double adam = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      update[j] = Bounded(adam) + weight_decay * x_[j];
      // Corrected for its start: it has been the mean of all steps but the last ones.
      const double before = Correction(options_.beta2, step_ - options_.variance_refresh_interval);
      v_[j] = (kept * before * v_[j] + (1 - kept) * g * g) / Correction(options_.beta2, step_);
    }
    for (const Tensor& tensor : tensors_) Update(tensor, learning_rate, update);
  }

  void OneBit(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    std::vector<Vector> momenta;
    for (const Vector& gradient : gradients) {
      Vector& m = momenta.emplace_back(m_);
      for (size_t j = 0; j < m.size(); ++j) {
        m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradient[j];
      }
    }
    const Vector last = m_;
    m_ = exchange_.Mean(momenta, options_.codec);

    Vector adam(x_.size()), update(x_.size()), bounded(x_.size());
    for (size_t j = 0; j < x_.size(); ++j) {
      // What has no variance gets no update, and no say in the factor.
      if (v_[j] > 0) {
        const double g = (m_[j] - options_.beta1 * last[j]) / (1 - options_.beta1);
        fresh_v_[j] = options_.beta2 * fresh_v_[j] + (1 - options_.beta2) * g * g;
        adam[j] = m_[j] / (std::sqrt(v_[j]) + options_.epsilon);
      }
      update[j] = adam[j] + weight_decay * x_[j];
      bounded[j] = Bounded(adam[j]) + weight_decay * x_[j];
    }
    for (Tensor& tensor : tensors_) {
      tensor.factor = Factor(tensor, adam, update);
      tensor.coefficient = tensor.frozen_coefficient * tensor.factor;
      Update(tensor, learning_rate, bounded);
    }
  }

  double Bounded(double update) const {
    if (!options_.bias_correction) return update;
    return std::clamp(update, -options_.most_update, options_.most_update);
  }

  double Factor(const Tensor& tensor, const Vector& adam, const Vector& update) const {
    double factor = 0;
    for (size_t j = tensor.first; j < tensor.end; ++j) {
      if (v_[j] > 0) {
        factor = std::max(factor, (std::sqrt(v_[j]) + options_.epsilon) /
                                      (std::sqrt(fresh_v_[j]) + options_.epsilon));
      }
    }
    // Weight decay does not depend on the variance: its share of the update keeps a factor of 1.
    const double update_norm = Norm(update, tensor);
    const double share = update_norm > 0 ? std::min(1.0, Norm(adam, tensor) / update_norm) : 0;
    factor = factor * share + (1 - share);
    factor = std::clamp(factor, options_.factor_min, options_.factor_max);
    return std::clamp(factor, tensor.factor * (1 - options_.factor_threshold),
                      tensor.factor * (1 + options_.factor_threshold));
  }

  void Update(const Tensor& tensor, double learning_rate, const Vector& update) {
    for (size_t j = tensor.first; j < tensor.end; ++j) {
      x_[j] -= learning_rate * tensor.coefficient * update[j];
    }
  }

  static double Norm(const Vector& vector, const Tensor& tensor) {
    double squares = 0;
    for (size_t j = tensor.first; j < tensor.end; ++j) squares += vector[j] * vector[j];
    return std::sqrt(squares);
  }

  const Options options_;
  ExchangeReference exchange_;
  std::vector<Tensor> tensors_;
  int step_ = 0;
  Vector x_, m_, v_, fresh_v_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_ONEBIT_LAMB_REFERENCE_H_
