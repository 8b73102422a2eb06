// Where the worker of a node trains: on the host (HostPlace) or on a GPU (GpuPlace). What its
// processes share with it is there, and so is the mean of their gradients.

#ifndef SIGNPOST_NODE_PLACE_H_
#define SIGNPOST_NODE_PLACE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "node/numbers.h"
#include "proto/layout.h"

namespace signpost::node {

// Of one job. Not thread-safe, but for NewNumbers. On a GPU its work goes on a stream of its own,
// and each call fails with what went wrong there, once it has.
class Place {
 public:
  // By local rank.
  using Gradients = absl::Span<const Numbers* const>;

  virtual ~Place() = default;

  // For the session: null on the host.
  virtual kernels::cuda::Gpu* gpu() const = 0;
  virtual kernels::cuda::Stream stream() const = 0;

  // Numbers to be shared with a process. RESOURCE_EXHAUSTED without memory for them.
  virtual absl::StatusOr<std::unique_ptr<Numbers>> NewNumbers(size_t elements) = 0;
  // Done when it returns. Both have as many.
  virtual absl::Status Copy(const Numbers& from, const Numbers& to) = 0;

  // Takes all memory that means need. Borrows the layout. RESOURCE_EXHAUSTED without.
  virtual absl::Status Prepare(const Layout& layout, size_t processes, uint32_t threads) = 0;
  // Gradients that the means are of until the next call. After Await.
  virtual absl::Status BeginStep(Gradients gradients) = 0;
  // The mean where these segments are, perhaps later. They follow one another in the layout's
  // chunk, and are a part of its array:
  //   mean = (sum over local ranks of g_i) * (1 / processes)
  // in fp32, summed in the order of kernels/block.h.
  virtual absl::Status Average(uint32_t chunk, absl::Span<const Segment> segments) = 0;
  // In layout order.
  virtual absl::Span<const float> mean() const = 0;
  // Waits until all is done, the session's work too. On a GPU without a deadline.
  virtual absl::Status Await() = 0;
};

// Null: on the host. Borrows the GPU. Its errors come from what is called first.
std::unique_ptr<Place> NewPlace(kernels::cuda::Gpu* gpu);

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_PLACE_H_
