// The channel to an aggregator over gRPC.

#ifndef SIGNPOST_WORKER_GRPC_CHANNEL_H_
#define SIGNPOST_WORKER_GRPC_CHANNEL_H_

#include <memory>
#include <string>

#include "proto/failure_timeout.h"
#include "worker/channel.h"

namespace signpost {

// Returns at once; the connection is made by the first call, and made again when it is lost. An
// aggregator that shows no sign of life for `failure_timeout` counts as lost too. `target` is
// "host:port" or "unix:/path".
std::unique_ptr<Channel> ConnectToAggregator(const std::string& target,
                                             const FailureTimeout& failure_timeout);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GRPC_CHANNEL_H_
