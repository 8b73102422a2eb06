#include "server/connection_table.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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

bool ConnectionTable::Connection::IsThere() const { return SocketOf(fd) == socket; }

bool ConnectionTable::Connection::IsEstablished() const {
  tcp_info facts = {};
  socklen_t size = sizeof facts;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &size) == 0 &&
         facts.tcpi_state == TCP_ESTABLISHED && IsThere();
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
  const std::string peer = PeerOf(address);
  connections_.insert({NameOf(address), {fd, SocketOf(fd), peer}});
  ++by_peer_[peer];
}

bool ConnectionTable::Abort(const std::string& name) {
  bool was_there = false;
  const auto [begin, end] = connections_.equal_range(name);
  for (auto connection = begin; connection != end; ++connection) {
    if (!connection->second.IsThere()) continue;
    const sockaddr nowhere = {.sa_family = AF_UNSPEC, .sa_data = {}};
    if (connect(connection->second.fd, &nowhere, sizeof nowhere) == 0) was_there = true;
  }
  return was_there;
}

bool ConnectionTable::Has(const std::string& name) const {
  const auto [begin, end] = connections_.equal_range(name);
  return std::any_of(begin, end, [](const auto& named) { return named.second.IsEstablished(); });
}

bool ConnectionTable::IsFull(const std::string& peer) const {
  if (connections_.size() >= limits_.connections) return true;
  const auto found = by_peer_.find(peer);
  return found != by_peer_.end() && found->second >= limits_.connections_per_peer;
}

void ConnectionTable::ForgetClosed() {
  std::erase_if(connections_, [this](const auto& named) {
    const Connection& connection = named.second;
    if (connection.IsThere()) return false;
    const auto peer = by_peer_.find(connection.peer);
    if (--peer->second == 0) by_peer_.erase(peer);
    return true;
  });
}

}  // namespace signpost
