// DeepSpeed's compressed_allreduce (deepspeed/runtime/comm/nccl.py at 38327e0) for all workers at
// once: each worker's buffer becomes signs and one scale, its root mean square; so does the mean of
// what they stand for; both sides keep what that loses, and add it the next time. Double precision,
// no messages; nothing in here is shared with the system that it is compared to.
//
// As there, zeros follow each buffer up to a multiple of what n ranks can have in whole bytes; they
// count for scales, and their errors stay. Each rank is the server of one of n equal parts, which
// has its own scale. A worker alone does not compress. As docs/algorithms.md says what is followed,
// there are no zeros, a buffer is one part, and a worker alone compresses, too.

#ifndef SIGNPOST_TESTS_DEEPSPEED_ALLREDUCE_REFERENCE_H_
#define SIGNPOST_TESTS_DEEPSPEED_ALLREDUCE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "tests/exchange_reference.h"

namespace signpost::testing {

enum class DeepSpeedBuffers { kAsThere, kAsFollowed };

class DeepSpeedAllreduceReference {
 public:
  // `buffers`: the number of elements of each, one after the other in what is exchanged.
  DeepSpeedAllreduceReference(size_t workers, const std::vector<size_t>& buffers,
                              DeepSpeedBuffers kind)
      : compresses_(workers > 1 || kind == DeepSpeedBuffers::kAsFollowed) {
    const bool as_there = kind == DeepSpeedBuffers::kAsThere;
    const size_t divider = workers * 8 / std::gcd(workers, size_t{8});
    const size_t multiple = as_there ? workers * divider : 1;
    size_t first = 0;
    for (const size_t elements : buffers) {
      const size_t padded = (elements + multiple - 1) / multiple * multiple;
      buffers_.push_back({first, elements, as_there ? padded / workers : padded,
                          std::vector<Vector>(workers, Vector(padded)), Vector(padded)});
      first += elements;
    }
  }

  // What every worker gets when worker i has inputs[i].
  Vector Mean(const std::vector<Vector>& inputs) {
    if (!compresses_) return MeanOf(inputs);
    Vector answer;
    for (Buffer& buffer : buffers_) {
      const Vector mean = MeanOfBuffer(inputs, buffer);
      answer.insert(answer.end(), mean.begin(), mean.begin() + buffer.elements);
    }
    return answer;
  }

  // As ExchangeReference's. Zeros are the same in fp32.
  double closest_decision() const { return closest_decision_; }

 private:
  struct Buffer {
    size_t first, elements, part;  // `part`: elements of a server
    std::vector<Vector> worker_error;
    Vector server_error;  // of all servers
  };

  Vector MeanOfBuffer(const std::vector<Vector>& inputs, Buffer& buffer) {
    const size_t padded = buffer.server_error.size();
    Vector mean(padded);
    for (size_t i = 0; i < inputs.size(); ++i) {
      Vector& error = buffer.worker_error[i];
      Vector u(padded);
      std::copy_n(inputs[i].begin() + buffer.first, buffer.elements, u.begin());
      for (size_t j = 0; j < padded; ++j) u[j] += error[j];
      const Vector compressed = Compress(u, /*part=*/padded, error);
      for (size_t j = 0; j < padded; ++j) mean[j] += compressed[j] / inputs.size();
    }
    for (size_t j = 0; j < padded; ++j) mean[j] += buffer.server_error[j];
    return Compress(mean, buffer.part, buffer.server_error);
  }

  // Each part with its own scale; `error` becomes what that loses.
  Vector Compress(const Vector& u, size_t part, Vector& error) {
    Vector compressed(u.size());
    for (size_t first = 0; first < u.size(); first += part) {
      double squares = 0;
      for (size_t j = first; j < first + part; ++j) squares += u[j] * u[j];
      const double scale = std::sqrt(squares) / std::sqrt(part);
      for (size_t j = first; j < first + part; ++j) {
        compressed[j] = u[j] < 0 ? -scale : scale;
        error[j] = u[j] - compressed[j];
        if (u[j] != 0) closest_decision_ = std::min(closest_decision_, std::abs(u[j]) / scale);
      }
    }
    return compressed;
  }

  const bool compresses_;
  std::vector<Buffer> buffers_;
  double closest_decision_ = 1;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_DEEPSPEED_ALLREDUCE_REFERENCE_H_
