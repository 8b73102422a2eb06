// Algorithm 1 of 1-bit Adam (arXiv:2102.02888) for all workers at once, written down from the paper
// with block-wise scales (S = gamma * ||u||_2 / sqrt(length)). Double precision throughout, no
// messages, no packing; nothing in here is shared with the system that it is compared to.

#ifndef SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_
#define SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace signpost::testing {

using Vector = std::vector<double>;

class OneBitAdamReference {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, gamma = 1.35, variance_floor = 0.01;
    bool bias_correction = true;
    int freeze_step = 1;
    int variance_refresh_interval = 0;
  };

  // `tensors`: the number of elements of each; blocks do not straddle them.
  OneBitAdamReference(int workers, std::vector<size_t> tensors, size_t block, Options options,
                      Vector parameters)
      : options_(options),
        tensors_(tensors),
        block_(block),
        x_(parameters),
        m_(x_.size()),
        v_(x_.size()),
        worker_error_(workers, Vector(x_.size())),
        server_error_(x_.size()) {}

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const int interval = options_.variance_refresh_interval;
    const int frozen = step_ - options_.freeze_step;
    if (frozen < 0) {
      WarmUp(gradients, learning_rate, weight_decay);
    } else if (interval > 0 && frozen > 0 && frozen % interval == 0) {
      Refresh(gradients, learning_rate, weight_decay);
    } else {
      if (frozen == 0) Freeze();
      OneBit(gradients, learning_rate, weight_decay);
    }
    ++step_;
  }

  const Vector& parameters() const { return x_; }
  const Vector& momentum() const { return m_; }
  const Vector& worker_error(int worker) const { return worker_error_[worker]; }

  // The smallest |u| / S that was ever compressed. Where it is not far above fp32's rounding, the
  // sign that fp32 sees can be another one, and a comparison means nothing.
  double closest_decision() const { return closest_decision_; }

 private:
  // Lines 2 to 6: Adam on the mean gradient.
  void WarmUp(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const double t = step_ + 1;
    const double correction1 = options_.bias_correction ? 1 - std::pow(options_.beta1, t) : 1;
    const double correction2 = options_.bias_correction ? 1 - std::pow(options_.beta2, t) : 1;
    for (size_t j = 0; j < x_.size(); ++j) {
      double g = 0;
      for (const Vector& gradient : gradients) g += gradient[j] / gradients.size();
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

  // What the paper does not have: the gradients travel as they are, and the variance catches up on
  // the steps since it was last estimated.
  void Refresh(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const double kept = std::pow(options_.beta2, options_.variance_refresh_interval);
    for (size_t j = 0; j < x_.size(); ++j) {
      double g = 0;
      for (const Vector& gradient : gradients) g += gradient[j] / gradients.size();
      m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      x_[j] -= learning_rate * (update + weight_decay * x_[j]);
      v_[j] = kept * v_[j] + (1 - kept) * g * g;
    }
    ApplyFloor();
  }

  // Lines 8 to 13: both compressions and the update with the frozen variance.
  void OneBit(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    Vector mean(x_.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      Vector u(x_.size());
      for (size_t j = 0; j < x_.size(); ++j) {
        u[j] =
            options_.beta1 * m_[j] + (1 - options_.beta1) * gradients[i][j] + worker_error_[i][j];
      }
      const Vector compressed = Compress(u, worker_error_[i]);
      for (size_t j = 0; j < x_.size(); ++j) mean[j] += compressed[j] / gradients.size();
    }
    for (size_t j = 0; j < x_.size(); ++j) mean[j] += server_error_[j];
    m_ = Compress(mean, server_error_);
    for (size_t j = 0; j < x_.size(); ++j) {
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      x_[j] -= learning_rate * (update + weight_decay * x_[j]);
    }
  }

  // S * sign(u) per block; `error` becomes what that loses.
  Vector Compress(const Vector& u, Vector& error) {
    Vector compressed(u.size());
    size_t first = 0;
    for (size_t elements : tensors_) {
      const size_t end = first + elements;
      for (; first < end; first = std::min(first + block_, end)) {
        const size_t block_end = std::min(first + block_, end);
        double squares = 0;
        for (size_t j = first; j < block_end; ++j) squares += u[j] * u[j];
        const double scale = options_.gamma * std::sqrt(squares / (block_end - first));
        for (size_t j = first; j < block_end; ++j) {
          compressed[j] = std::signbit(u[j]) ? -scale : scale;
          error[j] = u[j] - compressed[j];
          if (scale > 0) closest_decision_ = std::min(closest_decision_, std::abs(u[j]) / scale);
        }
      }
    }
    return compressed;
  }

  const Options options_;
  const std::vector<size_t> tensors_;
  const size_t block_;
  int step_ = 0;
  Vector x_, m_, v_;
  std::vector<Vector> worker_error_;
  Vector server_error_;
  double closest_decision_ = 1;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_
