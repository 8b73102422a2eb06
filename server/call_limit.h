// How many calls there may be, of one connection and of all.

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
struct CallLimits {
  int of_connection;
  int in_all;
};

// A connection that has more calls than it may, or the most of all when those are too many.
struct ExcessCalls {
  std::string peer;  // grpc::ServerContext::peer
  int calls;
};

// Has `on_excess` told of it when there is one call too many, and again for each kCallsBetween
// more that come while there are, from gRPC's threads. Callback API only; the builder's context
// allocator and interceptors are used for it.
inline constexpr int kCallsBetween = 16;
void LimitCalls(const CallLimits& limits, std::function<void(const ExcessCalls&)> on_excess,
                grpc::ServerBuilder& builder);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_CALL_LIMIT_H_
