#include "server/listen_addresses.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace signpost {

absl::StatusOr<ListenAddresses> ResolveToListen(const std::string& address) {
  const size_t colon = address.rfind(':');
  absl::string_view host = absl::string_view(address).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(std::string(host).c_str(), address.c_str() + colon + 1, &hints, &found);
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
