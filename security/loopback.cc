#include "security/loopback.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace signpost {
namespace {

absl::Status MalformedError(absl::string_view address) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", address,
                   "' is no address: wanted host:port, as 127.0.0.1:4000 or "
                   "[::1]:4000"));
}

// Without brackets.
absl::StatusOr<std::string> HostOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return MalformedError(address);
  uint32_t port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return MalformedError(address);
  }
  absl::string_view host = address.substr(0, colon);
  const bool bracketed = absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  const bool has_colon = host.find(':') != absl::string_view::npos;
  if (host.empty() || has_colon != bracketed) return MalformedError(address);
  return std::string(host);
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(ipv4.sin_addr.s_addr) >> 24 == 127;
  }
  if (address.sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  return false;
}

}  // namespace

bool IsUnixAddress(absl::string_view address) { return absl::StartsWith(address, "unix:"); }

absl::StatusOr<bool> IsLoopback(absl::string_view address) {
  if (IsUnixAddress(address)) return true;
  const absl::StatusOr<std::string> host = HostOf(address);
  if (!host.ok()) return host.status();
  if (*host == "localhost") return true;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (getaddrinfo(host->c_str(), /*service=*/nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  return IsLoopback(*found->ai_addr);
}

}  // namespace signpost
