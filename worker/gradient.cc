#include "worker/gradient.h"

#include <cstdint>

namespace signpost {

kernels::DenseType DenseTypeOf(GradientType type) {
  switch (type) {
    case GradientType::kBfloat16:
      return kernels::DenseType::kBfloat16;
    case GradientType::kFloat16:
      return kernels::DenseType::kFloat16;
    case GradientType::kFloat32:
      break;
  }
  return kernels::DenseType::kFloat32;
}

absl::Status CheckOnHost(const Gradient& gradient) {
  if (gradient.values == nullptr && gradient.size > 0) {
    return absl::InvalidArgumentError("it is a null pointer");
  }
  if (gradient.type == GradientType::kFloat32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a gradient of a tensor on the host is fp32; bf16 and fp16 are for those on a GPU");
}

absl::Status CheckOn(const kernels::cuda::Gpu& gpu, const Gradient& gradient) {
  // There it would be an error that ends the process' use of it.
  if (reinterpret_cast<uintptr_t>(gradient.values) % BytesOf(gradient.type) != 0) {
    return absl::InvalidArgumentError("it begins between two numbers of its type");
  }
  return gpu.CheckIsHere(gradient.values);
}

}  // namespace signpost
