#include "server/listen_addresses.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "security/loopback.h"

namespace signpost {

absl::StatusOr<ListenAddresses> ResolveToListen(const std::string& address) {
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  // Without a host and AI_PASSIVE, getaddrinfo returns loopback's addresses and asks no resolver.
  const bool is_localhost = IsLocalhost(address);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = is_localhost ? 0 : AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(is_localhost ? nullptr : parsed->host.c_str(),
                                absl::StrCat(parsed->port).c_str(), &hints, &found);
  if (error == 0) return ListenAddresses(found, &freeaddrinfo);
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address, ": ", gai_strerror(error)));
}

absl::Status CannotListenError(const std::string& address) {
  return absl::UnavailableError(absl::StrCat(
      "cannot listen on ", address, ": ", std::strerror(errno),
      "; another process may have the port (`ss -ltnp` shows them), or this machine may not have "
      "the address"));
}

}  // namespace signpost
