// Which addresses other machines can reach.

#ifndef SIGNPOST_SECURITY_LOOPBACK_H_
#define SIGNPOST_SECURITY_LOOPBACK_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost {

// "unix:path", a socket in the file system.
bool IsUnixAddress(absl::string_view address);

// Whether the host of "host:port" or "[IPv6]:port" is localhost, or a loopback address
// (127.0.0.0/8,
// ::1); a unix: address is. No other name is, whatever it resolves to now: later it may resolve to
// something else. INVALID_ARGUMENT, with the address, for a malformed one.
absl::StatusOr<bool> IsLoopback(absl::string_view address);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_LOOPBACK_H_
