#include "worker/parameter.h"

#include <functional>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "proto/layout.h"

namespace signpost {

Tensor TensorOf(const Parameter& parameter) {
  Tensor tensor;
  tensor.set_name(parameter.name);
  tensor.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
  return tensor;
}

namespace {

// Of parameters that share memory each would have its part of a step, and threads their ways
// through both at once.
absl::Status CheckApart(absl::Span<const Parameter> parameters) {
  std::vector<const Parameter*> by_address;
  for (const Parameter& parameter : parameters) {
    if (!parameter.values.empty()) by_address.push_back(&parameter);
  }
  absl::c_sort(by_address, [](const Parameter* a, const Parameter* b) {
    return std::less<>()(a->values.data(), b->values.data());
  });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const Parameter &before = *by_address[i - 1], &next = *by_address[i];
    const float* const end = before.values.data() + before.values.size();
    if (!std::less<>()(next.values.data(), end)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("tensors %s and %s share memory: what is trained once must be given once",
                        DescribeTensor(TensorOf(before)), DescribeTensor(TensorOf(next))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckParameters(absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu) {
  for (const Parameter& parameter : parameters) {
    const Tensor tensor = TensorOf(parameter);
    const uint64_t wanted = ElementCount(tensor);
    if (wanted > kMaxElements) {
      return absl::InvalidArgumentError(
          absl::StrFormat("tensor %s has more than %d elements, which no job has",
                          DescribeTensor(tensor), kMaxElements));
    }
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
  return CheckApart(parameters);
}

}  // namespace signpost
