#include "doctor/name.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace signpost::doctor {
namespace {

constexpr double kSlowSeconds = 2;

}  // namespace

std::string HostOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  absl::string_view host = colon == absl::string_view::npos ? address : address.substr(0, colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  }
  return std::string(host);
}

std::string PortOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  return std::string(colon == absl::string_view::npos ? "" : address.substr(colon + 1));
}

ResolvedName Resolve(const std::string& host) {
  ResolvedName name;
  name.set_host(host);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    name.set_error(gai_strerror(error));
    return name;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  std::set<std::string> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    char text[NI_MAXHOST];
    if (getnameinfo(entry->ai_addr, entry->ai_addrlen, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      addresses.insert(text);
    }
  }
  name.mutable_addresses()->Add(addresses.begin(), addresses.end());
  return name;
}

bool IsName(absl::string_view host) {
  in6_addr address;
  const std::string text(host);
  return inet_pton(AF_INET, text.c_str(), &address) != 1 &&
         inet_pton(AF_INET6, text.c_str(), &address) != 1;
}

bool IsLoopbackAddress(absl::string_view address) {
  return absl::StartsWith(address, "127.") || address == "::1";
}

bool IsHiddenBehindLoopback(const ResolvedName& name) {
  const bool is_localhost = absl::StartsWith(name.host(), "localhost") ||
                            absl::EndsWith(name.host(), ".localhost") ||
                            absl::StartsWith(name.host(), "ip6-");
  return IsName(name.host()) && !is_localhost && name.addresses_size() > 0 &&
         std::all_of(name.addresses().begin(), name.addresses().end(), IsLoopbackAddress);
}

void CheckNames(const std::vector<ResolvedName>& names, double took_s, Reporter& to) {
  for (const ResolvedName& name : names) {
    const std::string addresses = absl::StrJoin(name.addresses(), ", ");
    if (!name.error().empty()) {
      to.Fault(
          "name", absl::StrCat("'", name.host(), "' is not known here: ", name.error()),
          absl::StrCat("put it into the DNS, or: echo 'ADDRESS ", name.host(), "' >> /etc/hosts"));
    } else if (IsHiddenBehindLoopback(name)) {
      to.Fault(
          "name",
          absl::StrCat("'", name.host(), "' is ", addresses,
                       " here: what listens there is reached by nobody else"),
          absl::StrCat("give it the address that others know, in /etc/hosts: sed -i '/^127\\..*",
                       name.host(), "/d' /etc/hosts && echo 'ADDRESS ", name.host(),
                       "' >> /etc/hosts"));
    } else if (IsName(name.host())) {
      to.Fine("name", absl::StrCat(name.host(), " is ", addresses));
    }
  }
  if (took_s > kSlowSeconds) {
    to.Warn("name", absl::StrFormat("resolving %d names took %.1f s", names.size(), took_s),
            "resolvectl status, or cat /etc/resolv.conf: is the first server there?");
  }
}

}  // namespace signpost::doctor
