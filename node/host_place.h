// A node's worker that trains on its processors.

#ifndef SIGNPOST_NODE_HOST_PLACE_H_
#define SIGNPOST_NODE_HOST_PLACE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "node/place.h"
#include "worker/chunk_crew.h"
#include "worker/page_vector.h"

namespace signpost::node {

// All is done when it is said. What is shared takes no memory until it is written.
class HostPlace final : public Place {
 public:
  kernels::cuda::Gpu* gpu() const override { return nullptr; }
  kernels::cuda::Stream stream() const override { return nullptr; }

  absl::StatusOr<std::unique_ptr<Numbers>> NewNumbers(size_t elements) override;
  absl::Status Copy(const Numbers& from, const Numbers& to) override;

  absl::Status Prepare(const Layout& layout, size_t processes, uint32_t threads) override;
  absl::Status BeginStep(Gradients gradients) override;
  absl::Status Average(uint32_t chunk, absl::Span<const Segment> segments) override;
  absl::Span<const float> mean() const override { return mean_; }
  absl::Status Await() override { return absl::OkStatus(); }

 private:
  const Layout* layout_ = nullptr;
  std::optional<ChunkCrew> crew_;
  std::vector<const float*> gradients_;  // by local rank
  PageVector<float> mean_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_HOST_PLACE_H_
