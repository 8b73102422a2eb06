// A job in one process: aggregators and workers, over loopback or gRPC, with faults put between
// them on request.

#ifndef SIGNPOST_TESTS_CLUSTER_H_
#define SIGNPOST_TESTS_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/aggregator.h"
#include "worker/channel.h"
#include "worker/worker.h"

namespace signpost {
class Server;
}  // namespace signpost

namespace signpost::testing {

enum class Transport { kLoopback, kGrpc };

struct ClusterOptions {
  Transport transport = Transport::kLoopback;
  uint32_t aggregators = 1;
  // Non-zero: frames of all workers are delivered in a random order, and some of them twice, before
  // and after their answer.
  uint32_t fault_seed = 0;
  // kGrpc only: shard i has <state_dir>/<i> as its state directory. Empty: it has none.
  std::string state_dir;
  bool allow_error_reset = false;
  uint64_t held_bytes = AggregatorLimits::kUnlimited;  // kGrpc only
  uint32_t connections = 1;                            // kGrpc only: of each worker to each shard
};

// Owns the aggregators and whatever carries frames to them.
class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);
  ~Cluster();

  // New channels to all shards, for one worker.
  std::vector<std::unique_ptr<Channel>> Connect();

  // "127.0.0.1:port" of each shard; kGrpc only.
  std::vector<std::string> targets() const;

  // Ends the shard's server, abruptly or as SIGTERM does, and starts another on the same port.
  // kGrpc only; one call at a time for each shard.
  void Kill(
      uint32_t shard, const std::function<void()>& meanwhile = [] {});
  void Restart(uint32_t shard);

 private:
  class Post;

  std::unique_ptr<Server> StartServer(uint32_t shard, const std::string& listen) const;

  const ClusterOptions options_;
  std::vector<std::unique_ptr<Aggregator>> aggregators_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::string> targets_;
  std::unique_ptr<Post> post_;
};

// Calls body(rank) on a thread for each rank, and waits for all of them.
void OnEachRank(uint32_t ranks, const std::function<void(uint32_t rank)>& body);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_CLUSTER_H_
