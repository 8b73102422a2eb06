// Aggregators, and the workers of some nodes, in one process.

#ifndef SIGNPOST_TESTS_NODES_H_
#define SIGNPOST_TESTS_NODES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "node/server.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "worker/channel.h"

namespace signpost::testing {

// JobOptionsForTest's, with the example codec.
WorkerOptions WorkerOfNodes();

struct NodesOptions {
  uint32_t nodes = 2;
  uint32_t processes = 2;  // on each
  uint64_t max_parameters = 1 << 20;
  WorkerOptions worker = WorkerOfNodes();
  std::function<kernels::cuda::Gpu*(uint32_t node)> gpu_of;  // its worker's; null: on the host
  std::function<void(const absl::Status& why)> on_lost_gpu = [](const absl::Status&) {};
  std::function<void(const std::string& line)> on_event = [](const std::string&) {};
};

class Nodes {
 public:
  explicit Nodes(const NodesOptions& options);
  ~Nodes();

  std::unique_ptr<node::Server> Start(uint32_t node) const;
  std::string SocketOf(uint32_t node) const;

  // What a worker without a node joins with.
  SessionOptions AggregatorsAs(uint32_t rank, uint32_t world_size) const;
  // What the process joins with.
  SessionOptions OptionsOf(uint32_t process) const;

  // Of the job, at all aggregators together.
  uint64_t RoundsClosed() const;
  // Fails the test when that takes too long.
  void AwaitRoundsClosed(uint64_t wanted) const;

  uint32_t processes() const { return options_.nodes * options_.processes; }  // of all nodes
  Cluster& cluster() { return cluster_; }
  node::Server& server(uint32_t node) { return *servers_[node]; }
  void End(uint32_t node) { servers_[node].reset(); }

 private:
  const std::string directory_;
  const NodesOptions options_;
  Cluster cluster_;
  std::vector<std::unique_ptr<node::Server>> servers_;
  std::vector<std::unique_ptr<Channel>> channels_;  // to ask aggregators how they are
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_NODES_H_
