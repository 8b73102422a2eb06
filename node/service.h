// The gRPC adapter: translates between node.proto's streams and a Node, and decides nothing.

#ifndef SIGNPOST_NODE_SERVICE_H_
#define SIGNPOST_NODE_SERVICE_H_

#include "grpcpp/support/server_callback.h"
#include "node/node.h"
#include "node/process_watch.h"
#include "proto/node.grpc.pb.h"

namespace signpost::node {

// Thread-safe. A process that is attached holds a few kilobytes and no thread. All streams must
// have ended before the destructor.
class Service final : public NodeService::CallbackService {
 public:
  explicit Service(Node& node) : node_(node) {}

  grpc::ServerBidiReactor<Request, Reply>* Serve(grpc::CallbackServerContext* context) override;

 private:
  Node& node_;
  ProcessWatch process_watch_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_SERVICE_H_
