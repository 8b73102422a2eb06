// 0/1 Adam (arXiv:2202.06009, Algorithm 1) for all workers at once, written down from the paper:
// adaptive variance updates with one-bit rounds of the gradient between them; then a frozen
// variance, local steps, and one-bit rounds that synchronise the workers. Double precision
// throughout, no messages, no packing; nothing in here is shared with the system that it is
// compared to.
//
// Steps count from 0. The variance is updated in steps k_0 = 0 and k_{j+1} = k_j + 2^floor(j/kappa)
// with kappa = var_update_scaler, before step var_freeze_step. From there on workers synchronise
// every H steps, H = min(2^floor(c / local_step_scaler), local_step_clipper), where c is the number
// of steps since var_freeze_step when they last did; H = 1 to begin with.
//
// Otherwise than in the paper:
//
// The mean of an interval's momenta travels, weighted by learning rates: the paper's accumulated
// update u divided by the sum of these. So the answer is the new momentum, errors are in units of
// the momentum whatever learning rate and interval do, and nothing is divided by a sum of zero.
//
// Weight decay is decoupled. Local steps have theirs; synchronised parameters are the last ones,
// decayed by the sum of the interval's learning rate times weight decay. No momentum has any of it.
//
// An update of the variance stands for all steps since the last one: with K of them
// v = beta2^K v + (1 - beta2^K) g^2. The bias correction is then Adam's for the step of the update.
//
// Once there have been rounds without an update of the variance, variances count as at least a
// fraction of their tensor's mean. An element that has none gets no update, unless what updates the
// variance travels in a codec that loses something: it may have been taken for zero each time, and
// counts as that fraction too.
//
// Before var_freeze_step one-bit rounds are of gradients, as in DeepSpeed. Errors go on from there
// in units of the momentum, of which a gradient is 1 - beta1; or are reset, as in DeepSpeed.
//
// The only decisions are those of codecs (exchange_reference.h); all else is continuous. The sum u
// is rounded once per step, so the mean of H momenta has at most H + 2 roundings of the largest of
// them.

#ifndef SIGNPOST_TESTS_ZERO_ONE_ADAM_REFERENCE_H_
#define SIGNPOST_TESTS_ZERO_ONE_ADAM_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/exchange_reference.h"

namespace signpost::testing {

class ZeroOneAdamReference {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, gamma = 1.35, variance_floor = 0.01;
    bool bias_correction = true;
    double most_update = 10;  // after var_freeze_step, with bias correction
    int var_freeze_step = 1;
    int var_update_scaler = 16;
    int local_step_scaler = 1000;
    int local_step_clipper = 16;
    bool resets_errors = false;  // at var_freeze_step
    ReferenceCodec codec = ReferenceCodec::kOneBit, variance_codec = ReferenceCodec::kExact;
  };

  // `tensors`: the number of elements of each; blocks do not straddle them.
  ZeroOneAdamReference(int workers, std::vector<size_t> tensors, size_t block, Options options,
                       Vector parameters)
      : options_(options),
        tensors_(tensors),
        block_(block),
        exchange_(workers, tensors, block, options.gamma),
        v_(parameters.size()),
        anchor_(parameters),
        workers_(workers, {parameters, Vector(parameters.size()), Vector(parameters.size())}) {}

  // gradients[i] is worker i's, at parameters(i).
  void Step(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    if (step_ < options_.var_freeze_step) {
      Together(gradients, learning_rate, weight_decay);
    } else {
      if (step_ == options_.var_freeze_step) Freeze();
      Local(gradients, learning_rate, weight_decay);
    }
    ++step_;
  }

  const Vector& parameters(int worker) const { return workers_[worker].x; }
  const Vector& momentum(int worker) const { return workers_[worker].m; }
  // Sum of learning rate times momentum since the last synchronisation.
  const Vector& accumulated(int worker) const { return workers_[worker].u; }
  const Vector& anchor() const { return anchor_; }  // the last synchronised parameters
  const Vector& variance() const { return v_; }
  const Vector& worker_error(int worker) const { return exchange_.worker_error(worker); }
  const Vector& server_error() const { return exchange_.server_error(); }
  double closest_decision() const { return exchange_.closest_decision(); }

  // Whether all workers have the same after the last step.
  bool is_synchronised() const { return step_ - 1 == synchronised_; }
  // What a worker has sent so far, in bits per parameter.
  double sent_bits() const { return sent_bits_; }

 private:
  struct Worker {
    Vector x, m, u;
  };

  double Correction(double beta, double t) const {
    return options_.bias_correction ? 1 - std::pow(beta, t) : 1;
  }

  // Before var_freeze_step all workers have the same after every step.
  void Together(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    // Of the variance before this step, once there are one-bit rounds.
    const Vector floor = gap_ > 1 ? Floor() : Vector(v_.size());
    Vector g;
    if (step_ == next_update_) {
      g = exchange_.MeanApart(gradients, options_.variance_codec, /*unit=*/1);
      sent_bits_ += BitsOf(options_.variance_codec);
      UpdateVariance(g);
    } else {
      g = exchange_.Mean(gradients, options_.codec);
      sent_bits_ += BitsOf(options_.codec);
    }
    const double correction1 = Correction(options_.beta1, step_ + 1);
    const double correction2 = Correction(options_.beta2, updated_ + 1);
    Vector& x = anchor_;
    Vector& m = workers_[0].m;
    for (size_t j = 0; j < x.size(); ++j) {
      m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * g[j];
      const double v = Lifts() || v_[j] > 0 ? std::max(v_[j] / correction2, floor[j]) : 0;
      const double update = v > 0 ? (m[j] / correction1) / (std::sqrt(v) + options_.epsilon) : 0;
      x[j] -= learning_rate * (update + weight_decay * x[j]);
    }
    Synchronise(m);
  }

