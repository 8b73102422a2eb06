// Tensors that a process has on the host.

#ifndef SIGNPOST_NODE_HOST_TENSORS_H_
#define SIGNPOST_NODE_HOST_TENSORS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "node/tensors.h"

namespace signpost::node {

// All is copied when it is said, and nothing fails.
class HostTensors final : public Tensors {
 public:
  using Tensors::Tensors;

  absl::Status SetStream(kernels::cuda::Stream) override { return absl::OkStatus(); }
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return CheckOnHost(gradient);
  }
  absl::Status Share(size_t tensor, const Gradient& gradient) override;
  absl::StatusOr<bool> IsShared(size_t) override { return true; }
  absl::Status AwaitShared(size_t) override { return absl::OkStatus(); }
  absl::Status TakeParameters() override;
  absl::Status Await() override { return absl::OkStatus(); }
  uint32_t ParametersCrc32c() override;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_HOST_TENSORS_H_
