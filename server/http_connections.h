// The connections of an HTTP port, and which of them are to be ended: so that no peer can keep the
// others out by asking slowly.

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
  struct Deadlines {
    absl::Duration request, answer;
  };
  explicit HttpConnections(const Deadlines& deadlines) : deadlines_(deadlines) {}

  void Begin(int fd, std::string peer, absl::Time now);
  void Asked(int fd, absl::Time now);     // the headers are there
  void Answered(int fd, absl::Time now);  // the peer has the answer
  void End(int fd) { connections_.erase(fd); }

  // Those whose deadline has passed.
  std::vector<int> Overdue(absl::Time now) const;

  // If there are more than `most`: of the peer that has most connections without a whole request
  // the one that has waited longest, but never the newcomer.
  std::optional<int> ToMakeRoom(size_t most, int newcomer) const;

 private:
  struct Connection {
    std::string peer;
    bool is_asked = false;
    absl::Time since;  // of the phase that it is in
  };

  const Deadlines deadlines_;
  std::map<int, Connection> connections_;
};

// Whether a browser may be told anything that asks with this Host header, so that no page of
// another site can, to whose name a name server gives this address (DNS rebinding): numbers,
// localhost, and the names given. Those are compared without regard to case; the header's port is
// not looked at.
bool IsOwnHost(const std::string& header, const std::vector<std::string>& names);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_HTTP_CONNECTIONS_H_
