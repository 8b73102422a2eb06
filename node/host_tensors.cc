#include "node/host_tensors.h"

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/frame.h"

namespace signpost::node {

absl::Status HostTensors::Share(size_t tensor, const Gradient& gradient) {
  std::memcpy(SharedGradient(tensor), gradient.values, gradient.size * sizeof(float));
  return absl::OkStatus();
}

absl::Status HostTensors::TakeParameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const absl::Span<float> values = parameters_[i].values;
    std::memcpy(values.data(), SharedValues(i), values.size() * sizeof(float));
  }
  return absl::OkStatus();
}

uint32_t HostTensors::ParametersCrc32c() {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters_) {
    const absl::Span<float> values = parameter.values;
    crc = Crc32c({reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)},
                 crc);
  }
  return crc;
}

}  // namespace signpost::node
