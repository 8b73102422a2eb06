// What a process that attaches trains, where it has it, beside the memory that it shares with the
// worker of its node: there each tensor's gradient and parameters have their places, in the order
// of the tensors, as fp32.

#ifndef SIGNPOST_NODE_TENSORS_H_
#define SIGNPOST_NODE_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "worker/gradient.h"
#include "worker/parameter.h"

namespace signpost::node {

// On the host or on a GPU. Not thread-safe.
class Tensors {
 public:
  // Borrows them, and the memory that is shared, of the size of all parameters.
  Tensors(absl::Span<const Parameter> parameters, float* gradients, float* values);
  virtual ~Tensors() = default;

  // On a GPU: copies come behind what is on this stream from now on, and this one behind the one
  // before. INVALID_ARGUMENT, and nothing changes, for one that is not this GPU's.
  virtual absl::Status SetStream(kernels::cuda::Stream stream) = 0;
  // INVALID_ARGUMENT, with the reason, unless it can be one of these tensors', but for its size.
  virtual absl::Status CheckGradient(const Gradient& gradient) const = 0;

  // Copies the tensor's gradient, widened to fp32, to the memory that is shared, perhaps later.
  // Until Await has returned the gradient must stay, and none of the same tensor may follow.
  virtual absl::Status Share(size_t tensor, const Gradient& gradient) = 0;
  // Whether all of that copy is there, of the gradient that Share had last of the tensor; those
  // that it had before are there then too. AwaitShared waits for it.
  virtual absl::StatusOr<bool> IsShared(size_t tensor) = 0;
  virtual absl::Status AwaitShared(size_t tensor) = 0;
  // Copies all parameters from there, perhaps later. Until Await has returned they must stay there.
  virtual absl::Status TakeParameters() = 0;
  // Waits for all these copies.
  virtual absl::Status Await() = 0;

  virtual uint32_t ParametersCrc32c() = 0;

 protected:
  // Where a tensor's numbers have their place.
  float* SharedGradient(size_t tensor) const { return gradients_ + first_element_[tensor]; }
  float* SharedValues(size_t tensor) const { return values_ + first_element_[tensor]; }

  const absl::Span<const Parameter> parameters_;

 private:
  float* const gradients_;
  float* const values_;
  std::vector<uint64_t> first_element_;  // by tensor
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_TENSORS_H_
