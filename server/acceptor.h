// Accepts connections for gRPC, whose own acceptor (1.51) never accepts again once file descriptors
// have run out.

#ifndef SIGNPOST_SERVER_ACCEPTOR_H_
#define SIGNPOST_SERVER_ACCEPTOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/server_builder.h"
#include "server/connection_table.h"

namespace signpost {

// Listens from the beginning. Without a descriptor to spare, or beyond the limits, the next
// connection is accepted and closed at once; its peer tries again later.
class Acceptor {
 public:
  // On a "host:port" that CheckTransport accepts: on all that the host resolves to and that can
  // be had, with the same port. Sent bytes may stay unacknowledged for `tcp_user_timeout`.
  // `on_abort` gets a line about a connection that Abort has ended, once a second at most.
  // UNAVAILABLE when there is nothing to be had.
  using OnAbort = std::function<void(const std::string& line)>;
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const std::string& address,
                                                          absl::Duration tcp_user_timeout,
                                                          const ConnectionLimits& limits,
                                                          OnAbort on_abort);

  ~Acceptor();  // as Stop

  uint16_t port() const { return port_; }

  // Hands all connections to `to` from now on, from a thread of its own.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to);

  // Ends the connection of that name (NameOf) soon, if it is still there: "it has ...".
  // Thread-safe.
  void Abort(std::string name, std::string why) ABSL_LOCKS_EXCLUDED(to_abort_mutex_);

  // Whether there is a connection of that name. Thread-safe.
  bool Has(const std::string& name) const ABSL_LOCKS_EXCLUDED(connections_mutex_);

  // Connections that were closed at once, or ended by Abort, so far.
  uint64_t refused_connections() const { return refused_connections_; }

  // Listens no more: connections that were not accepted yet are refused. Idempotent; thread-safe.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Acceptor(const ConnectionLimits& limits, OnAbort on_abort);

  void Run();
  void Refuse(int fd);
  // Whether it is known now, within the limits.
  bool Add(int fd, const sockaddr_storage& address) ABSL_LOCKS_EXCLUDED(connections_mutex_);
  void AbortSome() ABSL_LOCKS_EXCLUDED(to_abort_mutex_);
  // Those that wait to be accepted, or the first of them.
  void AcceptSome(int listener);

  absl::Mutex mutex_;           // of Stop
  std::vector<int> listeners_;  // none once stopped
  uint16_t port_ = 0;
  int wake_ = -1;   // an eventfd: Stop or Abort was called
  int spare_ = -1;  // to have a descriptor when there is none left
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to_;
  mutable absl::Mutex connections_mutex_;
  ConnectionTable connections_ ABSL_GUARDED_BY(connections_mutex_);
  const OnAbort on_abort_;  // of the thread, as the next one
  absl::Time next_line_ = absl::InfinitePast();
  std::atomic<uint64_t> refused_connections_ = 0;
  std::atomic<bool> stopping_ = false;
  absl::Mutex to_abort_mutex_;
  struct Aborted {
    std::string name, why;
  };
  std::vector<Aborted> to_abort_ ABSL_GUARDED_BY(to_abort_mutex_);
  std::thread thread_;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_ACCEPTOR_H_
