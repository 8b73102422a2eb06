// An exchange's bytes over TCP, and nothing else.

#ifndef SIGNPOST_BENCH_PLAIN_TCP_H_
#define SIGNPOST_BENCH_PLAIN_TCP_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bench/rank.h"

namespace signpost::bench {

// All workers and all servers, in threads of this process. Each worker has a connection over
// loopback to each server, sends its share of the bytes over it, and gets as many back meanwhile,
// out of and into memory that has as much room as a payload, or kRoom. Servers send back what they
// get, as soon as they have it: they neither wait for other workers, nor look at it. So it is what
// an exchange would be glad to take, not what nothing could be faster than.
class PlainTcp final : public Rank {
 public:
  // For the bytes of each connection, each way: what it has in memory at most.
  static constexpr uint64_t kRoom = 16 << 20;

  // `bytes` of each worker go each way. Errors are those of sockets (absl::ErrnoToStatus).
  static absl::StatusOr<std::unique_ptr<PlainTcp>> Connect(uint32_t workers, uint32_t servers,
                                                           uint64_t bytes);
  ~PlainTcp() override;

  absl::Status Exchange() override;  // likewise
  absl::Status Leave() override { return absl::OkStatus(); }

  // By all workers, so far.
  uint64_t bytes_received() const;

 private:
  // Of a worker and a server, each with a thread.
  struct Connection {
    ~Connection();
    int worker = -1, server = -1;  // sockets
    uint64_t bytes = 0;            // of an exchange, each way
    std::vector<uint8_t> sent, received;
    std::thread of_worker, of_server;
  };

  absl::Status Add(uint64_t bytes, int listener);
  void Work(Connection& connection);

  mutable absl::Mutex mutex_;
  uint64_t exchanges_ ABSL_GUARDED_BY(mutex_) = 0;  // that have begun
  size_t at_work_ ABSL_GUARDED_BY(mutex_) = 0;      // connections, in the last of them
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t bytes_received_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // the first error
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_PLAIN_TCP_H_
