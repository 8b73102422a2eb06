// Tensors that a process has on a GPU.
//
// The memory that is shared is pinned, and the GPU copies from and to it while the host does
// something else. Gradients go on a stream of their own, each behind what the caller's stream has
// when it comes: so they cross while the rest of the backward pass is computed. Those of 2 bytes
// are widened on the GPU first, a piece at a time. Parameters come on the caller's stream.

#ifndef SIGNPOST_NODE_GPU_TENSORS_H_
#define SIGNPOST_NODE_GPU_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
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
  // Waits for the GPU, which uses these memories, for ever if it does not come to an end.
  ~GpuTensors() override;

  // Puts the new one behind what is on the one before.
  void SetStream(kernels::cuda::Stream stream) override;
  // INVALID_ARGUMENT for one that is not on this GPU, or not aligned.
  absl::Status CheckGradient(const Gradient& gradient) const override {
    return CheckOn(gpu_, gradient);
  }
  // These four fail with what went wrong on the GPU, once it has.
  absl::Status Share(size_t tensor, const Gradient& gradient) override;
  absl::Status TakeParameters() override;
  absl::Status Await() override;  // for ever if the GPU does not come to an end
  uint32_t ParametersCrc32c() override;

 private:
  using Memory = kernels::cuda::Owned<uint8_t>;

  GpuTensors(kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters,
             const SharedMemory& gradients, const SharedMemory& values)
      : Tensors(parameters, gradients, values), gpu_(gpu) {}

  absl::Status TakeMemory(const SharedMemory& gradients, const SharedMemory& values);
  void CopyWidened(size_t tensor, const Gradient& gradient);

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
  absl::Status status_;
  kernels::cuda::Stream stream_ = nullptr;  // the caller's
  Memory pinned_gradients_, pinned_values_;
  kernels::cuda::Owned<CUstream_st> copies_;     // to the host
  kernels::cuda::Owned<CUevent_st> is_made_;     // a gradient, on the caller's stream
  kernels::cuda::Owned<CUevent_st> are_shared_;  // all gradients so far
  kernels::cuda::Owned<CUevent_st> are_taken_;   // all parameters
  kernels::cuda::Owned<CUevent_st> left_;        // the stream before, when it was left

  Memory widened_;                 // a piece
  Memory rows_, pinned_rows_;      // what the kernel is to do, for each piece of each tensor
  std::vector<size_t> first_row_;  // by tensor
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_GPU_TENSORS_H_
