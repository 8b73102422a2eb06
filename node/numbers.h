// fp32 numbers that the worker of a node shares with a process of its: gradients, or parameters.

#ifndef SIGNPOST_NODE_NUMBERS_H_
#define SIGNPOST_NODE_NUMBERS_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/node.pb.h"
#include "worker/host_floats.h"

namespace signpost::node {

// In the host's memory, or a GPU's. The worker's side; thread-safe, as far as its contents are not
// concerned.
class Numbers {
 public:
  virtual ~Numbers() = default;

  // Where they are: on a GPU, the host can only pass it on.
  virtual absl::Span<float> values() const = 0;
  // What a process gets at them with, as long as this object is there.
  virtual const Memory& handle() const = 0;
  // So many of them from `first` on, for the host to look at. On a GPU it waits for what is on the
  // worker's stream.
  virtual absl::StatusOr<HostFloats> OnHost(size_t first, size_t count) const = 0;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_NUMBERS_H_
