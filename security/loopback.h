// What an address says: which other machines can reach it, and what gRPC is to make of it.

#ifndef SIGNPOST_SECURITY_LOOPBACK_H_
#define SIGNPOST_SECURITY_LOOPBACK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost {

// "unix:path", a socket in the file system.
bool IsUnixAddress(absl::string_view address);

// Of "host:port" or "[IPv6]:port"; the host is without brackets.
struct HostAndPort {
  std::string host;
  uint16_t port = 0;
};

// INVALID_ARGUMENT, with the address, for a malformed one.
absl::StatusOr<HostAndPort> ParseAddress(absl::string_view address);

// Whether only this machine can reach it: localhost, 127.0.0.0/8, ::1 and unix: addresses. No other
// name is, whatever it resolves to now: later it may resolve to something else. And localhost is
// never resolved, so that it is loopback whatever files and name servers say (RFC 6761, section
// 6.3). Errors as ParseAddress's.
absl::StatusOr<bool> IsLoopback(absl::string_view address);

// What gRPC connects to for that address: loopback by number, since its own resolver may take
// localhost, and 127.1, for something else. Others, and malformed ones, as they are.
std::string GrpcTarget(const std::string& address);

// The address, with 127.0.0.1 in place of localhost, for who listens on one number only.
std::string LocalhostByNumber(const std::string& address);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_LOOPBACK_H_
