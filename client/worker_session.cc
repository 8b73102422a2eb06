#include "client/worker_session.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/start_values.h"
#include "log/log.h"
#include "proto/try_again.h"
#include "storage/disk.h"

namespace signpost {
namespace {

std::string Describe(const Returned& returned) {
  std::string line = absl::StrFormat(
      "came back at step %d with the state of the other workers; what the worker before had not "
      "sent yet is lost: ",
      returned.step);
  if (!returned.lost_error_norm) return absl::StrCat(line, "of which norm is not known");
  return absl::StrFormat("%san error of norm %.3g at most", line, *returned.lost_error_norm);
}

absl::Status InDirectory(const std::string& directory, const absl::Status& status) {
  if (status.ok()) return status;
  return WithMessage(status, absl::StrFormat("checkpoints in %s: %s", directory, status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerSession>> WorkerSession::Join(
    const SessionOptions& options, const OptimizerOptions& optimizer,
    std::vector<Parameter> parameters) {
  if (!options.gpu) return JoinOn(/*gpu=*/nullptr, options, optimizer, std::move(parameters));
  absl::StatusOr<std::unique_ptr<kernels::cuda::Gpu>> gpu = kernels::cuda::OpenGpu(*options.gpu);
  if (!gpu.ok()) return gpu.status();
  auto session = JoinOn(gpu->get(), options, optimizer, std::move(parameters));
  if (session.ok()) (*session)->own_gpu_ = *std::move(gpu);
  return session;
}

absl::StatusOr<std::unique_ptr<WorkerSession>> WorkerSession::JoinOn(
    kernels::cuda::Gpu* gpu, const SessionOptions& options, const OptimizerOptions& optimizer,
    std::vector<Parameter> parameters) {
  std::unique_ptr<Disk> checkpoints;
  if (!options.resume.empty()) {
    if (absl::Status status = CheckNobodyElseWrites(options.resume); !status.ok()) return status;
    checkpoints = OpenDirectory(options.resume);
  }
  WorkerOptions worker_options = options.worker;
  worker_options.gpu = gpu;
  worker_options.parameters_may_differ = options.start_from_rank_0;
  absl::StatusOr<std::vector<std::unique_ptr<Channel>>> channels = ConnectTo(options);
  if (!channels.ok()) return channels.status();
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      Worker::Join(worker_options, optimizer, parameters, *std::move(channels),
                   {.checkpoints = checkpoints.get(), .state = options.resume_state});
  const bool is_about_files =
      absl::IsNotFound(worker.status()) || absl::IsDataLoss(worker.status());
  if (is_about_files && checkpoints != nullptr) return InDirectory(options.resume, worker.status());
  if (!worker.ok()) return worker.status();
  const bool is_new = options.resume.empty() && !options.resume_state && !(*worker)->returned();
  if (options.start_from_rank_0 && is_new && options.worker.world_size > 1) {
    if (absl::Status status = TakeValuesOfRank0(options, **worker, parameters, gpu); !status.ok()) {
      // The others find out in the same way. The job's name should be free for the next start.
      (*worker)->Leave().IgnoreError();
      return status;
    }
  }
  if (gpu != nullptr) Tell(options, absl::StrCat("trains on ", gpu->name()));
  if ((*worker)->returned()) {
    const log::Scope scope({.step = (*worker)->returned()->step});
    Tell(options, Describe(*(*worker)->returned()));
  }
  return std::unique_ptr<WorkerSession>(
      new WorkerSession(*std::move(worker), WireByteCounter(PortsOf(options))));
}

absl::Status WorkerSession::Checkpoint(const std::string& directory) {
  absl::Status status = MakeDirectory(directory);
  if (status.ok()) status = worker_->Checkpoint(*OpenDirectory(directory));
  return InDirectory(directory, status);
}

absl::StatusOr<uint64_t> CheckpointStep(const std::string& directory) {
  if (absl::Status status = CheckNobodyElseWrites(directory); !status.ok()) return status;
  absl::StatusOr<uint64_t> step = NewestCheckpointStep(*OpenDirectory(directory));
  if (!step.ok()) return InDirectory(directory, step.status());
  return step;
}

}  // namespace signpost
