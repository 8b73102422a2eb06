// Parses addresses, and tells which of them only this machine can reach.

#ifndef SIGNPOST_SECURITY_LOOPBACK_H_
#define SIGNPOST_SECURITY_LOOPBACK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost {

// Returns whether the address is "unix:path", a socket in the file system.
bool IsUnixAddress(absl::string_view address);

// The two parts of "host:port" or "[IPv6]:port". The host has no brackets.
struct HostAndPort {
  std::string host;
  uint16_t port = 0;
};

// Returns INVALID_ARGUMENT, with the address, for a malformed one.
absl::StatusOr<HostAndPort> ParseAddress(absl::string_view address);

// Returns whether the host of the address is localhost.
bool IsLocalhost(absl::string_view address);

// Returns whether only this machine can reach the address: localhost, 127.0.0.0/8, ::1 and unix:
// addresses. No other name counts: a name that resolves to loopback now may resolve to another
// address later. Signpost never resolves localhost, so localhost is loopback whatever the hosts
// file and name servers say (RFC 6761, section 6.3). Fails as ParseAddress does.
absl::StatusOr<bool> IsLoopback(absl::string_view address);

// Returns the target that gRPC connects to for the address. Loopback is given by number, because
// gRPC's resolver may take localhost, or 127.1, for another host. Other addresses are returned
// unchanged, malformed ones too.
std::string GrpcTarget(const std::string& address);

// Returns the address with 127.0.0.1 in place of localhost, for servers that listen on one number.
std::string LocalhostByNumber(const std::string& address);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_LOOPBACK_H_
