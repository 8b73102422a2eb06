// A TCP proxy in front of an aggregator, which does to connections what networks and hosts do to
// them: hold them up, cut them, forget them.

#ifndef SIGNPOST_CLI_PROXY_H_
#define SIGNPOST_CLI_PROXY_H_

#include <poll.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace signpost::cli {

// Forwards connections to 127.0.0.1 from a thread of its own, to which no signal goes. Thread-safe.
// Ends the process, having said why, if there is no socket to be had.
class Proxy {
 public:
  enum Direction { kToAggregator, kToWorker };

  // Forwards to the aggregator on `port`, which need not be there yet.
  explicit Proxy(uint16_t port);
  ~Proxy();  // as Reset

  // "127.0.0.1:port", for workers.
  std::string target() const;

  // From now on at most `bytes` more go in that direction, over all connections together. The
  // connections stay, and new ones are accepted, so neither side can tell a stopped proxy from a
  // peer that hangs. What is not forwarded waits.
  void StopAfter(Direction direction, uint64_t bytes);
  void Stop();    // both directions, now
  void Resume();  // both directions; what has waited goes on
  // Blocks until all bytes of StopAfter have been read.
  void AwaitStopped(Direction direction);

  // Ends all connections on both sides: with RST, as a host that restarts; with FIN, as a process
  // that ends. What is on its way is lost.
  void Reset();
  void Close();

  // Connections accepted so far, ended ones included.
  int connections() const;
  // Blocks until there have been so many.
  void AwaitConnections(int count);

 private:
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

  class Connection;

  void Forward();
  std::vector<pollfd> Awaited() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Accept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(bool reset);
  void Wake() const;

  const uint16_t aggregator_port_;
  int listener_ = -1;
  uint16_t port_ = 0;
  int wake_ = -1;  // an eventfd: what is awaited has changed

  mutable absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<uint64_t, 2> allowed_ ABSL_GUARDED_BY(mutex_) = {kUnlimited, kUnlimited};  // bytes
  std::vector<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_PROXY_H_
