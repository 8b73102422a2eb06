// Algorithm 1 of 1-bit Adam (arXiv:2102.02888) for all workers at once, written down from the paper
// with block-wise scales. Double precision throughout, no messages, no packing; nothing in here is
// shared with the system that it is compared to.

#ifndef SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_
#define SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/exchange_reference.h"

namespace signpost::testing {

class OneBitAdamReference {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, gamma = 1.35, variance_floor = 0.01;
    bool bias_correction = true;
    int freeze_step = 1;
    int variance_refresh_interval = 0;
    ReferenceCodec warm_up_codec = ReferenceCodec::kExact, codec = ReferenceCodec::kOneBit,
                   variance_codec = ReferenceCodec::kExact;
  };

  // `tensors`: the number of elements of each; blocks do not straddle them.
  OneBitAdamReference(int workers, std::vector<size_t> tensors, size_t block, Options options,
                      Vector parameters)
      : options_(options),
        tensors_(tensors),
        exchange_(workers, tensors, block, options.gamma),
        x_(parameters),
        m_(x_.size()),
        v_(x_.size()) {}

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const int interval = options_.variance_refresh_interval;
    const int frozen = step_ - options_.freeze_step;
    if (frozen < 0) {
      WarmUp(exchange_.Mean(gradients, options_.warm_up_codec), learning_rate, weight_decay);
    } else if (interval > 0 && frozen > 0 && frozen % interval == 0) {
      // What is lost of a gradient is so much of a momentum.
      Refresh(exchange_.MeanApart(gradients, options_.variance_codec, 1 - options_.beta1),
              learning_rate, weight_decay);
    } else {
      if (frozen == 0) Freeze();
      OneBit(gradients, learning_rate, weight_decay);
    }
    ++step_;
  }

  const Vector& parameters() const { return x_; }
  const Vector& momentum() const { return m_; }
  const Vector& worker_error(int worker) const { return exchange_.worker_error(worker); }
  double closest_decision() const { return exchange_.closest_decision(); }

 private:
  // Lines 2 to 6: Adam on the mean gradient.
  void WarmUp(const Vector& gradient, double learning_rate, double weight_decay) {
    const double t = step_ + 1;
    const double correction1 = options_.bias_correction ? 1 - std::pow(options_.beta1, t) : 1;
    const double correction2 = options_.bias_correction ? 1 - std::pow(options_.beta2, t) : 1;
    for (size_t j = 0; j < x_.size(); ++j) {
      const double g = gradient[j];
      m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
      v_[j] = options_.beta2 * v_[j] + (1 - options_.beta2) * g * g;
      const double update =
          (m_[j] / correction1) / (std::sqrt(v_[j] / correction2) + options_.epsilon);
      x_[j] -= learning_rate * (update + weight_decay * x_[j]);
    }
  }

  void Freeze() {
    const double t = options_.freeze_step;
    const double correction1 = options_.bias_correction ? 1 - std::pow(options_.beta1, t) : 1;
    const double correction2 = options_.bias_correction ? 1 - std::pow(options_.beta2, t) : 1;
    for (double& m : m_) m /= correction1;
    for (double& v : v_) v /= correction2;
    ApplyFloor();
    // What was lost of gradients is so much of a momentum.
    exchange_.ScaleErrors(1 - options_.beta1);
  }

  void ApplyFloor() {
    size_t first = 0;
    for (size_t elements : tensors_) {
      double mean = 0;
      for (size_t j = first; j < first + elements; ++j) mean += v_[j] / elements;
      for (size_t j = first; j < first + elements; ++j) {
        if (v_[j] > 0) v_[j] = std::max(v_[j], options_.variance_floor * mean);
      }
      first += elements;
    }
  }

  // What the paper does not have: the gradients travel by themselves, and the variance catches up
  // on the steps since it was last estimated.
  void Refresh(const Vector& gradient, double learning_rate, double weight_decay) {
    const double kept = std::pow(options_.beta2, options_.variance_refresh_interval);
    for (size_t j = 0; j < x_.size(); ++j) {
      const double g = gradient[j];
      m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      x_[j] -= learning_rate * (update + weight_decay * x_[j]);
      v_[j] = kept * v_[j] + (1 - kept) * g * g;
    }
    ApplyFloor();
  }

  // Lines 8 to 13: both compressions and the update with the frozen variance.
  void OneBit(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    std::vector<Vector> momenta;
    for (const Vector& gradient : gradients) {
      Vector& m = momenta.emplace_back(m_);
      for (size_t j = 0; j < m.size(); ++j) {
        m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradient[j];
      }
    }
    m_ = exchange_.Mean(momenta, options_.codec);
    for (size_t j = 0; j < x_.size(); ++j) {
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      x_[j] -= learning_rate * (update + weight_decay * x_[j]);
    }
  }

  const Options options_;
  const std::vector<size_t> tensors_;
  ExchangeReference exchange_;
  int step_ = 0;
  Vector x_, m_, v_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_
