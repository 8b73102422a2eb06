// DeepSpeed's 0/1 Adam (deepspeed/runtime/fp16/onebit/zoadam.py at 38327e0) for all workers at
// once: its counters and its order of doing things, with one scale for each tensor. Double
// precision, no messages; nothing in here is shared with the system that it is compared to.
//
// Not as there, but as docs/algorithms.md says what is followed: the mean of an interval's momenta
// travels in units of the momentum, weight decay is in none of it, synchronised parameters are
// those of the synchronisation before, stepped, an element without a variance gets no update, and
// one worker compresses, too.

#ifndef SIGNPOST_TESTS_DEEPSPEED_ZERO_ONE_ADAM_REFERENCE_H_
#define SIGNPOST_TESTS_DEEPSPEED_ZERO_ONE_ADAM_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/exchange_reference.h"

namespace signpost::testing {

class DeepSpeedZeroOneAdamReference {
 public:
  // By their names there.
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
    int var_freeze_step = 100000;
    int var_update_scaler = 16;
    int local_step_scaler = 32678;
    int local_step_clipper = 16;
  };

  DeepSpeedZeroOneAdamReference(int workers, std::vector<size_t> tensors, Options options,
                                Vector parameters)
      : options_(options),
        exchange_(workers, tensors, *std::max_element(tensors.begin(), tensors.end()), /*gamma=*/1),
        v_(parameters.size()),
        anchor_(parameters),
        workers_(workers, {parameters, Vector(parameters.size()), Vector(parameters.size())}) {}

  void Step(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    ++step_;
    if (step_ == 1) return;  // "initialize": what it has to compress is zero
    if (!freeze_key_) {
      Together(gradients, lr, weight_decay);
    } else {
      Local(gradients, lr, weight_decay);
    }
    if (step_ > options_.var_freeze_step && !freeze_key_) {
      freeze_key_ = true;
      exchange_.ScaleErrors(0);
    }
  }

  const Vector& parameters(int worker) const { return workers_[worker].x; }
  const Vector& worker_error(int worker) const { return exchange_.worker_error(worker); }
  double closest_decision() const { return exchange_.closest_decision(); }
  bool is_synchronised() const { return is_synchronised_; }

 private:
  struct Worker {
    Vector x, m, u;
  };

  double Update(const Vector& m, size_t j) const {
    return v_[j] > 0 ? m[j] / (std::sqrt(v_[j]) + options_.eps) : 0;
  }

  void Together(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    Vector& m = workers_[0].m;
    const bool is_update = step_ % var_interval_ == 0;
    const Vector g = is_update ? MeanOf(gradients) : exchange_.Mean(gradients);
    for (size_t j = 0; j < g.size(); ++j) {
      if (is_update) v_[j] = options_.beta2 * v_[j] + (1 - options_.beta2) * g[j] * g[j];
      m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * g[j];
      anchor_[j] -= lr * (Update(m, j) + weight_decay * anchor_[j]);
    }
    if (is_update && ++var_counter_ == options_.var_update_scaler) {
      var_counter_ = 0;
      var_interval_ *= 2;
    }
    const Vector momentum = m;
    for (Worker& worker : workers_) worker = {anchor_, momentum, Vector(m.size())};
  }

  void Local(const std::vector<Vector>& gradients, double lr, double weight_decay) {
    for (size_t i = 0; i < workers_.size(); ++i) {
      auto& [x, m, u] = workers_[i];
      for (size_t j = 0; j < x.size(); ++j) {
        m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradients[i][j];
        u[j] += lr * m[j];
        x[j] -= lr * (Update(m, j) + weight_decay * x[j]);
      }
    }
    lrs_ += lr;
    decays_ += lr * weight_decay;
    is_synchronised_ = step_ % local_step_interval_ == 0;
    if (is_synchronised_) {
      std::vector<Vector> means;
      for (const Worker& worker : workers_) {
        Vector& mean = means.emplace_back(worker.u);
        for (double& u : mean) u /= lrs_;
      }
      const Vector m = exchange_.Mean(means);
      for (size_t j = 0; j < m.size(); ++j) {
        anchor_[j] -= lrs_ * Update(m, j) + decays_ * anchor_[j];
      }
      for (Worker& worker : workers_) worker = {anchor_, m, Vector(m.size())};
      lrs_ = decays_ = 0;
    }
    if (++local_step_counter_ == options_.local_step_scaler) {
      local_step_counter_ = 0;
      local_step_interval_ = std::min(options_.local_step_clipper, local_step_interval_ * 2);
    }
  }

  const Options options_;
  ExchangeReference exchange_;
  int step_ = 0;
  bool freeze_key_ = false, is_synchronised_ = true;
  int var_interval_ = 1, var_counter_ = 0, local_step_interval_ = 1, local_step_counter_ = 0;
  Vector v_, anchor_;
  std::vector<Worker> workers_;
  double lrs_ = 0, decays_ = 0;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_DEEPSPEED_ZERO_ONE_ADAM_REFERENCE_H_
