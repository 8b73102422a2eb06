#include "client/session_options.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "config/document.h"
#include "config/file.h"
#include "config/session_keys.h"
#include "log/log.h"
#include "proto/processors.h"
#include "security/client_security.h"
#include "trace/recorder.h"
#include "worker/chunk_crew.h"
#include "worker/grpc_channel.h"

namespace signpost {
namespace {

using config::SessionKey;
using config::SessionSettings;
using config::Setting;

const SessionKey& KeyOf(absl::string_view name) {
  return *std::find_if(config::SessionKeys().begin(), config::SessionKeys().end(),
                       [name](const SessionKey& key) { return key.name == name; });
}

// "environment variable SIGNPOST_RANK", "job.yaml:3: rank".
std::string Subject(absl::string_view name, const Setting& setting) {
  if (setting.source != config::Source::kVariable) return absl::StrCat(setting.origin, ": ", name);
  return absl::StrCat("environment variable ", KeyOf(name).variable);
}

absl::StatusOr<std::string> Text(const SessionSettings& settings, absl::string_view name) {
  const Setting* const setting = settings.Find(name);
  if (setting != nullptr) return setting->Text();
  return absl::InvalidArgumentError(absl::StrFormat(
      "environment variable %s is not set; start the program under `signpost run`, or set it, or "
      "'%s' in the configuration file that SIGNPOST_CONFIG names",
      KeyOf(name).variable, name));
}

absl::StatusOr<uint32_t> Number(const SessionSettings& settings, absl::string_view name) {
  const absl::StatusOr<std::string> text = Text(settings, name);
  if (!text.ok()) return text.status();
  uint32_t number;
  if (absl::SimpleAtoi(*text, &number)) return number;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is %s, wanted a number", Subject(name, *settings.Find(name)), config::Quoted(*text)));
}

// The default if nothing is said.
absl::StatusOr<FailureTimeout> FailureTimeoutOf(const SessionSettings& settings) {
  constexpr absl::string_view kName = "failure-timeout";
  const Setting* const setting = settings.Find(kName);
  if (setting == nullptr) return FailureTimeout();
  absl::StatusOr<FailureTimeout> timeout = FailureTimeout::Parse(setting->Text());
  if (timeout.ok()) return timeout;
  return absl::InvalidArgumentError(
      absl::StrCat(Subject(kName, *setting), ": ", timeout.status().message()));
}

// Leaves the default where nothing is said.
absl::Status SetTimeout(const SessionSettings& settings, absl::string_view name,
                        absl::Duration& timeout) {
  const Setting* const setting = settings.Find(name);
  if (setting == nullptr) return absl::OkStatus();
  absl::Duration parsed;
  if (absl::ParseDuration(setting->Text(), &parsed) && parsed > absl::ZeroDuration()) {
    timeout = parsed;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %s, wanted a duration above 0, such as 90s or 10m",
                      Subject(name, *setting), config::Quoted(setting->Text())));
}

absl::StatusOr<TransportSecurity> SecurityOf(const SessionSettings& settings) {
  constexpr absl::string_view kInsecure = "insecure-i-understand";
  TransportSecurity security;
  security.tls_dir = Text(settings, "tls-dir").value_or("");
  security.token_file = Text(settings, "token-file").value_or("");
  const Setting* const insecure = settings.Find(kInsecure);
  if (insecure == nullptr) return security;
  const std::optional<bool> value = config::ParseSwitch(insecure->Text());
  if (!value.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %s, wanted 1 or true, for plain text beyond loopback",
                        Subject(kInsecure, *insecure), config::Quoted(insecure->Text())));
  }
  security.insecure = *value;
  return security;
}

// From 1 to `most`.
absl::StatusOr<uint32_t> Count(const SessionSettings& settings, absl::string_view name,
                               uint32_t most, uint32_t otherwise) {
  const Setting* const setting = settings.Find(name);
  if (setting == nullptr) return otherwise;
  absl::StatusOr<uint32_t> count = Number(settings, name);
  if (!count.ok() || (*count >= 1 && *count <= most)) return count;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is %s, wanted 1 to %d", Subject(name, *setting), config::Quoted(setting->Text()), most));
}

absl::StatusOr<uint32_t> ThreadsOf(const SessionSettings& settings) {
  return Count(settings, "threads", ChunkCrew::kMostThreads, ShareOfProcessors());
}

absl::StatusOr<uint32_t> ConnectionsOf(const SessionSettings& settings) {
  return Count(settings, "connections", SessionOptions::kMostConnections, /*otherwise=*/1);
}

// Both or neither.
absl::Status SetRoundDeadline(const SessionSettings& settings, WorkerOptions& worker) {
  constexpr absl::string_view kDeadline = "round-deadline";
  if (settings.Find("min-workers") == nullptr && settings.Find(kDeadline) == nullptr) {
    return absl::OkStatus();
  }
  const absl::StatusOr<uint32_t> min_workers = Number(settings, "min-workers");
  if (!min_workers.ok()) return min_workers.status();
  worker.min_workers = *min_workers;
  const absl::StatusOr<std::string> deadline = Text(settings, kDeadline);
  if (!deadline.ok()) return deadline.status();
  if (absl::ParseDuration(*deadline, &worker.round_deadline)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %s, wanted a duration, such as 2s",
                                                    Subject(kDeadline, *settings.Find(kDeadline)),
                                                    config::Quoted(*deadline)));
}

