#include "client/reduction_session.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/owner.h"

namespace signpost {

absl::StatusOr<std::unique_ptr<ReductionSession>> ReductionSession::Join(
    const SessionOptions& options, absl::string_view name, const ReductionOptions& reduction,
    std::vector<Parameter> tensors) {
  if (absl::Status status = Owner::CheckMayJoin(); !status.ok()) return status;
  const Owner while_joining;
  if (name.empty()) return absl::InvalidArgumentError("a reduction needs a name");
  WorkerOptions worker_options = options.worker;
  worker_options.job = absl::StrCat(options.worker.job, "/", name);
  if (!options.node.empty()) {
    // Lateness is a matter of nodes there, and those who reduce are processes.
    worker_options.round_deadline = absl::ZeroDuration();
    worker_options.min_workers = 0;
  }
  std::unique_ptr<kernels::cuda::Gpu> gpu;
  if (options.gpu) {
    absl::StatusOr<std::unique_ptr<kernels::cuda::Gpu>> opened =
        kernels::cuda::OpenGpu(*options.gpu);
    if (!opened.ok()) return opened.status();
    gpu = *std::move(opened);
  }
  worker_options.gpu = gpu.get();
  absl::StatusOr<std::vector<std::unique_ptr<Channel>>> channels = ConnectTo(options);
  if (!channels.ok()) return channels.status();
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      Worker::JoinReduction(worker_options, reduction, std::move(tensors), *std::move(channels));
  if (!worker.ok()) return worker.status();
  return std::unique_ptr<ReductionSession>(
      new ReductionSession(std::move(gpu), *std::move(worker), WireByteCounter(PortsOf(options))));
}

}  // namespace signpost
