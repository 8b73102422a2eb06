#include "doctor/path.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "doctor/name.h"
#include "proto/steady_time.h"

namespace signpost::doctor {
namespace {

// Twice TCP's first wait for an acknowledgement, and the second's.
constexpr absl::Duration kAcknowledged = absl::Milliseconds(1500);
constexpr absl::Duration kLook = absl::Milliseconds(2);

constexpr uint32_t kIpv4Headers = 20 + 20, kIpv6Headers = 40 + 20;
constexpr uint32_t kTimestampBytes = 12;

// What is common: jumbo frames, Ethernet, PPPoE, tunnels, VXLAN, WireGuard, IPv6's and IPv4's
// least.
constexpr uint32_t kPacketBytes[] = {9000, 8950, 1500, 1492, 1480, 1476, 1460, 1450, 1440,
                                     1420, 1400, 1380, 1350, 1300, 1280, 1000, 576};

class Socket {
 public:
  explicit Socket(int family)
      : fd_(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {}
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

struct Address {
  sockaddr_storage bytes;
  socklen_t size;
};

std::optional<Address> AddressOf(const std::string& host, std::string& error) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = getaddrinfo(HostOf(host).c_str(), PortOf(host).c_str(), &hints, &found);
      code != 0) {
    error = gai_strerror(code);
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  Address address = {};
  address.size = found->ai_addrlen;
  std::memcpy(&address.bytes, found->ai_addr, found->ai_addrlen);
  return address;
}

std::string TextOf(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = "";
  getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

// 0, or what the system says.
int Connect(const Socket& socket, const Address& address, absl::Duration timeout) {
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0) {
    return 0;
  }
  if (errno != EINPROGRESS) return errno;
  pollfd ready = {socket.fd(), POLLOUT, 0};
  if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

tcp_info InfoOf(const Socket& socket) {
  tcp_info info = {};
  socklen_t size = sizeof info;
  getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &size);
  return info;
}

uint32_t HeaderBytes(const Address& address, const tcp_info& info) {
  return (address.bytes.ss_family == AF_INET6 ? kIpv6Headers : kIpv4Headers) +
         ((info.tcpi_options & TCPI_OPT_TIMESTAMPS) != 0 ? kTimestampBytes : 0);
}

// Sends one segment of full size; whether the other side's kernel has it. Whoever listens there may
// close the connection over it.
bool IsAcknowledged(const Socket& socket, uint32_t bytes) {
  const std::string segment(bytes, '\0');
  const int now = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
  if (send(socket.fd(), segment.data(), segment.size(), MSG_NOSIGNAL) < 0) return true;  // closed
  const absl::Time end = SteadyNow() + kAcknowledged;
  do {
    int unacknowledged = 0;
    if (ioctl(socket.fd(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0) return true;
    pollfd ready = {socket.fd(), 0, 0};
    poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(kLook)));
  } while (SteadyNow() < end);
  return false;
}

bool DoesFit(const Address& address, uint32_t packet_bytes, absl::Duration timeout) {
  const Socket socket(address.bytes.ss_family);
  const int segment = static_cast<int>(
      packet_bytes - (address.bytes.ss_family == AF_INET6 ? kIpv6Headers : kIpv4Headers));
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment);
  return Connect(socket, address, timeout) == 0 &&
         IsAcknowledged(socket, InfoOf(socket).tcpi_snd_mss);
}

// Of those that are common; 0: none.
uint32_t LargestThatFits(const Address& address, uint32_t below, absl::Duration timeout) {
  std::vector<uint32_t> sizes;  // ascending
  for (const uint32_t size : kPacketBytes) {
    if (size < below) sizes.insert(sizes.begin(), size);
  }
  const auto first_lost = std::partition_point(
      sizes.begin(), sizes.end(), [&](uint32_t size) { return DoesFit(address, size, timeout); });
  return first_lost == sizes.begin() ? 0 : *(first_lost - 1);
}

void FindInterface(const Socket& socket, PathFacts& path) {
  sockaddr_storage local = {};
  socklen_t size = sizeof local;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&local), &size);
  path.set_local_address(TextOf(reinterpret_cast<const sockaddr*>(&local), size));
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(interfaces, &freeifaddrs);
  for (const ifaddrs* entry = interfaces; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != local.ss_family) continue;
    if (TextOf(entry->ifa_addr, size) == path.local_address()) path.set_interface(entry->ifa_name);
  }
  ifreq request = {};
  std::strncpy(request.ifr_name, path.interface().c_str(), IFNAMSIZ - 1);
  if (ioctl(socket.fd(), SIOCGIFMTU, &request) == 0) path.set_mtu(request.ifr_mtu);
  int speed = 0;
  std::ifstream file(absl::StrCat("/sys/class/net/", path.interface(), "/speed"));
  if (file >> speed && speed > 0) path.set_link_mbit(speed);
}

