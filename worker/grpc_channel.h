// The channel to an aggregator over gRPC.

#ifndef SIGNPOST_WORKER_GRPC_CHANNEL_H_
#define SIGNPOST_WORKER_GRPC_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "proto/failure_timeout.h"
#include "security/client_security.h"
#include "worker/channel.h"

namespace signpost {

// Gets a line for a person when exchanges are no longer answered, and another when they are again:
// "waiting for aggregator HOST:PORT, which does not answer (Socket closed)", "aggregator HOST:PORT
// answers again, 4.01 s after a call to it failed and 14.02 s after the wait for it began". From
// any thread, also until the channel's destructor returns.
using OnConnection = std::function<void(const std::string& line)>;

// Returns at once; the connection is made by the first call, and made again when it is lost. An
// aggregator that shows no sign of life for `failure_timeout` counts as lost too. From Join
// to Leave that is so between calls as well, within a second or so: the aggregator is to know that
// the process lives, however long it computes or writes. `target` is
// "host:port" or "unix:/path". In plain text without `security`, which ClientSecurity::Open checks.
// Exchanges take turns on so many connections, for where one does not fill the link; all else goes
// over the first.
std::unique_ptr<Channel> ConnectToAggregator(
    const std::string& target, const FailureTimeout& failure_timeout,
    OnConnection on_connection = nullptr, std::shared_ptr<const ClientSecurity> security = nullptr,
    uint32_t connections = 1);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GRPC_CHANNEL_H_
