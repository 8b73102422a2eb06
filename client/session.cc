#include "client/session.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "client/exclusive_session.h"
#include "client/owner.h"
#include "client/worker_session.h"
#include "node/attached_session.h"
#include "proto/layout.h"

namespace signpost {
namespace {

template <class Joined>
absl::StatusOr<std::unique_ptr<Session>> Exclusive(
    absl::StatusOr<std::unique_ptr<Joined>> session) {
  if (!session.ok()) return session.status();
  return std::make_unique<ExclusiveSession>(*std::move(session));
}

uint64_t RoundUp(uint64_t number, uint64_t unit) { return (number + unit - 1) / unit * unit; }

}  // namespace

void SetAsDeepSpeed(absl::Span<const Parameter> parameters, SessionOptions& session,
                    OptimizerOptions& optimizer) {
  size_t largest = 1;
  for (const Parameter& parameter : parameters) {
    largest = std::max(largest, parameter.values.size());
  }
  const uint64_t block = RoundUp(std::min<uint64_t>(largest, kMaxBlockElements), 8);
  const uint64_t chunk = std::min<uint64_t>(RoundUp(session.worker.chunk_elements, block),
                                            kMaxChunkElements / block * block);
  session.worker.block_elements = static_cast<uint32_t>(block);
  session.worker.chunk_elements = static_cast<uint32_t>(chunk);
  session.worker.gamma = 1;
  optimizer.bias_correction = false;
  optimizer.variance_floor = 0;
  optimizer.as_deepspeed = true;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options,
                                                       const OptimizerOptions& optimizer,
                                                       std::vector<Parameter> parameters) {
  if (absl::Status status = Owner::CheckMayJoin(); !status.ok()) return status;
  const Owner while_joining;
  if (!options.node.empty()) {
    return Exclusive(node::AttachedSession::Join(options, optimizer, std::move(parameters)));
  }
  return Exclusive(WorkerSession::Join(options, optimizer, std::move(parameters)));
}

}  // namespace signpost
