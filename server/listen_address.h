// Where a server may listen: an address is looked at before it is bound.

#ifndef SIGNPOST_SERVER_LISTEN_ADDRESS_H_
#define SIGNPOST_SERVER_LISTEN_ADDRESS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace signpost {

// "unix:path", a socket in the file system.
bool IsUnixAddress(absl::string_view address);

// OK for "host:port" or "[IPv6]:port" when all that the host resolves to is loopback (127.0.0.0/8,
// ::1), or when `insecure`; and for "unix:path", which no other machine reaches.
// FAILED_PRECONDITION, with the reason and what to do, for a host beyond loopback. INVALID_ARGUMENT
// for a malformed address or a host that does not resolve. Blocks for as long as the resolver does.
absl::Status CheckListenAddress(absl::string_view address, bool insecure);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_LISTEN_ADDRESS_H_
