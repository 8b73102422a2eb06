#include "client/session.h"

#include <utility>

#include "client/worker_session.h"

namespace signpost {

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options,
                                                       const OptimizerOptions& optimizer,
                                                       std::vector<Parameter> parameters) {
  return WorkerSession::Join(options, optimizer, std::move(parameters));
}

}  // namespace signpost
