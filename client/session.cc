#include "client/session.h"

#include <utility>

#include "client/worker_session.h"
#include "node/attached_session.h"

namespace signpost {

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options,
                                                       const OptimizerOptions& optimizer,
                                                       std::vector<Parameter> parameters) {
  if (!options.node.empty()) {
    return node::AttachedSession::Join(options, optimizer, std::move(parameters));
  }
  return WorkerSession::Join(options, optimizer, std::move(parameters));
}

}  // namespace signpost
