#include "server/http_connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace signpost {

void HttpConnections::Begin(int fd, std::string peer, absl::Time now) {
  connections_[fd] = {.peer = std::move(peer), .since = now};
}

void HttpConnections::Asked(int fd, absl::Time now) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  found->second.is_asked = true;
  found->second.since = now;
}

void HttpConnections::Answered(int fd, absl::Time now) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  found->second.is_asked = false;
  found->second.since = now;
}

std::vector<int> HttpConnections::TakeOverdue(absl::Time now) {
  std::vector<int> overdue;
  for (auto& [fd, connection] : connections_) {
    const absl::Duration most = connection.is_asked ? limits_.answer : limits_.request;
    if (connection.is_ended || now < connection.since + most) continue;
    connection.is_ended = true;
    overdue.push_back(fd);
  }
  return overdue;
}

std::optional<int> HttpConnections::TakeOneToEnd(int newcomer) {
  size_t all = 0;
  std::map<std::string, size_t> by_peer;
  for (const auto& [fd, connection] : connections_) {
    if (connection.is_ended) continue;
    ++all;
    ++by_peer[connection.peer];
  }
  std::string peer = connections_.at(newcomer).peer;
  if (by_peer[peer] <= limits_.most_per_peer) {
    if (all <= limits_.most) return std::nullopt;
    const auto has_less = [](const auto& a, const auto& b) { return a.second < b.second; };
    peer = absl::c_max_element(by_peer, has_less)->first;
  }
  std::pair<const int, Connection>* chosen = nullptr;
  for (auto& entry : connections_) {
    const auto& [fd, connection] = entry;
    if (connection.is_ended || connection.peer != peer || fd == newcomer) continue;
    const auto order = [](const Connection& c) { return std::pair(c.is_asked, c.since); };
    if (chosen == nullptr || order(connection) < order(chosen->second)) chosen = &entry;
  }
  if (chosen == nullptr) return std::nullopt;
  chosen->second.is_ended = true;
  return chosen->first;
}

bool IsOwnHost(const std::string& header, const std::vector<std::string>& names) {
  absl::string_view host = header;
  if (const size_t end = host.rfind(']'); absl::ConsumePrefix(&host, "[")) {
    if (end == std::string::npos) return false;
    host = host.substr(0, end - 1);
  } else {
    host = host.substr(0, host.find(':'));
  }
  absl::ConsumeSuffix(&host, ".");
  in6_addr number;
  const std::string text(host);
  if (inet_pton(AF_INET, text.c_str(), &number) == 1 ||
      inet_pton(AF_INET6, text.c_str(), &number) == 1 ||
      absl::EqualsIgnoreCase(host, "localhost")) {
    return true;
  }
  return absl::c_any_of(names, [&](absl::string_view name) {
    absl::ConsumeSuffix(&name, ".");
    return absl::EqualsIgnoreCase(host, name);
  });
}

}  // namespace signpost
