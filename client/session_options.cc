#include "client/session_options.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "log/log.h"
#include "security/client_security.h"
#include "trace/recorder.h"
#include "worker/chunk_crew.h"
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

std::string LineOf(uint32_t rank, const std::string& line) {
  return absl::StrFormat("rank %d: %s", rank, line);
}

}  // namespace

void PrintConnection(const std::string& line) {
  log::Write(log::Level::kWarning, "signpost", line);
}

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment() {
  SessionOptions options;
  options.node = Variable("SIGNPOST_NODE").value_or("");
  absl::StatusOr<std::string> aggregators = Variable("SIGNPOST_AGGREGATORS");
  if (aggregators.ok()) {
    options.aggregators = absl::StrSplit(*aggregators, ',');
  } else if (options.node.empty()) {
    return aggregators.status();
  }
  absl::StatusOr<std::string> job = Variable("SIGNPOST_JOB");
  if (!job.ok()) return job.status();
  options.worker.job = *job;
  absl::StatusOr<uint32_t> rank = NumberVariable("SIGNPOST_RANK");
  if (!rank.ok()) return rank.status();
  options.worker.rank = *rank;
  absl::StatusOr<uint32_t> world_size = NumberVariable("SIGNPOST_WORLD_SIZE");
  if (!world_size.ok()) return world_size.status();
  options.worker.world_size = *world_size;
  absl::StatusOr<TransportSecurity> security = TransportSecurity::FromEnvironment();
  if (!security.ok()) return security.status();
  options.security = *security;
  absl::StatusOr<FailureTimeout> failure_timeout =
      FailureTimeoutVariable("SIGNPOST_FAILURE_TIMEOUT");
  if (!failure_timeout.ok()) return failure_timeout.status();
  options.failure_timeout = *failure_timeout;
  absl::StatusOr<uint32_t> threads = ThreadsFromEnvironment();
  if (!threads.ok()) return threads.status();
  options.worker.threads = *threads;
  options.trace = Variable("SIGNPOST_TRACE").value_or("");
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

absl::StatusOr<uint32_t> ThreadsFromEnvironment() {
  constexpr uint32_t kMostThreads = 8;
  const char* const text = std::getenv("SIGNPOST_THREADS");
  if (text != nullptr && *text != '\0') {
    absl::StatusOr<uint32_t> threads = NumberVariable("SIGNPOST_THREADS");
    if (!threads.ok() || (*threads >= 1 && *threads <= ChunkCrew::kMostThreads)) return threads;
    return absl::InvalidArgumentError(
        absl::StrFormat("environment variable SIGNPOST_THREADS is '%s', wanted 1 to %d", text,
                        ChunkCrew::kMostThreads));
  }
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof processors, &processors) != 0) return 1;
  // Whoever set it did not ask us.
  const absl::StatusOr<uint32_t> processes = NumberVariable("LOCAL_WORLD_SIZE");
  const uint32_t share = CPU_COUNT(&processors) / std::max(processes.value_or(1), 1u);
  return std::clamp(share, 1u, kMostThreads);
}

void Tell(const SessionOptions& options, const std::string& line) {
  if (!options.on_connection) return;
  const log::Scope scope({.job = options.worker.job, .worker = options.worker.rank});
  options.on_connection(LineOf(options.worker.rank, line));
}

absl::Status StartTrace(const SessionOptions& options) {
  if (options.trace.empty()) return absl::OkStatus();
  return trace::Start(options.trace, absl::StrFormat("rank %d", options.worker.rank));
}

absl::StatusOr<std::vector<std::unique_ptr<Channel>>> ConnectTo(const SessionOptions& options) {
  OnConnection on_connection = [](const std::string&) {};
  if (options.on_connection) {
    on_connection = [tell = options.on_connection, job = options.worker.job,
                     rank = options.worker.rank](const std::string& line) {
      const log::Scope scope({.job = job, .worker = rank});
      tell(LineOf(rank, line));
    };
  }
  if (absl::Status status = StartTrace(options); !status.ok()) return status;
  const auto security = ClientSecurity::Open(options.security, options.aggregators, on_connection);
  if (!security.ok()) return security.status();
  std::vector<std::unique_ptr<Channel>> channels;
  for (const std::string& target : options.aggregators) {
    channels.push_back(
        ConnectToAggregator(target, options.failure_timeout, on_connection, *security));
  }
  return channels;
}

std::vector<uint16_t> PortsOf(const SessionOptions& options) {
  std::vector<uint16_t> ports;
  for (const std::string& target : options.aggregators) {
    const size_t colon = target.rfind(':');
    uint32_t port;
    if (colon != std::string::npos && absl::SimpleAtoi(target.substr(colon + 1), &port)) {
      ports.push_back(port);
    }
  }
  return ports;
}

}  // namespace signpost
