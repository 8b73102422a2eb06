// What "host:port" stands for, for who listens there.

#ifndef SIGNPOST_SERVER_LISTEN_ADDRESSES_H_
#define SIGNPOST_SERVER_LISTEN_ADDRESSES_H_

#include <netdb.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace signpost {

// A list of one at least.
using ListenAddresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Resolves an address that CheckTransport accepts and that is no unix: one. Returns both of
// loopback's addresses for localhost, without a resolver. Returns UNAVAILABLE when the host does
// not resolve. Blocks for as long as the resolver does.
absl::StatusOr<ListenAddresses> ResolveToListen(const std::string& address);

// UNAVAILABLE: none of them can be had, for what errno says.
absl::Status CannotListenError(const std::string& address);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_LISTEN_ADDRESSES_H_
