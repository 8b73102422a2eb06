#include "server/server.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "failpoint/failpoint.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "proto/message.h"
#include "security/loopback.h"
#include "server/service.h"

namespace signpost {
namespace {

// After a drain, how long answers may take to get to workers that do not read.
constexpr absl::Duration kFlushTimeout = absl::Seconds(2);

// Calls at a time of one connection. A worker has twice as many under way as there are shards at
// most; if it had to wait with some, ranks could wait for each other's.
constexpr int kMaxStreams = 2048;

// A full disk is tried again this often.
constexpr absl::Duration kSnapshotRetryInterval = absl::Seconds(1);

// Least size of the largest message: a Join carries the names and shapes of all tensors.
constexpr uint64_t kMinMaxMessageBytes = uint64_t{4} << 20;

int MaxMessageBytes(const AggregatorLimits& limits) {
  constexpr uint64_t kMost = std::numeric_limits<int>::max() - kMaxHeaderBytes;
  return static_cast<int>(
      std::max(kMinMaxMessageBytes, std::min(limits.payload_bytes, kMost) + kMaxHeaderBytes));
}

// That this process may have: of the machine, or less (memory.max, of this version 2 control
// group).
uint64_t MemoryBytes() {
  const uint64_t physical = uint64_t{1} * sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
  std::ifstream file("/sys/fs/cgroup/memory.max");
  uint64_t limit = 0;
  return file >> limit && limit > 0 ? std::min(limit, physical) : physical;
}

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

void Configure(const ServerOptions& options, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(MaxMessageBytes(options.aggregator.limits));
  // Otherwise a second server on the same port would silently take half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  const FailureTimeout& failure = options.failure_timeout;
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(failure.keepalive_time()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             Milliseconds(failure.keepalive_timeout()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Workers ping as often as their own failure timeout wants it while a call waits for a slow rank.
  // gRPC would disconnect them for that, and have them ping half as often ever after. Their own
  // gRPC lets them ping once a second.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             Milliseconds(options.handshake_timeout));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.SetResourceQuota(
      grpc::ResourceQuota("signpost")
          .Resize(options.receive_bytes > 0 ? options.receive_bytes : MemoryBytes() / 2));
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);  // unused, it costs time in every call
}

// A worker that is there has noticed a restart by then, and come back.
AggregatorOptions Derive(const ServerOptions& options) {
  AggregatorOptions aggregator = options.aggregator;
  aggregator.restart_grace = 3 * options.failure_timeout.duration();
  return aggregator;
}

absl::Status CheckShard(const AggregatorOptions& options) {
  if (options.shard < options.shard_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("shard ", options.shard, " is not in [0, ", options.shard_count, ")"));
}

absl::Status CheckTokens(const ServerOptions& options) {
  if (absl::Status status = options.tokens.Check(); !status.ok()) return status;
  const bool is_tls = !options.security.tls_dir.empty() && !IsUnixAddress(options.listen);
  if (!options.tokens.wanted() || is_tls) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "tokens would travel in plain text: with a JWKS file an aggregator needs a TLS directory "
      "(--tls-dir or SIGNPOST_TLS_DIR) and a TCP address");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  if (absl::Status status = CheckShard(options.aggregator); !status.ok()) return status;
  absl::Status status = CheckTransport(options.listen, options.security);
  if (!status.ok()) return status;

  std::unique_ptr<StateDir> state_dir;
  if (!options.state_dir.empty()) {
    absl::StatusOr<std::unique_ptr<StateDir>> opened = StateDir::Open(
        options.state_dir, {options.aggregator.shard, options.aggregator.shard_count});
    if (!opened.ok()) return opened.status();
    state_dir = *std::move(opened);
    Reach(Failpoint::kStateDirCounted);
  }
  std::unique_ptr<Server> server(new Server(options, std::move(state_dir)));
  if (status = server->Protect(options); !status.ok()) return status;
  if (status = server->Recover(options.allow_error_reset); !status.ok()) return status;
  server->late_rounds_ = std::thread([self = server.get()] { self->CloseLateRounds(); });
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  Configure(options, builder);
  builder.RegisterService(server->service_.get());
  status = IsUnixAddress(options.listen) ? server->ServeUnixSocket(options.listen, builder)
                                         : server->ServeTcp(options, builder);
  // Last: a look at metrics looks at all that was made before.
  if (status.ok()) status = server->ServeMetrics(options);
  if (!status.ok()) return status;
  Reach(Failpoint::kServerListening);
  return server;
}

absl::Status Server::ServeMetrics(const ServerOptions& options) {
  if (options.metrics_listen.empty()) return absl::OkStatus();
  if (IsUnixAddress(options.metrics_listen)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics cannot be had at '", options.metrics_listen, "': wanted host:port"));
  }
  absl::Status status = CheckTransport(options.metrics_listen, {.insecure = true});
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<MetricsPort>> metrics =
      MetricsPort::Listen(options.metrics_listen, [this] { return Observe(); });
  if (metrics.ok()) metrics_ = *std::move(metrics);
  return metrics.status();
}

Observation Server::Observe() const {
  Observation observation = {.time = absl::Now(),
                             .aggregator = aggregator_.Metrics(),
                             .message_bytes_received = service_->exchange_bytes_received(),
                             .message_bytes_sent = service_->exchange_bytes_sent(),
                             .process = ReadProcessMetrics()};
  SecurityMetrics& security = observation.security;
  security.insecure = plain_text_warning_ != nullptr;
  if (tls_ != nullptr) {
    security.certificate_valid_until = tls_->valid_until();
    security.denied_calls = authorizer_->denied_calls();
  }
  if (acceptor_ != nullptr) security.refused_connections = acceptor_->refused_connections();
  return observation;
}

absl::Status Server::ServeUnixSocket(const std::string& address, grpc::ServerBuilder& builder) {
  int bound = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &bound);
  server_ = builder.BuildAndStart();
  if (server_ != nullptr && bound != 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address,
                                             ": another process may listen there, or the "
                                             "directory may not be there or not be writable"));
}

