// The connections that an acceptor has handed on, and whether there may be one more.

#ifndef SIGNPOST_SERVER_CONNECTION_TABLE_H_
#define SIGNPOST_SERVER_CONNECTION_TABLE_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"

namespace signpost {

struct ConnectionLimits {
  uint32_t connections = 8192;           // --max-connections
  uint32_t connections_per_peer = 1024;  // --max-connections-per-peer: of one address
};

// Where a connection comes from: an IPv4 address, or the first half of an IPv6 one, all of which
// one host may have. Everything on this machine is one peer.
std::string PeerOf(const sockaddr_storage& address);

// As gRPC spells it (grpc::ServerContext::peer): "ipv4:192.0.2.1:4711",
// "ipv6:%5B2001:db8::1%5D:4711", "ipv6:%5Bfe80::1%252%5D:4711".
std::string NameOf(const sockaddr_storage& address);

// Whoever has a connection closes it without a word to anyone. So a connection is known by its
// descriptor and the number of its socket: it is there for as long as the descriptor is of that
// socket. Not thread-safe.
class ConnectionTable {
 public:
  explicit ConnectionTable(const ConnectionLimits& limits) : limits_(limits) {}

  // Whether the limits allow another connection of that peer. Looks for closed ones when they do
  // not seem to, ten times a second at most.
  bool MayAdd(const std::string& peer, absl::Time now);
  void Add(int fd, const sockaddr_storage& address);

  // Whether a connection of that name was still there; there may be several, of which the peer has
  // only the last. Its peer gets a reset; whoever has the connection an error, and nothing of what
  // it has not read or sent yet.
  bool Abort(const std::string& name);

  // Whether there is a connection of that name that its peer has not closed: whoever has it may
  // notice that later, as gRPC does while calls wait.
  bool Has(const std::string& name) const;

  // As far as is known: some of them may have been closed since the last look.
  size_t size() const { return connections_.size(); }

 private:
  struct Connection {
    int fd = -1;
    ino_t socket = 0;
    std::string peer;

    bool IsThere() const;
    bool IsEstablished() const;
  };

  bool IsFull(const std::string& peer) const;
  void ForgetClosed();

  const ConnectionLimits limits_;
  std::multimap<std::string, Connection> connections_;  // by name
  std::map<std::string, uint32_t> by_peer_;
  absl::Time next_look_ = absl::InfinitePast();
  size_t size_to_look_at_ = 64;  // so that closed ones are forgotten without a limit in sight
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_CONNECTION_TABLE_H_
