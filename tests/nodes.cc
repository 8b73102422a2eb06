#include "tests/nodes.h"

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/failure_timeout.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

// Not in TempDir: a socket's path must be short.
std::string NewDirectory() {
  char path[] = "/tmp/nodes.XXXXXX";
  return mkdtemp(path);
}

}  // namespace

WorkerOptions WorkerOfNodes() {
  WorkerOptions worker = JobOptionsForTest().worker;
  UseExampleCodec(worker);
  return worker;
}

Nodes::Nodes(const NodesOptions& options)
    : directory_(NewDirectory()),
      options_(options),
      cluster_({.transport = Transport::kGrpc, .aggregators = 2}) {
  for (uint32_t node = 0; node < options.nodes; ++node) servers_.push_back(Start(node));
  for (const std::string& target : cluster_.targets()) {
    channels_.push_back(ConnectToAggregator(target, FailureTimeout()));
  }
}

Nodes::~Nodes() {
  servers_.clear();
  std::filesystem::remove_all(directory_);
}

std::unique_ptr<node::Server> Nodes::Start(uint32_t node) const {
  node::ServerOptions server;
  server.listen = SocketOf(node);
  server.node.processes = options_.processes;
  server.node.session = AggregatorsAs(node, options_.nodes);
  if (options_.gpu_of) server.node.gpu = options_.gpu_of(node);
  server.node.on_lost_gpu = options_.on_lost_gpu;
  server.node.max_parameters = options_.max_parameters;
  server.node.on_event = options_.on_event;
  absl::StatusOr<std::unique_ptr<node::Server>> started = node::Server::Start(server);
  EXPECT_TRUE(started.ok()) << started.status();
  return *std::move(started);
}

std::string Nodes::SocketOf(uint32_t node) const {
  return absl::StrCat("unix:", directory_, "/", node);
}

SessionOptions Nodes::AggregatorsAs(uint32_t rank, uint32_t world_size) const {
  SessionOptions options;
  options.worker = options_.worker;
  options.worker.rank = rank;
  options.worker.world_size = world_size;
  options.aggregators = cluster_.targets();
  options.failure_timeout = *FailureTimeout::Of(absl::Seconds(2));
  return options;
}

SessionOptions Nodes::OptionsOf(uint32_t process) const {
  SessionOptions options = AggregatorsAs(process, processes());
  options.aggregators.clear();
  options.node = SocketOf(process / options_.processes);
  return options;
}

uint64_t Nodes::RoundsClosed() const {
  uint64_t rounds = 0;
  StatusRequest about;
  about.set_job(options_.worker.job);
  for (const std::unique_ptr<Channel>& channel : channels_) {
    const auto status = channel->Status(about, absl::Now() + absl::Seconds(30));
    EXPECT_TRUE(status.ok()) << status.status();
    if (status.ok() && status->jobs_size() == 1) rounds += status->jobs(0).rounds_closed();
  }
  return rounds;
}

void Nodes::AwaitRoundsClosed(uint64_t wanted) const {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (RoundsClosed() < wanted) {
    ASSERT_LT(absl::Now(), deadline) << RoundsClosed() << " rounds, wanted " << wanted;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

}  // namespace signpost::testing
