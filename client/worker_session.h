// A session whose worker is in this process.

#ifndef SIGNPOST_CLIENT_WORKER_SESSION_H_
#define SIGNPOST_CLIENT_WORKER_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "worker/onebit_adam.h"
#include "worker/wire_bytes.h"
#include "worker/worker.h"

namespace signpost {

// All calls as Session has them. Not thread-safe.
class WorkerSession final : public Session {
 public:
  static absl::StatusOr<std::unique_ptr<WorkerSession>> Join(const SessionOptions& options,
                                                             const OptimizerOptions& optimizer,
                                                             std::vector<Parameter> parameters);
  // The same on a GPU that is open, and outlives the session; null: on the host. options.gpu is not
  // looked at.
  static absl::StatusOr<std::unique_ptr<WorkerSession>> JoinOn(kernels::cuda::Gpu* gpu,
                                                               const SessionOptions& options,
                                                               const OptimizerOptions& optimizer,
                                                               std::vector<Parameter> parameters);

  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return worker_->SetStream(stream);
  }

  absl::StatusOr<StepReport> Step(absl::Span<const Gradient> gradients,
                                  absl::Span<const GroupRates> rates) override {
    return Counted(worker_->Step(gradients, rates));
  }
  absl::Status BeginStep(absl::Span<const GroupRates> rates) override {
    return worker_->BeginStep(rates);
  }
  absl::Status GradientReady(size_t parameter, Gradient gradient) override {
    return worker_->GradientReady(parameter, gradient);
  }
  absl::Status AdvanceStep() { return worker_->AdvanceStep(); }  // as Worker's
  absl::StatusOr<StepReport> FinishStep() override { return Counted(worker_->FinishStep()); }

  absl::Status Checkpoint(const std::string& directory) override;
  absl::StatusOr<std::string> SaveState() override { return worker_->SaveState(); }
  absl::Status Leave() override { return worker_->Leave(); }
  JobOutlook Outlook() const { return worker_->Outlook(); }  // as Worker's

  uint64_t steps() const override { return worker_->steps(); }
  bool is_synchronised() const override { return worker_->is_synchronised(); }
  const Resumed& resumed() const override { return worker_->resumed(); }
  const std::optional<Returned>& returned() const override { return worker_->returned(); }
  uint64_t elements() const override { return worker_->layout().elements(); }
  uint32_t ParametersCrc32c() const override { return worker_->ParametersCrc32c(); }
  WireBytes wire_bytes() override { return counter_.Read(); }

 private:
  WorkerSession(std::unique_ptr<Worker> worker, WireByteCounter counter)
      : worker_(std::move(worker)), counter_(std::move(counter)) {}

  // Connections that break before the next reading count with what they have had until now.
  absl::StatusOr<StepReport> Counted(absl::StatusOr<StepReport> report) {
    counter_.Read();
    return report;
  }

  std::unique_ptr<kernels::cuda::Gpu> own_gpu_;  // null: it is the caller's, or there is none
  std::unique_ptr<Worker> worker_;
  WireByteCounter counter_;
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_WORKER_SESSION_H_
