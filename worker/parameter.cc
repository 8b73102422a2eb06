#include "worker/parameter.h"

#include "absl/strings/str_format.h"
#include "proto/layout.h"

namespace signpost {

Tensor TensorOf(const Parameter& parameter) {
  Tensor tensor;
  tensor.set_name(parameter.name);
  tensor.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
  return tensor;
}

absl::Status CheckParameters(absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu) {
  for (const Parameter& parameter : parameters) {
    const Tensor tensor = TensorOf(parameter);
    const uint64_t wanted = ElementCount(tensor);
    if (parameter.values.size() != wanted) {
      return absl::InvalidArgumentError(
          absl::StrFormat("tensor %s has %d values, its shape asks for %d", DescribeTensor(tensor),
                          parameter.values.size(), wanted));
    }
    const float* const values = parameter.values.data();
    absl::Status status;
    if (gpu != nullptr) {
      status = gpu->CheckIsHere(values);
    } else if (values == nullptr && wanted > 0) {
      status = absl::InvalidArgumentError("it is a null pointer");
    }
    if (reinterpret_cast<uintptr_t>(values) % sizeof(float) != 0) {
      status = absl::InvalidArgumentError("it begins between two numbers");
    }
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrFormat("tensor %s: %s", DescribeTensor(tensor),
                                                         status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace signpost
