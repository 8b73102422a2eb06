// The two-phase exchange of 1-bit Adam (arXiv:2102.02888) for all workers at once: each compresses
// what it has, and so does the aggregator with their mean; what compression loses stays with the
// side that compressed. Double precision, no messages, no packing; nothing in here is shared with
// the system that it is compared to. The references of all optimizers are written with it.
//
// Each block has a scale S. In one bit an element is its sign times S = gamma * ||u||_2 /
// sqrt(length); in an integer of k bits the nearest multiple of S = max |u| / (2^(k-1) - 1).
//
// A sign, or which multiple is the nearest, are the only things that rounding can turn into
// something else, so these decisions have to be watched: closest_decision().

#ifndef SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_
#define SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace signpost::testing {

using Vector = std::vector<double>;

enum class ReferenceCodec { kExact, kOneBit, kInt4, kInt8 };

// The mean over workers.
inline Vector MeanOf(const std::vector<Vector>& vectors) {
  Vector mean(vectors[0].size());
  for (const Vector& vector : vectors) {
    for (size_t j = 0; j < mean.size(); ++j) mean[j] += vector[j] / vectors.size();
  }
  return mean;
}

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

  // What every worker gets when worker i has inputs[i]. What is exact has nothing to do with
  // errors.
  Vector Mean(const std::vector<Vector>& inputs, ReferenceCodec codec = ReferenceCodec::kOneBit) {
    if (codec == ReferenceCodec::kExact) return MeanOf(inputs);
    Vector mean = server_error_;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Vector u = inputs[i];
      for (size_t j = 0; j < u.size(); ++j) u[j] += worker_error_[i][j];
      const Vector compressed = Compress(u, codec, worker_error_[i]);
      for (size_t j = 0; j < u.size(); ++j) mean[j] += compressed[j] / inputs.size();
    }
    return Compress(mean, codec, server_error_);
  }

  // The same, and takes all errors with it, where nothing is lost.
  Vector MeanWithErrors(const std::vector<Vector>& inputs, ReferenceCodec codec) {
    if (codec != ReferenceCodec::kExact) return Mean(inputs, codec);
    Vector mean = MeanOf(inputs);
    for (size_t j = 0; j < mean.size(); ++j) {
      for (Vector& error : worker_error_) mean[j] += error[j] / inputs.size();
      mean[j] += server_error_[j];
    }
    ScaleErrors(0);
    return mean;
  }

  // The same apart from the error feedback: errors are not added, and take what is lost times
  // `unit`.
  Vector MeanApart(const std::vector<Vector>& inputs, ReferenceCodec codec, double unit) {
    if (codec == ReferenceCodec::kExact) return MeanOf(inputs);
    Vector mean(server_error_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Vector compressed = CompressApart(inputs[i], codec, unit, worker_error_[i]);
      for (size_t j = 0; j < mean.size(); ++j) mean[j] += compressed[j] / inputs.size();
    }
    return CompressApart(mean, codec, unit, server_error_);
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

  // How far what was ever compressed was from being taken for something else: the least |u| / S,
  // and for integers the least distance from the middle of two multiples by max |u|. Where it is
  // not far above fp32's rounding, what fp32 sees can be the other one, and a comparison means
  // nothing.
  double closest_decision() const { return closest_decision_; }

 private:
  // Block by block; `error` becomes what that loses.
  Vector Compress(const Vector& u, ReferenceCodec codec, Vector& error) {
    Vector compressed(u.size());
    size_t first = 0;
    for (size_t elements : tensors_) {
      const size_t end = first + elements;
      for (; first < end; first = std::min(first + block_, end)) {
        const size_t block_end = std::min(first + block_, end);
        if (codec == ReferenceCodec::kOneBit) {
          TakeSigns(u, first, block_end, compressed);
        } else {
          Quantize(u, first, block_end, codec == ReferenceCodec::kInt4 ? 7 : 127, compressed);
        }
      }
    }
    for (size_t j = 0; j < u.size(); ++j) error[j] = u[j] - compressed[j];
    return compressed;
  }

  void TakeSigns(const Vector& u, size_t begin, size_t end, Vector& compressed) {
    double squares = 0;
    for (size_t j = begin; j < end; ++j) squares += u[j] * u[j];
    const double scale = gamma_ * std::sqrt(squares / (end - begin));
    for (size_t j = begin; j < end; ++j) {
      compressed[j] = std::signbit(u[j]) ? -scale : scale;
      if (scale > 0) closest_decision_ = std::min(closest_decision_, std::abs(u[j]) / scale);
    }
  }

  // To whole numbers of at most `most`, times the scale.
  void Quantize(const Vector& u, size_t begin, size_t end, double most, Vector& compressed) {
    double largest = 0;
    for (size_t j = begin; j < end; ++j) largest = std::max(largest, std::abs(u[j]));
    const double scale = largest / most;
    for (size_t j = begin; j < end && scale > 0; ++j) {
      const double code = std::nearbyint(u[j] / scale);
      compressed[j] = code * scale;
      const double to_the_middle = 0.5 - std::abs(u[j] / scale - code);
      closest_decision_ = std::min(closest_decision_, to_the_middle / most);
    }
  }

  Vector CompressApart(const Vector& u, ReferenceCodec codec, double unit, Vector& error) {
    Vector loss(u.size());
    const Vector compressed = Compress(u, codec, loss);
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

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_EXCHANGE_REFERENCE_H_
