// DeepSpeed's 1-bit Adam (deepspeed/runtime/fp16/onebit/adam.py at 38327e0) for all workers at
// once: its counters and its order of doing things. Double precision, no messages; nothing in here
// is shared with the system that it is compared to.
//
// Not as there, but as docs/algorithms.md says what is followed: an element without a variance gets
// no update, and buffers, unless they are kAsThere, are exchanged as
// deepspeed_allreduce_reference.h says. What a group can have there, `non_freeze` or a mask of the
// momentum, is not had.

#ifndef SIGNPOST_TESTS_DEEPSPEED_ONEBIT_ADAM_REFERENCE_H_
#define SIGNPOST_TESTS_DEEPSPEED_ONEBIT_ADAM_REFERENCE_H_

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/deepspeed_allreduce_reference.h"

namespace signpost::testing {

class DeepSpeedOneBitAdamReference {
 public:
  // By their names there.
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
    int freeze_step = 100000;
    DeepSpeedBuffers buffers = DeepSpeedBuffers::kAsFollowed;
  };

  DeepSpeedOneBitAdamReference(size_t workers, const std::vector<size_t>& tensors, Options options,
                               Vector parameters)
      : options_(options),
        allreduce_(workers, tensors, options.buffers),
        x_(parameters),
        m_(x_.size()),
        v_(x_.size()) {}

  // gradients[i] is worker i's.
  void Step(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    ++step_;
    if (step_ == 1) return;  // "initialize": what it has to compress is zero
    if (!adam_freeze_key_) {
      const Vector g = MeanOf(gradients);
      for (size_t j = 0; j < g.size(); ++j) {
        v_[j] = options_.beta2 * v_[j] + (1 - options_.beta2) * g[j] * g[j];
      }
      m_ = MomentumWith(g);
    } else {
      std::vector<Vector> momenta;
      for (const Vector& g : gradients) momenta.push_back(MomentumWith(g));
      m_ = allreduce_.Mean(momenta);
    }
    for (size_t j = 0; j < x_.size(); ++j) {
      const double update = v_[j] > 0 ? m_[j] / (std::sqrt(v_[j]) + options_.eps) : 0;
      x_[j] -= lr * (update + weight_decay * x_[j]);
    }
    if (step_ >= options_.freeze_step) adam_freeze_key_ = true;
  }

  const Vector& parameters() const { return x_; }
  const Vector& momentum() const { return m_; }
  double closest_decision() const { return allreduce_.closest_decision(); }

 private:
  Vector MomentumWith(const Vector& gradient) const {
    Vector m = m_;
    for (size_t j = 0; j < m.size(); ++j) {
      m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradient[j];
    }
    return m;
  }

  const Options options_;
  DeepSpeedAllreduceReference allreduce_;
  int step_ = 0;
  bool adam_freeze_key_ = false;
  Vector x_, m_, v_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_DEEPSPEED_ONEBIT_ADAM_REFERENCE_H_
