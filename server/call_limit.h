// How many calls of one connection there may be.

#ifndef SIGNPOST_SERVER_CALL_LIMIT_H_
#define SIGNPOST_SERVER_CALL_LIMIT_H_

#include <functional>
#include <string>

#include "grpcpp/server_builder.h"

namespace signpost {

// Calls count from when the server begins them until they are freed. HTTP/2's limit of streams does
// not count those that the peer has reset; and gRPC 1.51 frees no call of a connection while it
// writes to it, which it does for as long as the peer does not read. So a peer that opens calls,
// resets them and does not read would have the server keep all of them (CVE-2023-44487).
//
// Has `on_excess` told the peer (grpc::ServerContext::peer) of a connection that has more than
// `max_calls`, each time it comes to have them, from gRPC's threads. Callback API only; the
// builder's context allocator and interceptors are used for it.
void LimitCalls(int max_calls, std::function<void(const std::string& peer)> on_excess,
                grpc::ServerBuilder& builder);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_CALL_LIMIT_H_
