#include "server/server.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "failpoint/failpoint.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "log/log.h"
#include "proto/message.h"
#include "proto/payload_pool.h"
#include "proto/steady_time.h"
#include "security/loopback.h"
#include "security/private_umask.h"
#include "server/call_limit.h"
#include "server/service.h"
#include "storage/memory_limit.h"

namespace signpost {
namespace {

// After a drain, how long answers may take to get to workers that do not read.
constexpr absl::Duration kFlushTimeout = absl::Seconds(2);

// Calls at a time of one connection. A worker has twice as many under way as there are shards at
// most; if it had to wait with some, ranks could wait for each other's.
constexpr int kMaxStreams = 2048;

// Of one connection. A peer that reads its answers may have as many streams again as those whose
// ends are being written to it.
constexpr int kMaxCalls = 2 * kMaxStreams;

// What a call takes that nothing has been sent or received for.
constexpr uint64_t kCallBytes = 45 << 10;

// A full disk is tried again this often.
constexpr absl::Duration kSnapshotRetryInterval = absl::Seconds(1);

// How often it is looked whether a snapshot is slow.
constexpr absl::Duration kSnapshotWatchInterval = absl::Seconds(1);

// Least size of the largest message: a Join carries the names and shapes of all tensors.
constexpr uint64_t kMinMaxMessageBytes = uint64_t{4} << 20;

int MaxMessageBytes(const AggregatorLimits& limits) {
  constexpr uint64_t kMost = std::numeric_limits<int>::max() - kMaxHeaderBytes;
  return static_cast<int>(
      std::max(kMinMaxMessageBytes, std::min(limits.payload_bytes, kMost) + kMaxHeaderBytes));
}

// Together nine tenths: the rest is for calls, threads and what else there is.
uint64_t HeldBytes(const AggregatorLimits& limits) {
  const bool is_limited = limits.held_bytes != AggregatorLimits::kUnlimited;
  return is_limited ? limits.held_bytes : MemoryLimit() / 10 * 6;
}

uint64_t ReceiveBytes(const ServerOptions& options) {
  return options.receive_bytes > 0 ? options.receive_bytes : MemoryLimit() / 10 * 3;
}

// Of all connections: they take a tenth.
int CallsInAll() {
  constexpr uint64_t kMost = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<uint64_t>(MemoryLimit() / 10 / kCallBytes, kMaxCalls, kMost));
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
  builder.SetResourceQuota(grpc::ResourceQuota("signpost").Resize(ReceiveBytes(options)));
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);  // unused, it costs time in every call
}

// A worker that waits for an answer has noticed a restart by then, and come back.
AggregatorOptions Derive(const ServerOptions& options,
                         std::function<bool(const std::string& peer)> is_connected) {
  AggregatorOptions aggregator = options.aggregator;
  if (!IsUnixAddress(options.listen)) aggregator.is_connected = std::move(is_connected);
  aggregator.restart_grace = 3 * options.failure_timeout.duration();
  aggregator.limits.held_bytes = HeldBytes(options.aggregator.limits);
  return aggregator;
}

absl::Status CheckShard(const AggregatorOptions& options) {
  if (options.shard < options.shard_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("shard ", options.shard, " is not in [0, ", options.shard_count, ")"));
}

