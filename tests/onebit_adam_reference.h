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
    bool follows = false;     // instead of the interval
    double most_update = 10;  // with bias correction
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
        v_(x_.size()),
        mean_(tensors_.size()),
        first_(tensors_.size()) {}

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    const int frozen = step_ - options_.freeze_step;
    if (frozen < 0) {
      WarmUp(exchange_.Mean(gradients, options_.warm_up_codec), learning_rate, weight_decay);
    } else if (frozen > 0 && Refreshes()) {
      // What is lost of a gradient is so much of a momentum.
      Refresh(exchange_.MeanApart(gradients, options_.variance_codec, 1 - options_.beta1),
              learning_rate, weight_decay);
    } else {
      if (frozen == 0) Freeze();
      const bool settles = options_.follows && frozen > 0 && step_ == begin_;
      OneBit(gradients, settles ? options_.variance_codec : options_.codec, learning_rate,
             weight_decay);
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

  // The plan of a variance that follows, after a dense step of the momentum with its errors: four
  // steps after each quarter of the steps so far, or of a tensor's since its first gradient; eight
  // at once when a tensor's momentum is more than four times its gradients; 64 from a tensor's
  // first gradient on.
  bool Refreshes() {
    if (!options_.follows) {
      const int interval = options_.variance_refresh_interval;
      return interval > 0 && (step_ - options_.freeze_step) % interval == 0;
    }
    for (size_t l = 0; l < tensors_.size(); ++l) {
      const bool is_new = step_ > begin_ && step_ <= end_ && first_[l] >= begin_;
      if (is_new && mean_[l] > 0) end_ = std::max(end_, first_[l] + 64);
    }
    if (step_ == end_) {
      int youngest = 0;
      for (size_t l = 0; l < tensors_.size(); ++l) {
        if (mean_[l] > 0) youngest = std::max(youngest, first_[l]);
      }
      Plan(std::max(8, (step_ - youngest) / 4));
    } else if (step_ < begin_ && step_ >= since_ + 8 && !MomentumFits()) {
      begin_ = step_;
      end_ = step_ + 9;
    }
    if (step_ <= begin_) return false;
    for (size_t l = 0; l < tensors_.size(); ++l) {
      if (mean_[l] == 0) first_[l] = step_;
    }
    return true;
  }

  void Plan(int pause) {
    since_ = step_;
    begin_ = step_ + pause;
    end_ = begin_ + 5;
  }

  bool MomentumFits() const {
    size_t j = 0;
    for (size_t l = 0; l < tensors_.size(); ++l) {
      double squares = 0;
      for (const size_t end = j + tensors_[l]; j < end; ++j) squares += m_[j] * m_[j];
      const double momentum = std::sqrt(squares / tensors_[l]);
      if (momentum > 1e-3 * options_.epsilon && momentum > 4 * std::sqrt(mean_[l])) return false;
    }
    return true;
  }

  double Bounded(double update) const {
    if (!options_.bias_correction) return update;
    return std::clamp(update, -options_.most_update, options_.most_update);
  }

  void Freeze() {
    if (options_.follows) Plan(std::max(8, step_ / 4));
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
    for (size_t l = 0; l < tensors_.size(); ++l) {
      const size_t elements = tensors_[l];
      double mean = 0;
      for (size_t j = first; j < first + elements; ++j) mean += v_[j] / elements;
      mean_[l] = mean;
      for (size_t j = first; j < first + elements; ++j) {
        if (v_[j] > 0) v_[j] = std::max(v_[j], options_.variance_floor * mean);
      }
      first += elements;
    }
  }

  // What the paper does not have: the gradients travel by themselves, and the variance catches up
  // on the steps since it was last estimated.
  void Refresh(const Vector& gradient, double learning_rate, double weight_decay) {
    size_t end = 0;
    for (size_t l = 0; l < tensors_.size(); ++l) {
      // The steps that the old variance is of, and those that this gradient stands for.
      const int share = std::max(1, (begin_ + 5 - since_) / 4);
      const int done = step_ - begin_ - 1, in_plan = std::min(done, 4);
      int before = since_ - first_[l] + in_plan * share + (done - in_plan);
      int steps = done < 4 ? share : 1;
      const bool is_late = options_.follows && first_[l] >= begin_;
      if (is_late) {
        before = step_ - first_[l];
        steps = 1;
      }
      if (!options_.follows) {
        steps = options_.variance_refresh_interval;
        before = step_ - steps;
      }
      const bool is_still = first_[l] > 0 && step_ < first_[l] + 4;
      const double kept = std::pow(options_.beta2, steps);
      size_t j = end;
      for (end += tensors_[l]; j < end; ++j) {
        const double g = gradient[j];
        m_[j] = options_.beta1 * m_[j] + (1 - options_.beta1) * g;
        const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
        x_[j] -= learning_rate * ((is_still ? 0 : Bounded(update)) + weight_decay * x_[j]);
        if (options_.follows || options_.bias_correction) {
          const double raw = v_[j] * (1 - std::pow(options_.beta2, before));
          v_[j] =
              (kept * raw + (1 - kept) * g * g) / (1 - std::pow(options_.beta2, before + steps));
        } else {
          v_[j] = kept * v_[j] + (1 - kept) * g * g;
        }
      }
    }
    ApplyFloor();
  }

  // Lines 8 to 13: both compressions and the update with the frozen variance.
  void OneBit(const std::vector<Vector>& gradients, ReferenceCodec codec, double learning_rate,
              double weight_decay) {
    std::vector<Vector> momenta;
    for (const Vector& gradient : gradients) {
      Vector& m = momenta.emplace_back(m_);
      for (size_t j = 0; j < m.size(); ++j) {
        m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradient[j];
      }
    }
    m_ = codec == options_.codec ? exchange_.Mean(momenta, codec)
                                 : exchange_.MeanWithErrors(momenta, codec);
    for (size_t j = 0; j < x_.size(); ++j) {
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
      x_[j] -= learning_rate * (Bounded(update) + weight_decay * x_[j]);
    }
  }

  const Options options_;
  const std::vector<size_t> tensors_;
  ExchangeReference exchange_;
  int step_ = 0;
  Vector x_, m_, v_;
  Vector mean_;             // of each tensor's variance, when it was frozen last
  std::vector<int> first_;  // by tensor, the step of its first gradient, or 0
  int since_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_ONEBIT_ADAM_REFERENCE_H_
