// Tensors that a process has on a GPU.
//
// The memory that is shared is the host's, which is pinned, or that of the worker's GPU. The GPU
// copies from and to it while the host does something else. Gradients go on a stream of their own,
// each behind what the caller's stream has when it comes: so they cross while the rest of the
// backward pass is computed. Those of 2 bytes are widened on the GPU, a piece at a time. Parameters
// come on the caller's stream.

#ifndef SIGNPOST_NODE_GPU_TENSORS_H_
#define SIGNPOST_NODE_GPU_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "node/shared_memory.h"
#include "node/tensors.h"

namespace signpost::node {

class GpuTensors final : public Tensors {
 public:
  static constexpr size_t kPieceElements = size_t{1} << 20;

  // Borrows the GPU, which has the parameters, too. Takes all memory that it will need, at most 4
  // bytes for each element of a piece on the GPU. RESOURCE_EXHAUSTED when there is none, or the
  // memory that is shared cannot be pinned.
  static absl::StatusOr<std::unique_ptr<GpuTensors>> Create(kernels::cuda::Gpu& gpu,
                                                            absl::Span<const Parameter> parameters,
                                                            const SharedMemory& gradients,
                                                            const SharedMemory& values);
  // The same with what the worker has exported of its GPU. FAILED_PRECONDITION, with what to do,
  // when this GPU cannot get at it.
  static absl::StatusOr<std::unique_ptr<GpuTensors>> CreateBeside(
      kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters, absl::string_view gradients,
      absl::string_view values);
  // Waits for the GPU, which uses these memories, for ever if it does not come to an end.
  ~GpuTensors() override;

  // Puts the new one behind what is on the one before.
  absl::Status SetStream(kernels::cuda::Stream stream) override;
  // INVALID_ARGUMENT for one that is not on this GPU, or not aligned.
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return CheckOn(gpu_, gradient);
  }
  // These six fail with what went wrong on the GPU, once it has.
  absl::Status Share(size_t tensor, const Gradient& gradient) override;
  absl::StatusOr<bool> IsShared(size_t tensor) override;
  absl::Status AwaitShared(size_t tensor) override;
  absl::Status TakeParameters() override;
  absl::Status Await() override;  // for ever if the GPU does not come to an end
  uint32_t ParametersCrc32c() override;

 private:
  using Memory = kernels::cuda::Owned<uint8_t>;
  enum class SharedOn { kHost, kGpu };

  // Takes over what is shared, as Gpu::Pin or Import has given it.
  GpuTensors(kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters, SharedOn shared_on,
             Memory gradients, Memory values);

  absl::Status TakeMemory();
  void CopyWidened(size_t tensor, const Gradient& gradient);
  // To memory that is shared.
  absl::Status CopyOut(float* to, const void* from, size_t elements) {
    return shared_on_ == SharedOn::kHost
               ? gpu_.CopyOut(to, from, elements * sizeof(float), copies_.get())
               : gpu_.Copy(to, from, elements * sizeof(float), copies_.get());
  }
  // From it.
  absl::Status CopyIn(float* to, const float* from, size_t elements) {
    return shared_on_ == SharedOn::kHost ? gpu_.CopyIn(to, from, elements * sizeof(float), stream_)
                                         : gpu_.Copy(to, from, elements * sizeof(float), stream_);
  }

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

  kernels::cuda::Gpu& gpu_;
  const SharedOn shared_on_;
  const Memory shared_gradients_, shared_values_;
  absl::Status status_;
  kernels::cuda::Stream stream_ = nullptr;                   // the caller's
  kernels::cuda::Owned<CUstream_st> copies_;                 // to what is shared
  kernels::cuda::Owned<CUevent_st> is_made_;                 // a gradient, on the caller's stream
  std::vector<kernels::cuda::Owned<CUevent_st>> is_shared_;  // by tensor, its gradient
  std::optional<size_t> last_shared_;                        // tensor
  kernels::cuda::Owned<CUevent_st> are_taken_;               // all parameters
  kernels::cuda::Owned<CUevent_st> left_;                    // the stream before, when it was left

  Memory widened_;                 // a piece
  Memory rows_, pinned_rows_;      // what the kernel is to do, for each piece of each tensor
  std::vector<size_t> first_row_;  // by tensor
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_GPU_TENSORS_H_
