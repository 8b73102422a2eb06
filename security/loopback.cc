#include "security/loopback.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace signpost {
namespace {

constexpr char kLocalhost[] = "localhost";

absl::Status MalformedError(absl::string_view address) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", address,
                   "' is no address: wanted host:port, as 127.0.0.1:4000 or "
                   "[::1]:4000"));
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

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Null if the host is no number.
AddressList ResolveNumber(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool is_number = getaddrinfo(host.c_str(), /*service=*/nullptr, &hints, &found) == 0;
  return AddressList(is_number ? found : nullptr, &freeaddrinfo);
}

}  // namespace

bool IsUnixAddress(absl::string_view address) { return absl::StartsWith(address, "unix:"); }

absl::StatusOr<HostAndPort> ParseAddress(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return MalformedError(address);
  const absl::string_view port = address.substr(colon + 1);
  uint32_t number = 0;
  // SimpleAtoi takes spaces and signs too.
  if (!absl::c_all_of(port, absl::ascii_isdigit) || !absl::SimpleAtoi(port, &number) ||
      number > 65535) {
    return MalformedError(address);
  }
  absl::string_view host = address.substr(0, colon);
  const bool opens = absl::ConsumePrefix(&host, "[");
  const bool closes = absl::ConsumeSuffix(&host, "]");
  const bool has_colon = absl::StrContains(host, ':');
  const bool is_odd = absl::c_any_of(
      host, [](char c) { return absl::ascii_isspace(c) || c == '[' || c == ']' || c == ','; });
  if (host.empty() || is_odd || opens != closes || has_colon != opens) {
    return MalformedError(address);
  }
  return HostAndPort{std::string(host), static_cast<uint16_t>(number)};
}

bool IsLocalhost(absl::string_view address) {
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  return parsed.ok() && parsed->host == kLocalhost;
}

absl::StatusOr<bool> IsLoopback(absl::string_view address) {
  if (IsUnixAddress(address)) return true;
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  if (parsed->host == kLocalhost) return true;
  const AddressList found = ResolveNumber(parsed->host);
  return found != nullptr && IsLoopback(*found->ai_addr);
}

std::string GrpcTarget(const std::string& address) {
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  if (IsUnixAddress(address) || !parsed.ok()) return address;
  if (parsed->host == kLocalhost) {
    return absl::StrCat("ipv6:[::ffff:127.0.0.1]:", parsed->port, ",[::1]:", parsed->port);
  }
  const AddressList found = ResolveNumber(parsed->host);
  if (found == nullptr || !IsLoopback(*found->ai_addr)) return address;
  if (found->ai_family == AF_INET6) return absl::StrCat("ipv6:[::1]:", parsed->port);
  char number[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr, number,
            sizeof number);
  return absl::StrCat("ipv4:", number, ":", parsed->port);
}

std::string LocalhostByNumber(const std::string& address) {
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  const bool is_localhost = parsed.ok() && parsed->host == kLocalhost;
  return is_localhost ? absl::StrCat("127.0.0.1:", parsed->port) : address;
}

}  // namespace signpost