PathFacts::Connection ConnectionOf(int error) {
  switch (error) {
    case 0:
      return PathFacts::MADE;
    case ECONNREFUSED:
      return PathFacts::REFUSED;
    case ETIMEDOUT:
      return PathFacts::SILENT;
    default:
      return PathFacts::UNREACHABLE;
  }
}

}  // namespace

PathFacts FindPath(const std::string& host, absl::Duration timeout) {
  PathFacts path;
  const std::optional<Address> address = AddressOf(host, *path.mutable_error());
  if (!address) {
    path.set_connection(PathFacts::UNRESOLVED);
    return path;
  }
  path.set_address(TextOf(reinterpret_cast<const sockaddr*>(&address->bytes), address->size));
  const Socket socket(address->bytes.ss_family);
  const int error = Connect(socket, *address, timeout);
  path.set_connection(ConnectionOf(error));
  if (error != 0) {
    path.set_error(std::strerror(error));
    return path;
  }
  FindInterface(socket, path);
  const tcp_info info = InfoOf(socket);
  path.set_round_trip_us(info.tcpi_rtt);
  path.set_packet_bytes(info.tcpi_snd_mss + HeaderBytes(*address, info));
  path.set_packets_are_lost(!IsAcknowledged(socket, info.tcpi_snd_mss));
  if (path.packets_are_lost()) {
    path.set_fitting_packet_bytes(LargestThatFits(*address, path.packet_bytes(), timeout));
  }
  return path;
}

std::string Describe(const PathFacts& path) {
  return absl::StrCat(
      path.address(), " by ", path.interface(), " (", path.local_address(), ", MTU ", path.mtu(),
      path.link_mbit() > 0 ? absl::StrCat(", ", path.link_mbit(), " Mbit/s") : "", "), ",
      absl::StrFormat("%.2g ms", 1e-3 * static_cast<double>(path.round_trip_us())),
      " there and back");
}

bool CheckPath(const PathFacts& path, const std::string& host, const std::string& listener,
               Reporter& to) {
  switch (path.connection()) {
    case PathFacts::UNRESOLVED:
      to.Fault(
          "name", absl::StrCat("'", HostOf(host), "' is not known here: ", path.error()),
          absl::StrCat("put it into the DNS, or: echo 'ADDRESS ", HostOf(host), "' >> /etc/hosts"));
      return false;
    case PathFacts::REFUSED:
      to.Fault("reach", absl::StrCat(host, " refuses: nobody listens there (", path.error(), ")"),
               absl::StrCat("on ", HostOf(host), ": ", listener, " --listen ", host));
      return false;
    case PathFacts::SILENT:
      to.Fault("reach",
               absl::StrCat("nothing comes back from ", host,
                            ": a firewall on either host or between them drops what goes to or "
                            "comes from that port, or the host is down"),
               absl::StrCat("on ", HostOf(host), ": nft insert rule inet filter input tcp dport ",
                            PortOf(host), " accept (ufw allow ", PortOf(host),
                            "/tcp; in a cluster, its NetworkPolicy or security group)"));
      return false;
    case PathFacts::UNREACHABLE:
      to.Fault("reach", absl::StrCat("there is no way to ", host, ": ", path.error()),
               absl::StrCat("ip route get ", path.address(), "; ip route add NETWORK via GATEWAY"));
      return false;
    default:
      break;
  }
  if (!path.packets_are_lost()) return true;
  const uint32_t fitting = path.fitting_packet_bytes();
  to.Fault("mtu",
           absl::StrCat("packets of ", path.packet_bytes(), " bytes, which MTU ", path.mtu(),
                        " of ", path.interface(), " allows, are lost on the way to ", host, "; ",
                        fitting > 0 ? absl::StrCat("those of ", fitting, " come through")
                                    : "small ones come through"),
           absl::StrCat("ip link set dev ", path.interface(), " mtu ", fitting > 0 ? fitting : 1280,
                        " on both hosts, or a larger one between them"));
  return false;
}

}  // namespace signpost::doctor