absl::Status CheckRole(const ServerOptions& options, const Identity& identity) {
  if (identity.role == PeerRole::kAggregator) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("TLS directory ", options.security.tls_dir,
                                                 ": the certificate is of ", identity.ToUri(),
                                                 ", wanted one of an aggregator"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  if (absl::Status status = CheckShard(options.aggregator); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ServerSecurity>> security =
      ServerSecurity::Open(options.security, options.listen, options.tokens, options.on_warning);
  if (!security.ok()) return security.status();
  absl::Status status;
  if (const Identity* identity = (*security)->identity(); identity != nullptr) {
    status = CheckRole(options, *identity);
  }
  if (!status.ok()) return status;

  CountWhileRunning();
  std::unique_ptr<StateDir> state_dir;
  if (!options.state_dir.empty()) {
    absl::StatusOr<std::unique_ptr<StateDir>> opened = StateDir::Open(
        options.state_dir, {options.aggregator.shard, options.aggregator.shard_count});
    if (!opened.ok()) return opened.status();
    state_dir = *std::move(opened);
    Reach(Failpoint::kStateDirCounted);
  }
  std::unique_ptr<Server> server(new Server(options, *std::move(security), std::move(state_dir)));
  PayloadPool::Global().KeepWithin(HeldBytes(options.aggregator.limits));
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
  absl::StatusOr<std::unique_ptr<MetricsPort>> metrics = MetricsPort::Listen(
      options.metrics_listen, options.metrics_hosts, [this] { return Observe(); });
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
  security.insecure = security_->is_exposed();
  security.certificate_valid_until = security_->valid_until();
  if (const Authorizer* authorizer = security_->authorizer(); authorizer != nullptr) {
    security.denied_calls = authorizer->denied_calls();
  }
  if (acceptor_ != nullptr) security.refused_connections = acceptor_->refused_connections();
  return observation;
}

absl::Status Server::ServeUnixSocket(const std::string& address, grpc::ServerBuilder& builder) {
  int bound = 0;
  builder.AddListeningPort(address, security_->credentials(), &bound);
  {
    const PrivateUmask for_socket;
    server_ = builder.BuildAndStart();
  }
  if (server_ != nullptr && bound != 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address,
                                             ": another process may listen there, or the "
                                             "directory may not be there or not be writable"));
}

absl::Status Server::ServeTcp(const ServerOptions& options, grpc::ServerBuilder& builder) {
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor =
      Acceptor::Listen(options.listen, options.failure_timeout.keepalive_timeout(),
                       options.connections, options.on_warning);
  if (!acceptor.ok()) return acceptor.status();
  auto to = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      security_->credentials());
  LimitCalls(
      {.of_connection = kMaxCalls, .in_all = CallsInAll()},
      [acceptor = acceptor->get()](const ExcessCalls& excess) {
        acceptor->Abort(excess.peer, absl::StrCat("it has ", excess.calls,
                                                  " calls, with those that it has reset, or whose "
                                                  "answers it does not read"));
      },
      builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("gRPC cannot serve on ", options.listen));
  }
  acceptor_ = *std::move(acceptor);
  acceptor_->Start(std::move(to));
  return absl::OkStatus();
}

Server::Server(const ServerOptions& options, std::unique_ptr<ServerSecurity> security,
               std::unique_ptr<StateDir> state_dir)
    : security_(std::move(security)),
      state_dir_(std::move(state_dir)),
      aggregator_(Derive(options, [this](const std::string& peer) { return IsConnected(peer); }),
                  state_dir_.get()),
      service_(std::make_unique<Service>(aggregator_, options.aggregator.limits.payload_bytes,
                                         security_->authorizer())) {}

bool Server::IsConnected(const std::string& peer) const { return acceptor_->Has(peer); }

Server::~Server() {
  StopThreads();
  if (acceptor_ != nullptr) acceptor_->Stop();
  aggregator_.Drain();
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(absl::Now() + kFlushTimeout));
}

absl::Status Server::Recover(bool allow_error_reset) {
  if (state_dir_ == nullptr) return absl::OkStatus();
  absl::StatusOr<StateDir::Recovered> recovered = state_dir_->Recover(allow_error_reset);
  if (!recovered.ok()) return recovered.status();
  warnings_ = recovered->warnings;
  Reach(Failpoint::kStateDirLoaded);
  if (absl::Status status = aggregator_.Restore(*std::move(recovered)); !status.ok()) return status;
  snapshots_ = std::thread([this] { TakeSnapshots(); });
  snapshot_watch_ = std::thread([this] { WatchSnapshots(); });
  return absl::OkStatus();
}

void Server::TakeSnapshots() {
  bool fails = false;
  while (!stopping_.HasBeenNotified()) {
    // Each round that closes meanwhile rings the bell.
    if (fails) stopping_.WaitForNotificationWithTimeout(kSnapshotRetryInterval);
    if (!fails) aggregator_.AwaitSnapshotDue(absl::InfiniteDuration());
    const absl::Status status = aggregator_.TakeSnapshots();
    if (!status.ok() && !fails) {
      log::Write(log::Level::kWarning, "signpost aggregator",
                 absl::StrCat("cannot write down where jobs are: ", status.message(),
                              ". It is tried again each second; rounds go on until workers would "
                              "have to keep too many frames, and then wait"));
    } else if (status.ok() && fails) {
      log::Write(log::Level::kInfo, "signpost aggregator", "where jobs are is written down again");
    }
    fails = !status.ok();
  }
}

// By a thread that no disk can stop.
void Server::WatchSnapshots() {
  while (!stopping_.WaitForNotificationWithTimeout(kSnapshotWatchInterval)) {
    aggregator_.TellOfSlowSnapshot();
  }
}

void Server::CloseLateRounds() {
  while (!stopping_.HasBeenNotified()) aggregator_.AwaitLateRounds(aggregator_.CloseLateRounds());
}

void Server::StopThreads() {
  stopping_.Notify();
  aggregator_.RingSnapshotBell();
  aggregator_.RingLateBell();
  if (snapshots_.joinable()) snapshots_.join();
  if (snapshot_watch_.joinable()) snapshot_watch_.join();
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
