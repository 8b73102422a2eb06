// The aggregator as a gRPC server: start, port, drain.

#ifndef SIGNPOST_SERVER_SERVER_H_
#define SIGNPOST_SERVER_SERVER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/failure_timeout.h"
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
  bool insecure = false;               // allow plain text beyond loopback
  FailureTimeout failure_timeout;      // a worker without sign of life is disconnected
  AggregatorOptions aggregator;
  // What running jobs need to survive a crash or restart of this process is kept in here. Empty:
  // they do not.
  std::string state_dir;
  // Give up jobs whose state cannot be read, instead of refusing to start.
  bool allow_error_reset = false;
  // Where the metrics port listens, as `listen` but not unix:; beyond loopback too, since it takes
  // nothing and tells nothing secret. Empty: nowhere.
  std::string metrics_listen = {};
  // What else it shows. Called from its thread until the server is destroyed.
  std::function<std::vector<Gauge>()> gauges = nullptr;
};

// Serves aggregator.proto and gRPC's health protocol until Drain or destruction. Thread-safe.
class Server {
 public:
  // INVALID_ARGUMENT for a malformed address, a host that does not resolve, or a shard that is not
  // less than the number of shards; FAILED_PRECONDITION, with the reason, for an address beyond
  // loopback without `insecure`; UNAVAILABLE when the address cannot be bound. Errors of the state
  // directory as StateDir's.
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
  Server(const ServerOptions& options, std::unique_ptr<StateDir> state_dir);

  absl::Status Recover(bool allow_error_reset);
  absl::Status ServeUnixSocket(const std::string& address, grpc::ServerBuilder& builder);
  absl::Status ServeTcp(const ServerOptions& options, grpc::ServerBuilder& builder);
  absl::Status ServeMetrics(const ServerOptions& options);
  Observation Observe(const std::function<std::vector<Gauge>()>& gauges) const;
  void TakeSnapshots();
  void CloseLateRounds();
  void StopThreads();

  const std::unique_ptr<StateDir> state_dir_;  // or null
  std::vector<std::string> warnings_;
  Aggregator aggregator_;
  std::atomic<bool> stopping_ = false;
  std::thread snapshots_;
  std::thread late_rounds_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;    // of TCP connections
  std::unique_ptr<MetricsPort> metrics_;  // or null
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVER_H_
