// One tensor's gradient, as a training job hands it over.

#ifndef SIGNPOST_WORKER_GRADIENT_H_
#define SIGNPOST_WORKER_GRADIENT_H_

#include <concepts>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/dense.h"
#include "kernels/gpu.h"
#include "kernels/types_cuda.h"
#include "proto/layout.h"

namespace signpost {

using kernels::cuda::GradientType;

// In the memory where the parameters are: the host's, where it is fp32, or their GPU's.
struct Gradient {
  Gradient() = default;
  // Of fp32 numbers, in whatever a span can be made of.
  template <class Floats>
  requires std::convertible_to<const Floats&, absl::Span<const float>> Gradient(
      const Floats& floats) {
    const absl::Span<const float> span = floats;
    values = span.data();
    size = span.size();
  }
  Gradient(const void* values, size_t size, GradientType type)
      : values(values), size(size), type(type) {}

  // Of an fp32 one.
  absl::Span<const float> floats(const Segment& part) const {
    return {static_cast<const float*>(values) + part.tensor_offset, part.elements};
  }

  const void* values = nullptr;  // on a GPU null stands for zeros
  size_t size = 0;               // elements
  GradientType type = GradientType::kFloat32;
};

// The dense payload that has the same bytes as a gradient of that type.
kernels::DenseType DenseTypeOf(GradientType type);

inline size_t BytesOf(GradientType type) { return type == GradientType::kFloat32 ? 4 : 2; }

// INVALID_ARGUMENT, with the reason, unless it can be that of a tensor there. Its size is not
// looked at.
absl::Status CheckOnHost(const Gradient& gradient);
absl::Status CheckOn(const kernels::cuda::Gpu& gpu, const Gradient& gradient);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GRADIENT_H_
