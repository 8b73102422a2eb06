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

std::vector<int> HttpConnections::Overdue(absl::Time now) const {
  std::vector<int> overdue;
  for (const auto& [fd, connection] : connections_) {
    const absl::Duration most = connection.is_asked ? deadlines_.answer : deadlines_.request;
    if (now >= connection.since + most) overdue.push_back(fd);
  }
  return overdue;
}

std::optional<int> HttpConnections::ToMakeRoom(size_t most, int newcomer) const {
  if (connections_.size() <= most) return std::nullopt;
  std::map<std::string, size_t> waiting;  // connections by peer
  for (const auto& [fd, connection] : connections_) {
    if (!connection.is_asked) ++waiting[connection.peer];
  }
  std::optional<int> chosen;
  for (const auto& [fd, connection] : connections_) {
    if (connection.is_asked || fd == newcomer) continue;
    if (!chosen) {
      chosen = fd;
      continue;
    }
    const Connection& other = connections_.at(*chosen);
    const size_t count = waiting[connection.peer], other_count = waiting[other.peer];
    if (count > other_count || (count == other_count && connection.since < other.since)) {
      chosen = fd;
    }
  }
  return chosen;
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
  return absl::c_any_of(
      names, [&](const std::string& name) { return absl::EqualsIgnoreCase(host, name); });
}

}  // namespace signpost
