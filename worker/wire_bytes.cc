#include "worker/wire_bytes.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

namespace signpost {
namespace {

// The port of the socket's peer; nothing for what is not a connected TCP socket.
std::optional<uint16_t> PeerPort(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return std::nullopt;
}

std::optional<WireBytes> ReadSocket(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  return WireBytes{info.tcpi_bytes_sent, info.tcpi_bytes_received, info.tcpi_bytes_retrans};
}

std::vector<int> OpenFileDescriptors() {
  std::vector<int> fds;
  std::error_code error;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end;
       at.increment(error)) {
    fds.push_back(std::atoi(at->path().filename().c_str()));
  }
  return fds;
}

}  // namespace

WireByteCounter::WireByteCounter(std::vector<uint16_t> ports) : ports_(std::move(ports)) {}

WireBytes WireByteCounter::Read() {
  for (int fd : OpenFileDescriptors()) {
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) continue;
    const std::optional<uint16_t> port = PeerPort(fd);
    if (!port || std::find(ports_.begin(), ports_.end(), *port) == ports_.end()) continue;
    if (std::optional<WireBytes> bytes = ReadSocket(fd)) by_socket_[status.st_ino] = *bytes;
  }
  WireBytes total;
  for (const auto& [inode, bytes] : by_socket_) {
    total.sent += bytes.sent;
    total.received += bytes.received;
    total.retransmitted += bytes.retransmitted;
  }
  return total;
}

}  // namespace signpost
