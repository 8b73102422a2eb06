#include "bench/plain_tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace signpost::bench {
namespace {

// What a server has in hand, and a call of a worker's moves at most: it stays in the second-level
// cache.
constexpr size_t kBytesAtOnce = 256 << 10;

absl::Status Failed(const char* what) {
  return absl::ErrnoToStatus(errno, absl::StrCat("TCP over loopback: ", what));
}

void SendBack(int socket) {
  std::vector<uint8_t> buffer(kBytesAtOnce);
  while (true) {
    const ssize_t received = recv(socket, buffer.data(), buffer.size(), 0);
    if (received <= 0) return;  // the worker sees that, too
    for (ssize_t sent = 0; sent < received;) {
      const ssize_t more = send(socket, buffer.data() + sent, received - sent, MSG_NOSIGNAL);
      if (more <= 0) return;
      sent += more;
    }
  }
}

// As many bytes each way as are asked for, out of the one memory and into the other, again and
// again from their beginnings. Waits for neither while the other could go on.
absl::Status SendAndReceive(int socket, uint64_t bytes, const std::vector<uint8_t>& memory,
                            std::vector<uint8_t>& back) {
  // What may be moved at once behind so many.
  const auto part = [&](uint64_t moved) {
    const size_t begin = moved % memory.size();
    const uint64_t most = std::min<uint64_t>(kBytesAtOnce, memory.size() - begin);
    return std::pair(begin, std::min(most, bytes - moved));
  };
  uint64_t sent = 0, received = 0;
  while (received < bytes) {
    pollfd ready = {socket, static_cast<short>(POLLIN | (sent < bytes ? POLLOUT : 0)), 0};
    if (poll(&ready, 1, /*timeout=*/-1) < 0 && errno != EINTR) return Failed("poll");
    if (ready.revents & POLLOUT) {
      const auto [begin, most] = part(sent);
      const ssize_t more = send(socket, memory.data() + begin, most, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (more < 0 && errno != EAGAIN) return Failed("send");
      sent += std::max<ssize_t>(more, 0);
    }
    if (ready.revents & (POLLIN | POLLHUP | POLLERR)) {
      const auto [begin, most] = part(received);
      const ssize_t more = recv(socket, back.data() + begin, most, MSG_DONTWAIT);
      if (more == 0) return absl::UnavailableError("TCP over loopback: a connection has ended");
      if (more < 0 && errno != EAGAIN) return Failed("recv");
      received += std::max<ssize_t>(more, 0);
    }
  }
  return absl::OkStatus();
}

}  // namespace

PlainTcp::Connection::~Connection() {
  for (const int socket : {worker, server}) {
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
  }
  if (of_worker.joinable()) of_worker.join();
  if (of_server.joinable()) of_server.join();
  for (const int socket : {worker, server}) {
    if (socket >= 0) close(socket);
  }
}

absl::StatusOr<std::unique_ptr<PlainTcp>> PlainTcp::Connect(uint32_t workers, uint32_t servers,
                                                            uint64_t bytes) {
  auto all = std::make_unique<PlainTcp>();
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) return Failed("socket");
  sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  absl::Status status;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener, /*backlog=*/1) != 0) {
    status = Failed("listen");
  }
  for (uint32_t i = 0; status.ok() && i < workers * servers; ++i) {
    status = all->Add((bytes + servers - 1) / servers, listener);
  }
  close(listener);
  if (!status.ok()) return status;
  return all;
}

absl::Status PlainTcp::Add(uint64_t bytes, int listener) {
  Connection& connection = *connections_.emplace_back(std::make_unique<Connection>());
  sockaddr_in address = {};
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (getsockname(listener, any, &size) != 0) return Failed("getsockname");
  connection.worker = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection.worker < 0 || connect(connection.worker, any, size) != 0) return Failed("connect");
  connection.server = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (connection.server < 0) return Failed("accept");
  const int on = 1;
  for (const int end : {connection.worker, connection.server}) {
    setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  connection.bytes = bytes;
  connection.sent.assign(std::min(bytes, kRoom), 0x5a);
  connection.received.resize(connection.sent.size());
  connection.of_server = std::thread([socket = connection.server] { SendBack(socket); });
  connection.of_worker = std::thread([this, &connection] { Work(connection); });
  return absl::OkStatus();
}

PlainTcp::~PlainTcp() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  connections_.clear();
}

void PlainTcp::Work(Connection& connection) {
  for (uint64_t done = 0;; ++done) {
    {
      absl::MutexLock lock(&mutex_);
      const auto has_next = [this, done]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return ends_ || exchanges_ > done;
      };
      mutex_.Await(absl::Condition(&has_next));
      if (ends_) return;
    }
    const absl::Status status =
        SendAndReceive(connection.worker, connection.bytes, connection.sent, connection.received);
    absl::MutexLock lock(&mutex_);
    status_.Update(status);
    if (status.ok()) bytes_received_ += connection.bytes;
    --at_work_;
  }
}

absl::Status PlainTcp::Exchange() {
  absl::MutexLock lock(&mutex_);
  at_work_ = connections_.size();
  ++exchanges_;
  const auto is_over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return at_work_ == 0; };
  mutex_.Await(absl::Condition(&is_over));
  return status_;
}

uint64_t PlainTcp::bytes_received() const {
  absl::MutexLock lock(&mutex_);
  return bytes_received_;
}

}  // namespace signpost::bench
