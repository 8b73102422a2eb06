#include "security/transport_security.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "security/loopback.h"

namespace signpost {
absl::Status CheckTransport(absl::string_view address, const TransportSecurity& security) {
  const absl::StatusOr<bool> loopback = IsLoopback(address);
  if (!loopback.ok()) return loopback.status();
  if (security.insecure && !security.tls_dir.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("both a TLS directory (", security.tls_dir,
                     ") and plain text beyond loopback were asked for: take one of them back"));
  }
  if (IsUnixAddress(address) && !security.tls_dir.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a TLS directory (", security.tls_dir, ") was given for '", address,
        "', and sockets in the file system are without TLS and identities: who may connect is who "
        "may write to the socket. Take the directory back, or an address host:port"));
  }
  if (security.tls_dir.empty() && !security.token_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the token in ", security.token_file,
                     " would travel in plain text: give a TLS directory (--tls-dir or "
                     "SIGNPOST_TLS_DIR) too, or no token file"));
  }
  if (*loopback || security.insecure || !security.tls_dir.empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "refusing plain text at '", address,
      "', which other machines can reach: anyone there could read gradients or forge them. Give a "
      "TLS directory (--tls-dir or SIGNPOST_TLS_DIR; `signpost cert init` makes some), or "
      "--insecure-i-understand (SIGNPOST_INSECURE_I_UNDERSTAND=1)"));
}

}  // namespace signpost
