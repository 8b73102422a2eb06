#include "node/arrivals.h"

#include "absl/strings/str_format.h"

namespace signpost::node {

absl::Status Arrivals::Add(uint32_t local_rank, absl::Span<const uint32_t> tensors) {
  for (const uint32_t tensor : tensors) {
    if (tensor >= missing_.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the gradient of tensor %d, of %d", tensor, missing_.size()));
    }
    if (has_arrived_[local_rank][tensor]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the gradient of tensor %d twice in a step", tensor));
    }
    AddOne(local_rank, tensor);
  }
  return absl::OkStatus();
}

void Arrivals::AddRest(uint32_t local_rank) {
  for (uint32_t tensor = 0; tensor < missing_.size(); ++tensor) {
    if (!has_arrived_[local_rank][tensor]) AddOne(local_rank, tensor);
  }
}

void Arrivals::AddOne(uint32_t local_rank, uint32_t tensor) {
  has_arrived_[local_rank][tensor] = true;
  if (--missing_[tensor] == 0) complete_.push_back(tensor);
}

}  // namespace signpost::node
