#include "cli/proxy.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace signpost::cli {
namespace {

constexpr size_t kBufferBytes = 64 << 10;

void Check(bool succeeded, const char* what) {
  if (succeeded) return;
  std::perror(what);
  std::abort();
}

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// -1 if nobody listens there.
int ConnectTo(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

void CloseSocket(int fd, bool reset) {
  if (fd < 0) return;
  const linger now = {.l_onoff = 1, .l_linger = 0};
  if (reset) setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  close(fd);
}

// One direction of a connection: reads from one socket, writes to another. Borrows both.
class Pipe {
 public:
  Pipe(int from, int to) : from_(from), to_(to) {}

  // What it waits for, given how many bytes may still be read.
  pollfd Awaited(uint64_t allowed) const {
    if (!waiting_.empty()) return {to_, POLLOUT, 0};
    if (!ended_ && allowed > 0) return {from_, POLLIN, 0};
    return {-1, 0, 0};  // not even the other side's end
  }

  // Moves what can be moved without blocking, and subtracts what it reads from `allowed`. False:
  // the connection is broken.
  bool Move(uint64_t& allowed) {
    if (waiting_.empty() && !ended_ && allowed > 0 && !Read(allowed)) return false;
    return Write();
  }

  bool ended() const { return ended_ && waiting_.empty(); }

 private:
  bool Read(uint64_t& allowed) {
    char bytes[kBufferBytes];
    const ssize_t size =
        recv(from_, bytes, std::min<uint64_t>(sizeof bytes, allowed), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    ended_ = size == 0;
    waiting_.assign(bytes, size);
    if (allowed != std::numeric_limits<uint64_t>::max()) allowed -= size;
    return true;
  }

  bool Write() {
    if (!waiting_.empty()) {
      const ssize_t size = send(to_, waiting_.data(), waiting_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (size < 0) return errno == EAGAIN || errno == EINTR;
      waiting_.erase(0, size);
    }
    if (ended()) shutdown(to_, SHUT_WR);
    return true;
  }

  const int from_, to_;
  std::string waiting_;
  bool ended_ = false;  // there is no more to read
};

}  // namespace

class Proxy::Connection {
 public:
  // Owns both sockets.
  Connection(int worker, int aggregator)
      : worker_(worker),
        aggregator_(aggregator),
        pipes_{Pipe(worker, aggregator), Pipe(aggregator, worker)} {}
  ~Connection() { End(/*reset=*/true); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void End(bool reset) {
    CloseSocket(std::exchange(worker_, -1), reset);
    CloseSocket(std::exchange(aggregator_, -1), reset);
  }

  pollfd Awaited(Direction direction, uint64_t allowed) const {
    return pipes_[direction].Awaited(allowed);
  }

  // False: it has ended, by either side or by an error.
  bool Move(std::array<uint64_t, 2>& allowed) {
    for (const Direction direction : {kToAggregator, kToWorker}) {
      if (!pipes_[direction].Move(allowed[direction])) return false;
    }
    if (!pipes_[kToAggregator].ended() || !pipes_[kToWorker].ended()) return true;
    End(/*reset=*/false);
    return false;
  }

 private:
  int worker_, aggregator_;
  std::array<Pipe, 2> pipes_;  // by direction
};

Proxy::Proxy(uint16_t port) : aggregator_port_(port) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  Check(bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0, "proxy: bind");
  Check(listen(listener_, SOMAXCONN) == 0, "proxy: listen");
  Check(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0, "proxy: port");
  port_ = ntohs(address.sin_port);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Forward(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Proxy::~Proxy() {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  Wake();
  thread_.join();
  close(listener_);
  close(wake_);
}

std::string Proxy::target() const { return absl::StrCat("127.0.0.1:", port_); }

void Proxy::StopAfter(Direction direction, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  allowed_[direction] = bytes;
  Wake();
}

void Proxy::Stop() {
  StopAfter(kToAggregator, 0);
  StopAfter(kToWorker, 0);
}

void Proxy::Resume() {
  StopAfter(kToAggregator, kUnlimited);
  StopAfter(kToWorker, kUnlimited);
}

void Proxy::AwaitStopped(Direction direction) {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](uint64_t* allowed) { return *allowed == 0; }, &allowed_[direction]));
}

void Proxy::Reset() { End(/*reset=*/true); }

void Proxy::Close() { End(/*reset=*/false); }

void Proxy::End(bool reset) {
  absl::MutexLock lock(&mutex_);
  for (const auto& connection : connections_) connection->End(reset);
  connections_.clear();
  Wake();  // sockets that are polled close once they no longer are
}

int Proxy::connections() const {
  absl::MutexLock lock(&mutex_);
  return accepted_;
}

void Proxy::AwaitConnections(int count) {
  absl::MutexLock lock(&mutex_);
  auto reached = [this, count]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return accepted_ >= count; };
  mutex_.Await(absl::Condition(&reached));
}

void Proxy::Wake() const {
  const uint64_t one = 1;
  Check(write(wake_, &one, sizeof one) == sizeof one, "proxy: wake");
}

// The thread.

void Proxy::Forward() {
  std::vector<pollfd> awaited;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (closed_) return connections_.clear();
      Accept();
      connections_.erase(
          std::remove_if(connections_.begin(), connections_.end(),
                         [this](const auto& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                           return !connection->Move(allowed_);
                         }),
          connections_.end());
      awaited = Awaited();
    }
    poll(awaited.data(), awaited.size(), /*timeout=*/-1);
    uint64_t times;
    const ssize_t size = read(wake_, &times, sizeof times);
    Check(size > 0 || errno == EAGAIN, "proxy: wait");
  }
}

std::vector<pollfd> Proxy::Awaited() const {
  std::vector<pollfd> awaited = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
  for (const auto& connection : connections_) {
    for (const Direction direction : {kToAggregator, kToWorker}) {
      awaited.push_back(connection->Awaited(direction, allowed_[direction]));
    }
  }
  return awaited;
}

void Proxy::Accept() {
  for (int worker; (worker = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
    ++accepted_;
    const int aggregator = ConnectTo(aggregator_port_);
    if (aggregator < 0) {
      CloseSocket(worker, /*reset=*/true);  // as a port on which nobody listens
      continue;
    }
    connections_.push_back(std::make_unique<Connection>(worker, aggregator));
  }
}

}  // namespace signpost::cli
