// The two-phase exchange of 1-bit Adam (arXiv:2102.02888) for all workers at once: each compresses
// what it has to one bit per element with a scale for each block, S = gamma * ||u||_2 /
// sqrt(length), and so does the aggregator with their mean; what compression loses stays with the
// side that compressed. Double precision, no messages, no packing; nothing in here is shared with
// the system that it is compared to. The references of all optimizers are written with it.
//
// A sign is the one thing that rounding can turn into something else, so it is the only decision
// that has to be watched: closest_decision().

#ifndef SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_
#define SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace signpost::testing {

using Vector = std::vector<double>;

class ExchangeReference {
 public:
  // `tensors`: the number of elements of each; blocks do not straddle them.
  ExchangeReference(int workers, std::vector<size_t> tensors, size_t block, double gamma)
      : tensors_(std::move(tensors)), block_(block), gamma_(gamma) {
    size_t elements = 0;
    for (size_t tensor : tensors_) elements += tensor;
    worker_error_.assign(workers, Vector(elements));
    server_error_.assign(elements, 0);
  }

  // What every worker gets when worker i has inputs[i].
  Vector Mean(const std::vector<Vector>& inputs) {
    Vector mean = server_error_;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Vector u = inputs[i];
      for (size_t j = 0; j < u.size(); ++j) u[j] += worker_error_[i][j];
      const Vector compressed = Compress(u, worker_error_[i]);
      for (size_t j = 0; j < u.size(); ++j) mean[j] += compressed[j] / inputs.size();
    }
    return Compress(mean, server_error_);
  }

  // The same apart from the error feedback: errors are not added, and take what is lost times
  // `unit`.
  Vector MeanApart(const std::vector<Vector>& inputs, double unit) {
    Vector mean(server_error_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Vector compressed = CompressApart(inputs[i], unit, worker_error_[i]);
      for (size_t j = 0; j < mean.size(); ++j) mean[j] += compressed[j] / inputs.size();
    }
    return CompressApart(mean, unit, server_error_);
  }

  // For another unit, or with 0 for a metric that has nothing to do with the last one.
  void ScaleErrors(double factor) {
    for (Vector& error : worker_error_) {
      for (double& e : error) e *= factor;
    }
    for (double& e : server_error_) e *= factor;
  }

  const Vector& worker_error(int worker) const { return worker_error_[worker]; }
  const Vector& server_error() const { return server_error_; }

  // The smallest |u| / S that was ever compressed. Where it is not far above fp32's rounding, the
  // sign that fp32 sees can be another one, and a comparison means nothing.
  double closest_decision() const { return closest_decision_; }

 private:
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
        const double scale = gamma_ * std::sqrt(squares / (block_end - first));
        for (size_t j = first; j < block_end; ++j) {
          compressed[j] = std::signbit(u[j]) ? -scale : scale;
          error[j] = u[j] - compressed[j];
          if (scale > 0) closest_decision_ = std::min(closest_decision_, std::abs(u[j]) / scale);
        }
      }
    }
    return compressed;
  }

  Vector CompressApart(const Vector& u, double unit, Vector& error) {
    Vector loss(u.size());
    const Vector compressed = Compress(u, loss);
    for (size_t j = 0; j < u.size(); ++j) error[j] += unit * loss[j];
    return compressed;
  }

  const std::vector<size_t> tensors_;
  const size_t block_;
  const double gamma_;
  std::vector<Vector> worker_error_;
  Vector server_error_;
  double closest_decision_ = 1;
};

// The mean over workers.
inline Vector MeanOf(const std::vector<Vector>& vectors) {
  Vector mean(vectors[0].size());
  for (const Vector& vector : vectors) {
    for (size_t j = 0; j < mean.size(); ++j) mean[j] += vector[j] / vectors.size();
  }
  return mean;
}

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_
