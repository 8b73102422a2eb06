#include "server/acceptor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/steady_time.h"
#include "security/loopback.h"
#include "server/listen_addresses.h"

namespace signpost {
namespace {

// When the whole system has no descriptor left, or no memory: there is no event to wait for.
constexpr int kRetryMs = 100;

// So many are accepted before others are ended that are to be.
constexpr int kAcceptedAtOnce = 64;

constexpr absl::Duration kLineInterval = absl::Seconds(1);

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

template <typename T>
void SetOption(int fd, int level, int option, T value) {
  setsockopt(fd, level, option, &value, sizeof value);
}

uint16_t PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// -1 with errno if it cannot be had. What is accepted inherits the options.
int ListenOn(const addrinfo& entry, uint16_t port, int tcp_user_timeout_ms) {
  sockaddr_storage address = {};
  std::memcpy(&address, entry.ai_addr, entry.ai_addrlen);
  if (entry.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(port);
  }
  const int fd = socket(entry.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  SetOption(fd, SOL_SOCKET, SO_REUSEADDR, 1);  // connections of the process before may linger
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, tcp_user_timeout_ms);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), entry.ai_addrlen) == 0 &&
      listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const std::string& address,
                                                           absl::Duration tcp_user_timeout,
                                                           const ConnectionLimits& limits,
                                                           OnAbort on_abort) {
  const absl::StatusOr<ListenAddresses> found = ResolveToListen(address);
  if (!found.ok()) return found.status();
  std::unique_ptr<Acceptor> acceptor(new Acceptor(limits, std::move(on_abort)));
  const int timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(tcp_user_timeout));
  for (const addrinfo* entry = found->get(); entry != nullptr; entry = entry->ai_next) {
    const uint16_t asked = ntohs(reinterpret_cast<const sockaddr_in*>(entry->ai_addr)->sin_port);
    const uint16_t port = acceptor->port_ != 0 ? acceptor->port_ : asked;
    const int fd = ListenOn(*entry, port, timeout_ms);
    // Another process has one of localhost's two addresses: workers could connect to that process.
    if (fd < 0 && errno == EADDRINUSE && IsLocalhost(address)) return CannotListenError(address);
    if (fd < 0) continue;
    acceptor->listeners_.push_back(fd);
    acceptor->port_ = PortOf(fd);
  }
  if (!acceptor->listeners_.empty()) return acceptor;
  return CannotListenError(address);
}

Acceptor::Acceptor(const ConnectionLimits& limits, OnAbort on_abort)
    : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(OpenSpare()),
      connections_(limits),
      on_abort_(std::move(on_abort)) {}

Acceptor::~Acceptor() {
  Stop();
  for (const int fd : {wake_, spare_}) {
    if (fd >= 0) close(fd);
  }
}

void Acceptor::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to) {
  to_ = std::move(to);
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Stop() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
  eventfd_write(wake_, 1);
  if (thread_.joinable()) thread_.join();
  for (const int fd : std::exchange(listeners_, {})) close(fd);
}

void Acceptor::Run() {
  std::vector<pollfd> awaited = {{wake_, POLLIN, 0}};
  for (const int fd : listeners_) awaited.push_back({fd, POLLIN, 0});
  while (true) {
    poll(awaited.data(), awaited.size(), /*timeout=*/-1);
    eventfd_t count = 0;
    eventfd_read(wake_, &count);
    if (stopping_) return;
    AbortSome();
    for (const int fd : listeners_) AcceptSome(fd);
  }
}

void Acceptor::Abort(std::string name, std::string why) {
  absl::MutexLock lock(&to_abort_mutex_);
  to_abort_.push_back({std::move(name), std::move(why)});
  eventfd_write(wake_, 1);
}

void Acceptor::AbortSome() {
  std::vector<Aborted> all;
  {
    absl::MutexLock lock(&to_abort_mutex_);
    all.swap(to_abort_);
  }
  for (const Aborted& connection : all) {
    {
      absl::MutexLock lock(&connections_mutex_);
      if (!connections_.Abort(connection.name)) continue;
    }
    ++refused_connections_;
    if (SteadyNow() < next_line_) continue;
    next_line_ = SteadyNow() + kLineInterval;
    on_abort_(absl::StrCat("the connection of ", connection.name, " is ended: ", connection.why));
  }
}

bool Acceptor::Has(const std::string& name) const {
  absl::MutexLock lock(&connections_mutex_);
  return connections_.Has(name);
}

bool Acceptor::Add(int fd, const sockaddr_storage& address) {
  absl::MutexLock lock(&connections_mutex_);
  if (!connections_.MayAdd(PeerOf(address), SteadyNow())) return false;
  connections_.Add(fd, address);
  return true;
}

void Acceptor::Refuse(int fd) {
  ++refused_connections_;
  close(fd);
}

void Acceptor::AcceptSome(int listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener;
    sockaddr_storage address = {};
    socklen_t size = sizeof address;
    connection.fd = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size,
                            SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection.fd >= 0) {
      if (Add(connection.fd, address)) {
        to_->HandleNewConnection(&connection);
      } else {
        Refuse(connection.fd);
      }
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return;
    // A connection that stays in the queue would wake us for ever.
    if (spare_ >= 0) {
      close(std::exchange(spare_, -1));
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) Refuse(fd);
    }
    spare_ = OpenSpare();
    if (spare_ >= 0) continue;
    pollfd stop = {wake_, POLLIN, 0};
    poll(&stop, 1, kRetryMs);
    return;
  }
}

}  // namespace signpost