// The file is read once by the name that SIGNPOST_CONFIG has: it may be replaced between two joins,
// and the name be one in another directory then.
absl::StatusOr<SessionSettings> SettingsOfProcess() {
  static absl::Mutex mutex;
  static auto* const files = new std::map<std::string, std::optional<config::File>>;
  const std::optional<Setting> variable = config::SettingOf("SIGNPOST_CONFIG");
  const std::string name = variable.has_value() ? variable->Text() : "";
  const absl::MutexLock lock(&mutex);
  auto file = files->find(name);
  if (file == files->end()) {
    absl::StatusOr<std::optional<config::File>> read = config::File::FromEnvironment();
    if (!read.ok()) return read.status();
    file = files->emplace(name, *std::move(read)).first;
  }
  return SessionSettings::Collect(file->second.has_value() ? &*file->second : nullptr);
}

std::string LineOf(uint32_t rank, const std::string& line) {
  return absl::StrFormat("rank %d: %s", rank, line);
}

}  // namespace

void PrintConnection(const std::string& line) {
  log::Write(log::Level::kWarning, "signpost", line);
}

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment() {
  const absl::StatusOr<SessionSettings> settings = SettingsOfProcess();
  if (!settings.ok()) return settings.status();
  return FromSettings(*settings);
}

absl::StatusOr<SessionOptions> SessionOptions::FromSettings(const SessionSettings& settings) {
  SessionOptions options;
  options.node = Text(settings, "node").value_or("");
  absl::StatusOr<std::string> aggregators = Text(settings, "aggregators");
  if (aggregators.ok()) {
    options.aggregators = SplitAddresses(*aggregators);
  } else if (options.node.empty()) {
    return aggregators.status();
  }
  absl::StatusOr<std::string> job = Text(settings, "job");
  if (!job.ok()) return job.status();
  options.worker.job = *job;
  absl::StatusOr<uint32_t> rank = Number(settings, "rank");
  if (!rank.ok()) return rank.status();
  options.worker.rank = *rank;
  absl::StatusOr<uint32_t> world_size = Number(settings, "world-size");
  if (!world_size.ok()) return world_size.status();
  options.worker.world_size = *world_size;
  absl::StatusOr<TransportSecurity> security = SecurityOf(settings);
  if (!security.ok()) return security.status();
  options.security = *security;
  absl::StatusOr<FailureTimeout> failure_timeout = FailureTimeoutOf(settings);
  if (!failure_timeout.ok()) return failure_timeout.status();
  options.failure_timeout = *failure_timeout;
  absl::Status timeouts = SetTimeout(settings, "join-timeout", options.worker.join_timeout);
  timeouts.Update(SetTimeout(settings, "exchange-timeout", options.worker.exchange_timeout));
  if (!timeouts.ok()) return timeouts;
  const absl::StatusOr<uint32_t> connections = ConnectionsOf(settings);
  if (!connections.ok()) return connections.status();
  options.connections = *connections;
  absl::StatusOr<uint32_t> threads = ThreadsOf(settings);
  if (!threads.ok()) return threads.status();
  options.worker.threads = *threads;
  if (absl::Status status = SetRoundDeadline(settings, options.worker); !status.ok()) {
    return status;
  }
  if (const config::Setting* trace = settings.Find("trace")) options.trace = trace->Text();
  return options;
}

std::vector<std::string> SplitAddresses(absl::string_view addresses) {
  std::vector<std::string> split = absl::StrSplit(addresses, ',');
  for (std::string& address : split) absl::StripAsciiWhitespace(&address);
  return split;
}

absl::StatusOr<uint32_t> ThreadsFromEnvironment() {
  const absl::StatusOr<SessionSettings> settings = SettingsOfProcess();
  if (!settings.ok()) return settings.status();
  return ThreadsOf(*settings);
}

absl::StatusOr<uint32_t> ConnectionsFromEnvironment() {
  const absl::StatusOr<SessionSettings> settings = SettingsOfProcess();
  if (!settings.ok()) return settings.status();
  return ConnectionsOf(*settings);
}

absl::StatusOr<std::string> TraceFromEnvironment() {
  const absl::StatusOr<SessionSettings> settings = SettingsOfProcess();
  if (!settings.ok()) return settings.status();
  const config::Setting* const trace = settings->Find("trace");
  return trace == nullptr ? "" : trace->Text();
}

uint32_t ShareOfProcessors(uint32_t processes) {
  constexpr uint32_t kMostThreads = 8;
  const uint32_t share = ProcessorCount() / std::max(processes, 1u);
  return std::clamp(share, 1u, kMostThreads);
}

uint32_t ShareOfProcessors() {
  // Whoever set it did not ask us.
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  uint32_t processes = 1;
  if (text != nullptr && !absl::SimpleAtoi(text, &processes)) processes = 1;
  return ShareOfProcessors(processes);
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
  if (options.connections < 1 || options.connections > SessionOptions::kMostConnections) {
    return absl::InvalidArgumentError(absl::StrFormat("connections is %d, wanted 1 to %d",
                                                      options.connections,
                                                      SessionOptions::kMostConnections));
  }
  if (absl::Status status = StartTrace(options); !status.ok()) return status;
  std::vector<std::string> targets = options.aggregators;
  for (std::string& target : targets) absl::StripAsciiWhitespace(&target);
  const auto security =
      ClientSecurity::Open(options.security, targets, on_connection, options.worker.job);
  if (!security.ok()) return security.status();
  std::vector<std::unique_ptr<Channel>> channels;
  for (const std::string& target : targets) {
    channels.push_back(ConnectToAggregator(target, options.failure_timeout, on_connection,
                                           *security, options.connections));
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
