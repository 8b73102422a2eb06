// A session whose worker is another process, the node's.

#ifndef SIGNPOST_NODE_ATTACHED_SESSION_H_
#define SIGNPOST_NODE_ATTACHED_SESSION_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "node/shared_memory.h"
#include "node/tensors.h"
#include "proto/node.pb.h"
#include "trace/event.h"

namespace signpost::node {

// All calls as Session has them, with these differences. Each is made by all processes of the node,
// and waits for them as for other ranks. Gradients are copied when they come, and sent once all
// processes' are there; parameters are copied when the step is done. When a process does
// not finish a step after the first of them, it stays open: it is the first one of those that join
// again, which must take it at the same rates, and before they save anything.
//
// With options.gpu they are copied from and to that GPU, 4 bytes for each parameter either way. The
// optimizer runs where the node's worker has it, on its processors or its GPU, and takes next to
// none of this GPU's memory. Other processes of the node may be on other GPUs, or, where the worker
// is not on one, on the host: the bits are the same.
//
// ABORTED, from any call, when a process of the node is gone: this one can Join again. Not
// thread-safe.
class AttachedSession final : public Session {
 public:
  // Attaches to the worker at options.node. In addition to Session::Join's errors:
  //   INVALID_ARGUMENT    it is not unix:PATH
  //   UNAVAILABLE         nobody answers there within the join timeout
  //   RESOURCE_EXHAUSTED  the system does not let the memory that is shared, 8 bytes for each
  //                       parameter, be pinned for the GPU's copies
  //   FAILED_PRECONDITION the worker is on a GPU that this one cannot get at
  // and those of proto/node.proto.
  static absl::StatusOr<std::unique_ptr<AttachedSession>> Join(const SessionOptions& options,
                                                               const OptimizerOptions& optimizer,
                                                               std::vector<Parameter> parameters);
  // The same on a GPU that is open, and outlives the session; null: on the host. options.gpu is not
  // looked at.
  static absl::StatusOr<std::unique_ptr<AttachedSession>> JoinOn(kernels::cuda::Gpu* gpu,
                                                                 const SessionOptions& options,
                                                                 const OptimizerOptions& optimizer,
                                                                 std::vector<Parameter> parameters);

  ~AttachedSession() override;

  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return tensors_->SetStream(stream);
  }

  absl::StatusOr<StepReport> Step(absl::Span<const Gradient> gradients,
                                  absl::Span<const GroupRates> rates) override;
  absl::Status BeginStep(absl::Span<const GroupRates> rates) override;
  absl::Status GradientReady(size_t parameter, Gradient gradient) override;
  absl::StatusOr<StepReport> FinishStep() override;

  absl::Status Checkpoint(const std::string& directory) override;
  absl::StatusOr<std::string> SaveState() override;
  // OK after a call that was interrupted: the node's worker was let go of then, which tells the
  // node's other processes that this one is gone.
  absl::Status Leave() override;

  uint64_t steps() const override { return steps_; }
  bool is_synchronised() const override { return is_synchronised_; }
  const Resumed& resumed() const override { return resumed_; }
  // A process that has attached to a job that goes on has returned, with nothing lost.
  const std::optional<Returned>& returned() const override { return returned_; }
  uint64_t elements() const override;
  uint32_t ParametersCrc32c() const override { return tensors_->ParametersCrc32c(); }
  // Of the node's worker, for all its processes, since it joined.
  WireBytes wire_bytes() override { return wire_bytes_; }

 private:
  class Connection;

  // A step that has begun.
  struct OpenStep {
    StepRates rates;
    std::vector<bool> has_gradient;  // by parameter
    size_t gradients_missing = 0;
    std::deque<size_t> being_shared;  // parameters whose gradients the worker is not told of
  };

  AttachedSession(const OptimizerOptions& optimizer, std::vector<Parameter> parameters,
                  std::unique_ptr<Connection> connection);

  absl::Status Attach(kernels::cuda::Gpu* gpu, const SessionOptions& options,
                      const OptimizerOptions& optimizer);
  absl::Status MapMemory(const Attached& attached, kernels::cuda::Gpu* gpu);
  absl::Status Begin();
  absl::Status CheckRates(absl::Span<const GroupRates> rates) const;
  absl::Status CheckGradient(size_t parameter, const Gradient& gradient) const;
  absl::Status CheckNoStepFailed() const;
  absl::Status CheckNoStepIsOpen() const;
  // Tells the worker of gradients that are shared.
  absl::Status TellOfShared();
  absl::StatusOr<StepReport> TakeStep(const StepRates& rates);
  // Reads the parameters that the answer to a call of that time has promised. An error if others
  // may have gone on meanwhile, without this process.
  absl::Status TakeParameters(std::chrono::steady_clock::time_point called);

  std::unique_ptr<kernels::cuda::Gpu> own_gpu_;  // null: it is the caller's, or there is none
  const OptimizerOptions optimizer_;
  const std::vector<Parameter> parameters_;
  std::unique_ptr<Connection> connection_;
  trace::Event trace_step_;  // the whole of it: the node's worker has its parts
  // Of the host; null: of the worker's GPU.
  std::unique_ptr<SharedMemory> gradients_;
  std::unique_ptr<SharedMemory> values_;  // of the parameters
  std::unique_ptr<Tensors> tensors_;      // of which copies are under way until it is gone
  std::optional<OpenStep> open_step_;
  absl::Status failure_;  // of the first step that failed
  bool has_left_ = false;
  uint64_t steps_ = 0;
  bool is_synchronised_ = true;
  Resumed resumed_;
  std::optional<Returned> returned_;
  WireBytes wire_bytes_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_ATTACHED_SESSION_H_