absl::Status Server::ServeTcp(const ServerOptions& options, grpc::ServerBuilder& builder) {
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(
      options.listen, options.failure_timeout.keepalive_timeout(), options.connections);
  if (!acceptor.ok()) return acceptor.status();
  auto to = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, Credentials());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("gRPC cannot serve on ", options.listen));
  }
  acceptor_ = *std::move(acceptor);
  acceptor_->Start(std::move(to));
  return absl::OkStatus();
}

Server::Server(const ServerOptions& options, std::unique_ptr<StateDir> state_dir)
    : state_dir_(std::move(state_dir)), aggregator_(Derive(options), state_dir_.get()) {}

Server::~Server() {
  StopThreads();
  if (acceptor_ != nullptr) acceptor_->Stop();
  aggregator_.Drain();
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(absl::Now() + kFlushTimeout));
}

absl::Status Server::Protect(const ServerOptions& options) {
  if (absl::Status status = CheckTokens(options); !status.ok()) return status;
  const bool loopback = IsLoopback(options.listen).value_or(false);
  if (!options.security.tls_dir.empty() && !IsUnixAddress(options.listen)) {
    auto tls = TlsCredentials::Load(options.security.tls_dir, options.on_warning);
    if (!tls.ok()) return tls.status();
    tls_ = *std::move(tls);
    if (tls_->identity().role != PeerRole::kAggregator) {
      return absl::InvalidArgumentError(
          absl::StrCat("TLS directory ", options.security.tls_dir, ": the certificate is of ",
                       tls_->identity().ToUri(), ", wanted one of an aggregator"));
    }
    std::unique_ptr<TokenVerifier> tokens;
    if (options.tokens.wanted()) {
      auto opened = TokenVerifier::Open(options.tokens, options.on_warning);
      if (!opened.ok()) return opened.status();
      tokens = *std::move(opened);
    }
    authorizer_ =
        std::make_shared<Authorizer>(tls_->identity(), std::move(tokens), options.on_warning);
  } else if (!loopback) {
    plain_text_warning_ = std::make_unique<PlainTextWarning>(options.listen, options.on_warning);
  }
  service_ = std::make_unique<Service>(aggregator_, options.aggregator.limits.payload_bytes,
                                       authorizer_.get());
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> Server::Credentials() const {
  if (tls_ == nullptr) return grpc::InsecureServerCredentials();
  std::shared_ptr<grpc::ServerCredentials> credentials = tls_->ForServers();
  credentials->SetAuthMetadataProcessor(authorizer_);
  return credentials;
}

absl::Status Server::Recover(bool allow_error_reset) {
  if (state_dir_ == nullptr) return absl::OkStatus();
  absl::StatusOr<StateDir::Recovered> recovered = state_dir_->Recover(allow_error_reset);
  if (!recovered.ok()) return recovered.status();
  warnings_ = recovered->warnings;
  Reach(Failpoint::kStateDirLoaded);
  if (absl::Status status = aggregator_.Restore(*recovered); !status.ok()) return status;
  snapshots_ = std::thread([this] { TakeSnapshots(); });
  return absl::OkStatus();
}

void Server::TakeSnapshots() {
  absl::Duration timeout = absl::InfiniteDuration();
  while (!stopping_) {
    aggregator_.AwaitSnapshotDue(timeout);
    const absl::Status status = aggregator_.TakeSnapshots();
    timeout = status.ok() ? absl::InfiniteDuration() : kSnapshotRetryInterval;
  }
}

void Server::CloseLateRounds() {
  while (!stopping_) aggregator_.AwaitLateRounds(aggregator_.CloseLateRounds());
}

void Server::StopThreads() {
  stopping_ = true;
  aggregator_.RingSnapshotBell();
  aggregator_.RingLateBell();
  if (snapshots_.joinable()) snapshots_.join();
  if (late_rounds_.joinable()) late_rounds_.join();
}

absl::Status Server::Drain(absl::Duration grace) {
  aggregator_.StopAdmitting();
  server_->GetHealthCheckService()->SetServingStatus(false);
  absl::Status status;
  if (state_dir_ != nullptr) {
    status = aggregator_.Suspend();
  } else {
    aggregator_.AwaitNoJobs(grace);
    aggregator_.Drain();
  }
  if (acceptor_ != nullptr) acceptor_->Stop();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kFlushTimeout));
  return status;
}

void Server::Wait() { server_->Wait(); }

}  // namespace signpost
