// How a process protects its connections.

#ifndef SIGNPOST_SECURITY_TRANSPORT_SECURITY_H_
#define SIGNPOST_SECURITY_TRANSPORT_SECURITY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace signpost {

struct TransportSecurity {
  std::string tls_dir;    // mTLS, with what is in there (tls_dir.h). Empty: plain text
  bool insecure = false;  // plain text, beyond loopback as well
  // Of who connects: shown with each call, with mTLS only (token_file.h). Empty: none.
  std::string token_file;
};

// Whether there may be a connection between this process and `address`, "host:port" or "unix:path",
// where it listens or connects to. INVALID_ARGUMENT, with the reason and what to do, for plain
// text beyond loopback without `insecure`, when both mTLS and plain text were asked for, for mTLS
// at a unix: address, for a token in plain text, or for a malformed address.
absl::Status CheckTransport(absl::string_view address, const TransportSecurity& security);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_TRANSPORT_SECURITY_H_
