// `signpost worker`: a node's worker, which processes of the node attach to over a socket in the
// file system.

#ifndef SIGNPOST_NODE_SERVER_H_
#define SIGNPOST_NODE_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "node/node.h"
#include "node/path_lock.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace signpost::node {

class Service;

struct ServerOptions {
  std::string listen;  // "unix:path"; who may open the path is this user only
  NodeOptions node;
};

// Serves node.proto until Stop or destruction. Thread-safe.
class Server {
 public:
  // INVALID_ARGUMENT for an address of another kind, a path that is too long, or ranks that cannot
  // be; ALREADY_EXISTS, with its process number, when another process listens there, or is about
  // to: a socket whose process has died is replaced. UNAVAILABLE when there can be no socket at the
  // path.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);

  ~Server();  // as Stop

  // Leaves all jobs, as Node::Stop, and listens no more. Blocks. Idempotent.
  void Stop();

 private:
  Server(const NodeOptions& options, std::unique_ptr<PathLock> lock);

  const std::unique_ptr<PathLock> lock_;  // until nothing is at the path any more
  Node node_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_SERVER_H_
