// The aggregator as a gRPC server: start, port, drain.

#ifndef SIGNPOST_SERVER_SERVER_H_
#define SIGNPOST_SERVER_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "proto/failure_timeout.h"
#include "security/server_security.h"
#include "security/token_verifier.h"
#include "security/transport_security.h"
#include "server/acceptor.h"
#include "server/aggregator.h"
#include "server/exposition.h"
#include "server/metrics_port.h"

namespace grpc {
class Server;
class ServerBuilder;
}  // namespace grpc

namespace signpost {

class Service;

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // or [IPv6]:port, unix:path; port 0 lets the kernel choose
  TransportSecurity
      security;         // a unix: socket is in plain text, and its directory's mode guards it
  TokenOptions tokens;  // with mTLS: what callers need beside their certificates
  FailureTimeout failure_timeout;  // a worker without sign of life is disconnected
  // For TLS, and HTTP/2's first frames: who takes longer is disconnected.
  absl::Duration handshake_timeout = absl::Seconds(10);
  ConnectionLimits connections;
  // What the transport may have received and not handed on yet, over all connections: beyond it,
  // they are read no further, and some may be closed. 0: three tenths of MemoryLimit()
  // (--max-receive-bytes).
  uint64_t receive_bytes = 0;
  AggregatorOptions aggregator;  // held_bytes that are not limited: six tenths of it
  // What running jobs need to survive a crash or restart of this process is kept in here. Empty:
  // they do not.
  std::string state_dir;
  // Give up jobs whose state cannot be read, instead of refusing to start.
  bool allow_error_reset = false;
  // Gets a line for a person: about certificates, plain text, denied calls, connections that are
  // ended. From any thread.
  std::function<void(const std::string& line)> on_warning = [](const std::string&) {};
  // Where the metrics port listens, as `listen` but not unix:; beyond loopback too, since it takes
  // nothing and tells nothing secret. Empty: nowhere.
  std::string metrics_listen = {};
  // Names by which browsers may ask there, as a proxy's: see IsOwnHost.
  std::vector<std::string> metrics_hosts = {};
};

// Serves aggregator.proto and gRPC's health protocol until Drain or destruction. Thread-safe.
class Server {
 public:
  // INVALID_ARGUMENT for a malformed address, a shard that is not less than the number of shards,
  // or a certificate that is no aggregator's; UNAVAILABLE when the address cannot be bound. Errors
  // of the security as ServerSecurity::Open's, of the state directory as StateDir's.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);

  // Stops at once. Jobs whose state directory it had are recovered as after a crash.
  ~Server();

  // 0 for a unix: address.
  uint16_t port() const { return acceptor_ == nullptr ? 0 : acceptor_->port(); }

  // 0 without one.
  uint16_t metrics_port() const { return metrics_ == nullptr ? 0 : metrics_->port(); }

  // What could not be read in the state directory, for a person.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // With a state directory: ends the calls that wait with UNAVAILABLE, writes down where all jobs
  // are, and stops; the workers go on with the next process. Without one: takes no new job, gives
  // running jobs up to `grace` to leave, then ends the calls that still wait with UNAVAILABLE and
  // stops. gRPC health says NOT_SERVING from the start of it. Blocks; idempotent; a second call
  // with less grace ends the first one's. The error, if any, with which the state could not be
  // written: jobs are then recovered as after a crash.
  absl::Status Drain(absl::Duration grace);

  // Blocks until the server has stopped.
  void Wait();

 private:
  Server(const ServerOptions& options, std::unique_ptr<ServerSecurity> security,
         std::unique_ptr<StateDir> state_dir);

  absl::Status Recover(bool allow_error_reset);
  absl::Status ServeUnixSocket(const std::string& address, grpc::ServerBuilder& builder);
  absl::Status ServeTcp(const ServerOptions& options, grpc::ServerBuilder& builder);
  absl::Status ServeMetrics(const ServerOptions& options);
  Observation Observe() const;
  // Of TCP.
  bool IsConnected(const std::string& peer) const;
  void TakeSnapshots();
  void CloseLateRounds();
  void WatchSnapshots();
  void StopThreads();

  const std::unique_ptr<ServerSecurity> security_;
  const std::unique_ptr<StateDir> state_dir_;  // or null
  std::vector<std::string> warnings_;
  Aggregator aggregator_;
  absl::Notification stopping_;
  std::thread snapshots_;
  std::thread snapshot_watch_;
  std::thread late_rounds_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;    // of TCP connections
  std::unique_ptr<MetricsPort> metrics_;  // or null
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVER_H_
