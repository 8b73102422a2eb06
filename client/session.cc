#include "client/session.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "storage/disk.h"
#include "worker/grpc_channel.h"

namespace signpost {
namespace {

absl::StatusOr<std::string> Variable(const char* name) {
  const char* value = std::getenv(name);
  if (value != nullptr && *value != '\0') return std::string(value);
  return absl::InvalidArgumentError(absl::StrFormat(
      "environment variable %s is not set; start the program under `signpost run`, or set it",
      name));
}

absl::StatusOr<uint32_t> NumberVariable(const char* name) {
  absl::StatusOr<std::string> text = Variable(name);
  if (!text.ok()) return text.status();
  uint32_t number;
  if (absl::SimpleAtoi(*text, &number)) return number;
  return absl::InvalidArgumentError(
      absl::StrFormat("environment variable %s is '%s', wanted a number", name, *text));
}

// The default if it is not set.
absl::StatusOr<FailureTimeout> FailureTimeoutVariable(const char* name) {
  if (std::getenv(name) == nullptr) return FailureTimeout();
  absl::StatusOr<FailureTimeout> timeout = FailureTimeout::Parse(std::getenv(name));
  if (timeout.ok()) return timeout;
  return absl::InvalidArgumentError(
      absl::StrFormat("environment variable %s: %s", name, timeout.status().message()));
}

// The ports of "host:port" targets; a target without one has no TCP socket to count.
std::vector<uint16_t> PortsOf(absl::Span<const std::string> targets) {
  std::vector<uint16_t> ports;
  for (const std::string& target : targets) {
    const size_t colon = target.rfind(':');
    uint32_t port;
    if (colon != std::string::npos && absl::SimpleAtoi(target.substr(colon + 1), &port)) {
      ports.push_back(port);
    }
  }
  return ports;
}

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
  return absl::Status(status.code(),
                      absl::StrFormat("checkpoints in %s: %s", directory, status.message()));
}

}  // namespace

void PrintConnection(const std::string& line) {
  std::fprintf(stderr, "signpost: %s\n", line.c_str());
}

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment() {
  SessionOptions options;
  absl::StatusOr<std::string> aggregators = Variable("SIGNPOST_AGGREGATORS");
  if (!aggregators.ok()) return aggregators.status();
  options.aggregators = absl::StrSplit(*aggregators, ',');
  absl::StatusOr<std::string> job = Variable("SIGNPOST_JOB");
  if (!job.ok()) return job.status();
  options.worker.job = *job;
  absl::StatusOr<uint32_t> rank = NumberVariable("SIGNPOST_RANK");
  if (!rank.ok()) return rank.status();
  options.worker.rank = *rank;
  absl::StatusOr<uint32_t> world_size = NumberVariable("SIGNPOST_WORLD_SIZE");
  if (!world_size.ok()) return world_size.status();
  options.worker.world_size = *world_size;
  absl::StatusOr<FailureTimeout> failure_timeout =
      FailureTimeoutVariable("SIGNPOST_FAILURE_TIMEOUT");
  if (!failure_timeout.ok()) return failure_timeout.status();
  options.failure_timeout = *failure_timeout;
  if (std::getenv("SIGNPOST_MIN_WORKERS") == nullptr) return options;
  absl::StatusOr<uint32_t> min_workers = NumberVariable("SIGNPOST_MIN_WORKERS");
  if (!min_workers.ok()) return min_workers.status();
  options.worker.min_workers = *min_workers;
  absl::StatusOr<std::string> deadline = Variable("SIGNPOST_ROUND_DEADLINE");
  if (!deadline.ok()) return deadline.status();
  if (absl::ParseDuration(*deadline, &options.worker.round_deadline)) return options;
  return absl::InvalidArgumentError(
      absl::StrFormat("environment variable SIGNPOST_ROUND_DEADLINE is '%s', wanted a duration, "
                      "such as 2s",
                      *deadline));
}

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options,
                                                       const OptimizerOptions& optimizer,
                                                       std::vector<Parameter> parameters) {
  OnConnection on_connection;
  if (options.on_connection) {
    on_connection = [tell = options.on_connection,
                     rank = options.worker.rank](const std::string& line) {
      tell(absl::StrFormat("rank %d: %s", rank, line));
    };
  }
  std::vector<std::unique_ptr<Channel>> channels;
  for (const std::string& target : options.aggregators) {
    channels.push_back(ConnectToAggregator(target, options.failure_timeout, on_connection));
  }
  std::unique_ptr<Disk> checkpoints;
  if (!options.resume.empty()) checkpoints = OpenDirectory(options.resume);
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Join(
      options.worker, optimizer, std::move(parameters), std::move(channels), checkpoints.get());
  if (absl::IsNotFound(worker.status()) || absl::IsDataLoss(worker.status())) {
    return InDirectory(options.resume, worker.status());
  }
  if (!worker.ok()) return worker.status();
  if (on_connection && (*worker)->returned()) on_connection(Describe(*(*worker)->returned()));
  return std::unique_ptr<Session>(
      new Session(*std::move(worker), WireByteCounter(PortsOf(options.aggregators))));
}

absl::StatusOr<StepReport> Session::Step(absl::Span<const absl::Span<const float>> gradients,
                                         absl::Span<const GroupRates> rates) {
  return worker_->Step(gradients, rates);
}

absl::Status Session::BeginStep(absl::Span<const GroupRates> rates) {
  return worker_->BeginStep(rates);
}

absl::Status Session::GradientReady(size_t parameter, absl::Span<const float> gradient) {
  return worker_->GradientReady(parameter, gradient);
}

absl::StatusOr<StepReport> Session::FinishStep() { return worker_->FinishStep(); }

absl::Status Session::Checkpoint(const std::string& directory) {
  absl::Status status = MakeDirectory(directory);
  if (status.ok()) status = worker_->Checkpoint(*OpenDirectory(directory));
  return InDirectory(directory, status);
}

absl::Status Session::Leave() { return worker_->Leave(); }

}  // namespace signpost
