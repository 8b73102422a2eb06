// A node's worker that trains on a GPU.
//
// Processes copy from and to its memory (GpuTensors), which they have imported: from GPU to GPU,
// without the host. As a process has waited for its copies when it calls, and the worker for its
// own work when it answers, nothing else orders the two.

#ifndef SIGNPOST_NODE_GPU_PLACE_H_
#define SIGNPOST_NODE_GPU_PLACE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "node/place.h"

namespace signpost::node {

class GpuPlace final : public Place {
 public:
  explicit GpuPlace(kernels::cuda::Gpu& gpu);
  // Waits for the GPU, which uses this memory, for ever if it does not come to an end.
  ~GpuPlace() override;

  kernels::cuda::Gpu* gpu() const override { return &gpu_; }
  kernels::cuda::Stream stream() const override { return stream_.get(); }

  // FAILED_PRECONDITION too, when the system lets no process share a GPU's memory.
  absl::StatusOr<std::unique_ptr<Numbers>> NewNumbers(size_t elements) override;
  absl::Status Copy(const Numbers& from, const Numbers& to) override;

  // 4 bytes for each element, and some for each chunk's part of a tensor.
  absl::Status Prepare(const Layout& layout, size_t processes, uint32_t threads) override;
  absl::Status BeginStep(Gradients gradients) override;
  absl::Status Average(uint32_t chunk, absl::Span<const Segment> segments) override;
  absl::Span<const float> mean() const override;
  absl::Status Await() override;

 private:
  using Memory = kernels::cuda::Owned<uint8_t>;

  // Keeps the first failure, after which nothing is done.
  bool Do(const absl::Status& status) {
    status_.Update(status);
    return status_.ok();
  }
  template <class T>
  bool Take(absl::StatusOr<T> made, T& to) {
    if (!Do(made.status())) return false;
    to = *std::move(made);
    return true;
  }

  absl::Status Average(size_t row, size_t elements);

  kernels::cuda::Gpu& gpu_;
  absl::Status status_;
  kernels::cuda::Owned<CUstream_st> stream_;
  kernels::cuda::Owned<CUevent_st> done_;

  const Layout* layout_ = nullptr;
  Memory mean_;
  Memory
      rows_;  // what the kernel is to do: for a chunk, and for each of its segments if it has more
  std::vector<size_t> first_row_;     // by chunk
  Memory gradients_, new_gradients_;  // where they are, by local rank; on the GPU, and pinned
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_GPU_PLACE_H_
