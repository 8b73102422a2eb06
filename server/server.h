// The aggregator as a gRPC server: start, port, drain.

#ifndef SIGNPOST_SERVER_SERVER_H_
#define SIGNPOST_SERVER_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/aggregator.h"

namespace grpc {
class Server;
}

namespace signpost {

class Service;

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // or [IPv6]:port, unix:path; port 0 lets the kernel choose
  bool insecure = false;               // allow plain text beyond loopback
  AggregatorOptions aggregator;
};

// Serves aggregator.proto and gRPC's health protocol until Drain or destruction. Thread-safe.
class Server {
 public:
  // INVALID_ARGUMENT for a malformed address, a host that does not resolve, or a shard that is not
  // less than the number of shards; FAILED_PRECONDITION, with the reason, for an address beyond
  // loopback without `insecure`; UNAVAILABLE when the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);

  ~Server();  // Drains without grace.

  // 0 for a unix: address.
  uint16_t port() const { return port_; }

  // Takes no new job, gives running jobs up to `grace` to leave, then ends the calls that still
  // wait with UNAVAILABLE and stops. gRPC health says NOT_SERVING from the start of it. Blocks;
  // idempotent; a second call with less grace ends the first one's.
  void Drain(absl::Duration grace);

  // Blocks until the server has stopped.
  void Wait();

 private:
  explicit Server(const ServerOptions& options);

  Aggregator aggregator_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  uint16_t port_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVER_H_