  void UpdateVariance(const Vector& g) {
    const double kept = std::pow(options_.beta2, step_ - updated_);
    for (size_t j = 0; j < v_.size(); ++j) v_[j] = kept * v_[j] + (1 - kept) * g[j] * g[j];
    updated_ = step_;
    gap_ = 1 << (updates_ / options_.var_update_scaler);
    next_update_ += gap_;
    ++updates_;
  }

  // The least that each element's corrected variance counts as.
  Vector Floor() const {
    const double correction2 = Correction(options_.beta2, updated_ + 1);
    Vector floor(v_.size());
    size_t first = 0;
    for (size_t elements : tensors_) {
      double mean = 0;
      for (size_t j = first; j < first + elements; ++j) mean += v_[j] / correction2 / elements;
      for (size_t j = first; j < first + elements; ++j) floor[j] = options_.variance_floor * mean;
      first += elements;
    }
    return floor;
  }

  // Bias corrections and floor, once and for good.
  void Freeze() {
    const double correction1 = Correction(options_.beta1, step_);
    const double correction2 = Correction(options_.beta2, updated_ + 1);
    const Vector floor = Floor();
    for (size_t j = 0; j < v_.size(); ++j) {
      for (Worker& worker : workers_) worker.m[j] /= correction1;
      if (Lifts() || v_[j] > 0) v_[j] = std::max(v_[j] / correction2, floor[j]);
    }
    exchange_.ScaleErrors(options_.resets_errors ? 0 : 1 - options_.beta1);
  }

  // Algorithm 1, lines 3 to 13.
  void Local(const std::vector<Vector>& gradients, double learning_rate, double weight_decay) {
    for (size_t i = 0; i < workers_.size(); ++i) {
      auto& [x, m, u] = workers_[i];
      for (size_t j = 0; j < x.size(); ++j) {
        m[j] = options_.beta1 * m[j] + (1 - options_.beta1) * gradients[i][j];
        u[j] += learning_rate * m[j];
        x[j] -= learning_rate * (Preconditioned(m, j) + weight_decay * x[j]);
      }
    }
    sum_of_rates_ += learning_rate;
    sum_of_decays_ += learning_rate * weight_decay;
    const int interval = std::min<double>(
        std::pow(2, (synchronised_ + 1 - options_.var_freeze_step) / options_.local_step_scaler),
        options_.local_step_clipper);
    if (step_ - synchronised_ < interval) return;

    std::vector<Vector> means;
    for (const Worker& worker : workers_) {
      Vector& mean = means.emplace_back(worker.m);
      if (sum_of_rates_ == 0) continue;  // all weights are zero: as well equal
      for (size_t j = 0; j < mean.size(); ++j) mean[j] = worker.u[j] / sum_of_rates_;
    }
    const Vector m = exchange_.Mean(means, options_.codec);
    sent_bits_ += BitsOf(options_.codec);
    for (size_t j = 0; j < m.size(); ++j) {
      anchor_[j] -= sum_of_rates_ * Preconditioned(m, j) + sum_of_decays_ * anchor_[j];
    }
    Synchronise(m);
  }

  double Preconditioned(const Vector& m, size_t j) const {
    const double update = v_[j] > 0 ? m[j] / (std::sqrt(v_[j]) + options_.epsilon) : 0;
    if (!options_.bias_correction) return update;
    return std::clamp(update, -options_.most_update, options_.most_update);
  }

  // All workers are where anchor_ is.
  void Synchronise(const Vector& momentum) {
    const Vector m = momentum;
    for (Worker& worker : workers_) worker = {anchor_, m, Vector(m.size())};
    sum_of_rates_ = sum_of_decays_ = 0;
    synchronised_ = step_;
  }

  // Whether elements without a variance have had gradients perhaps.
  bool Lifts() const { return options_.variance_codec != ReferenceCodec::kExact; }

  // Per parameter, of a round.
  double BitsOf(ReferenceCodec codec) const {
    if (codec == ReferenceCodec::kExact) return 32;
    double blocks = 0, elements = 0;
    for (size_t tensor : tensors_) {
      blocks += (tensor + block_ - 1) / block_;
      elements += tensor;
    }
    const int bits =
        codec == ReferenceCodec::kOneBit ? 1 : (codec == ReferenceCodec::kInt4 ? 4 : 8);
    return bits + 32 * blocks / elements;
  }

  const Options options_;
  const std::vector<size_t> tensors_;
  const size_t block_;
  ExchangeReference exchange_;
  int step_ = 0;
  Vector v_;
  int updates_ = 0, updated_ = -1, next_update_ = 0, gap_ = 1;  // of the variance
  Vector anchor_;
  std::vector<Worker> workers_;
  int synchronised_ = -1;  // the last step after which all workers had the same
  double sum_of_rates_ = 0, sum_of_decays_ = 0;
  double sent_bits_ = 0;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_ZERO_ONE_ADAM_REFERENCE_H_
