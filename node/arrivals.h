// Which gradients of a step have arrived, of which processes of the node.

#ifndef SIGNPOST_NODE_ARRIVALS_H_
#define SIGNPOST_NODE_ARRIVALS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace signpost::node {

// Not thread-safe.
class Arrivals {
 public:
  Arrivals(size_t tensors, uint32_t processes)
      : has_arrived_(processes, std::vector<bool>(tensors)), missing_(tensors, processes) {}

  // Of this local rank. INVALID_ARGUMENT, with nothing changed but for those before it, for a
  // tensor that is none or has arrived.
  absl::Status Add(uint32_t local_rank, absl::Span<const uint32_t> tensors);
  // All that have not.
  void AddRest(uint32_t local_rank);

  // Tensors that have arrived of all processes since the last call.
  std::vector<uint32_t> TakeComplete() { return std::exchange(complete_, {}); }
  bool has_complete() const { return !complete_.empty(); }

 private:
  void AddOne(uint32_t local_rank, uint32_t tensor);

  std::vector<std::vector<bool>> has_arrived_;  // by local rank and tensor
  std::vector<uint32_t> missing_;               // processes, by tensor
  std::vector<uint32_t> complete_;              // that were not taken
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_ARRIVALS_H_
