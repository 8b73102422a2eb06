#include "node/server.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "node/service.h"
#include "proto/steady_time.h"
#include "security/private_umask.h"

namespace signpost::node {
namespace {

// How long answers may take to get to processes that do not read.
constexpr absl::Duration kFlushTimeout = absl::Seconds(2);

// Names and shapes of all tensors are in an Attach.
constexpr int kMaxMessageBytes = 64 << 20;

absl::StatusOr<sockaddr_un> AddressOf(const std::string& listen) {
  absl::string_view path = listen;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (!absl::ConsumePrefix(&path, "unix:") || path.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on '", listen, "': wanted unix:PATH, a socket on this node"));
  }
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "cannot listen on '%s': a socket's path has at most %d bytes, and this one %d", listen,
        sizeof address.sun_path - 1, path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Whose number is 0 if it is not seen from here; none: nobody listens there.
std::optional<pid_t> WhoListensOn(const sockaddr_un& address) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::optional<pid_t> pid;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    ucred peer = {};
    socklen_t size = sizeof peer;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    pid = peer.pid;
  }
  close(fd);
  return pid;
}

absl::Status CheckRanks(const NodeOptions& options) {
  const WorkerOptions& worker = options.session.worker;
  if (options.processes >= 1 && worker.rank < worker.world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("worker %d of %d, with %d processes: ranks count from 0, and there is one "
                      "process at least",
                      worker.rank, worker.world_size, options.processes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  if (absl::Status status = CheckRanks(options.node); !status.ok()) return status;
  CountWhileRunning();  // processes wait for each other here before there is a channel
  const absl::StatusOr<sockaddr_un> address = AddressOf(options.listen);
  if (!address.ok()) return address.status();
  const std::string cannot = absl::StrCat("cannot listen on ", options.listen, ": ");
  absl::StatusOr<std::unique_ptr<PathLock>> lock = PathLock::Take(address->sun_path);
  if (const std::optional<pid_t> pid = WhoListensOn(*address)) {
    return absl::AlreadyExistsError(absl::StrCat(
        cannot, *pid > 0 ? absl::StrCat("process ", *pid) : "a process of another container",
        " does, perhaps another worker of this node. End it, or choose another path"));
  }
  if (absl::IsAlreadyExists(lock.status())) {
    return absl::AlreadyExistsError(
        absl::StrCat(cannot, "another worker of this node is about to, or about to end (",
                     lock.status().message(), "). End it, or choose another path"));
  }
  if (!lock.ok()) return absl::UnavailableError(absl::StrCat(cannot, lock.status().message()));
  std::unique_ptr<Server> server(new Server(options.node, *std::move(lock)));
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);  // processes ping while they wait
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  builder.RegisterService(server->service_.get());
  int bound = 0;
  // In the place of what a process that has died has left there.
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &bound);
  {
    const PrivateUmask for_socket;
    server->server_ = builder.BuildAndStart();
  }
  if (server->server_ != nullptr && bound != 0) return server;
  return absl::UnavailableError(
      absl::StrCat(cannot, "something that is no socket may be at the path"));
}

Server::Server(const NodeOptions& options, std::unique_ptr<PathLock> lock)
    : lock_(std::move(lock)), node_(options), service_(std::make_unique<Service>(node_)) {}

Server::~Server() { Stop(); }

void Server::Stop() {
  node_.Stop();
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(absl::Now() + kFlushTimeout));
}

}  // namespace signpost::node
