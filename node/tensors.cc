#include "node/tensors.h"

namespace signpost::node {

Tensors::Tensors(absl::Span<const Parameter> parameters, float* gradients, float* values)
    : parameters_(parameters), gradients_(gradients), values_(values) {
  uint64_t first = 0;
  for (const Parameter& parameter : parameters_) {
    first_element_.push_back(first);
    first += parameter.values.size();
  }
}

}  // namespace signpost::node
