// The connections of an HTTP port. Tells which of them to end, so that no peer keeps others out by
// sending its requests slowly.

#ifndef SIGNPOST_SERVER_HTTP_CONNECTIONS_H_
#define SIGNPOST_SERVER_HTTP_CONNECTIONS_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace signpost {

// Connections are known by their descriptors. Not thread-safe.
class HttpConnections {
 public:
  // How long a request's line and headers may take, from the connection's begin or the answer
  // before it; and how long an answer may, until its peer has it.
  struct Limits {
    absl::Duration request, answer;
    size_t most = 0;           // connections, so that some places stay free
    size_t most_per_peer = 0;  // of them
  };
  explicit HttpConnections(const Limits& limits) : limits_(limits) {}

  void Begin(int fd, std::string peer, absl::Time now);
  void Asked(int fd, absl::Time now);     // the headers are there
  void Answered(int fd, absl::Time now);  // the system has taken all of the answer
  void End(int fd) { connections_.erase(fd); }

  // Returns the connections whose deadline has passed. Each is returned once: it is to be ended.
  std::vector<int> TakeOverdue(absl::Time now);

  // Returns nothing while the limits hold. Beyond the limit of the newcomer's peer returns one of
  // that peer's connections to be ended, beyond the other one of the peer with the most. Prefers
  // connections without a whole request to those that are being answered, and among these the
  // oldest. Never returns the newcomer, and no connection twice.
  std::optional<int> TakeOneToEnd(int newcomer);

 private:
  struct Connection {
    std::string peer;
    bool is_asked = false;
    bool is_ended = false;  // soon
    absl::Time since;       // of the phase that it is in
  };

  const Limits limits_;
  std::map<int, Connection> connections_;  // by descriptor
};

// Returns whether a request with this Host header may be answered: for numbers, localhost and the
// given names, in any case and with any port. Other names are refused, because a name server can
// give this address to any name, and a page of that name could then read the answers (DNS
// rebinding).
bool IsOwnHost(const std::string& header, const std::vector<std::string>& names);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_HTTP_CONNECTIONS_H_
