// What an optimizer trains.

#ifndef SIGNPOST_WORKER_PARAMETER_H_
#define SIGNPOST_WORKER_PARAMETER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/aggregator.pb.h"

namespace signpost {

// One tensor that is trained, in memory that outlives the session.
struct Parameter {
  std::string name;
  std::vector<uint64_t> shape;
  absl::Span<float> values;  // product of shape elements, row-major; on the worker's GPU if it has
                             // one
  uint32_t group = 0;        // which entry of the step's group rates applies
  // With WorkerOptions::shards > 1, the elements of the whole tensor; 0: this is a whole tensor.
  uint64_t whole_elements = 0;

  uint64_t WholeElements() const { return whole_elements > 0 ? whole_elements : values.size(); }
};

Tensor TensorOf(const Parameter& parameter);

// INVALID_ARGUMENT that names the first with other than its shape's number of values, or, unless
// `gpu` is null, that is not on that; or two that share memory.
absl::Status CheckParameters(absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_PARAMETER_H_
