#include "server/connection_table.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace signpost {
namespace {

constexpr absl::Duration kLookInterval = absl::Milliseconds(100);
constexpr size_t kIpv6HostBytes = 8;

// 0: there is none.
ino_t SocketOf(int fd) {
  struct stat facts = {};
  return fstat(fd, &facts) == 0 && S_ISSOCK(facts.st_mode) ? facts.st_ino : 0;
}

}  // namespace

std::string PeerOf(const sockaddr_storage& address) {
  absl::string_view bytes;
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    bytes = {reinterpret_cast<const char*>(&ipv4.sin_addr), sizeof ipv4.sin_addr};
  } else if (address.ss_family == AF_INET6) {
    const in6_addr& ipv6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    const auto* first = reinterpret_cast<const char*>(&ipv6);
    bytes = {first, kIpv6HostBytes};
    if (IN6_IS_ADDR_V4MAPPED(&ipv6)) bytes = {first + 12, sizeof(in_addr)};
  }
  return std::string(bytes);
}

std::string NameOf(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &ipv4.sin_addr, host, sizeof host);
    return absl::StrCat("ipv4:", host, ":", ntohs(ipv4.sin_port));
  }
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address);
  const int port = ntohs(ipv6.sin6_port);
  if (IN6_IS_ADDR_V4MAPPED(&ipv6.sin6_addr)) {
    inet_ntop(AF_INET, &ipv6.sin6_addr.s6_addr[12], host, sizeof host);
    return absl::StrCat("ipv4:", host, ":", port);
  }
  inet_ntop(AF_INET6, &ipv6.sin6_addr, host, sizeof host);
  const uint32_t link = ipv6.sin6_scope_id;  // of a link-local address
  return absl::StrCat("ipv6:%5B", host, link == 0 ? "" : absl::StrCat("%25", link), "%5D:", port);
}

bool ConnectionTable::MayAdd(const std::string& peer, absl::Time now) {
  if (!IsFull(peer) && connections_.size() < size_to_look_at_) return true;
  if (now >= next_look_) {
    next_look_ = now + kLookInterval;
    ForgetClosed();
    size_to_look_at_ = std::max<size_t>(64, 2 * connections_.size());
  }
  return !IsFull(peer);
}

void ConnectionTable::Add(int fd, const sockaddr_storage& address) {
  connections_.push_back({fd, SocketOf(fd), address});
  ++by_peer_[PeerOf(address)];
}

bool ConnectionTable::Abort(const std::string& name) {
  bool was_there = false;
  for (const Connection& connection : connections_) {
    if (NameOf(connection.address) != name || SocketOf(connection.fd) != connection.socket)
      continue;
    const sockaddr nowhere = {.sa_family = AF_UNSPEC, .sa_data = {}};
    if (connect(connection.fd, &nowhere, sizeof nowhere) == 0) was_there = true;
  }
  return was_there;
}

bool ConnectionTable::IsFull(const std::string& peer) const {
  if (connections_.size() >= limits_.connections) return true;
  const auto found = by_peer_.find(peer);
  return found != by_peer_.end() && found->second >= limits_.connections_per_peer;
}

void ConnectionTable::ForgetClosed() {
  std::erase_if(connections_, [this](const Connection& connection) {
    if (SocketOf(connection.fd) == connection.socket) return false;
    const auto peer = by_peer_.find(PeerOf(connection.address));
    if (--peer->second == 0) by_peer_.erase(peer);
    return true;
  });
}

}  // namespace signpost
