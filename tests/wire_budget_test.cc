// The budget of a one-bit round: (1 + 32/block) bits per parameter each way and headers below 1%,
// read from the sockets' own counters.

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/session.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "worker/wire_bytes.h"

namespace signpost::testing {
namespace {

std::vector<uint16_t> PortsOf(const Cluster& cluster) {
  std::vector<uint16_t> ports;
  for (const std::string& target : cluster.targets()) {
    ports.push_back(std::stoi(target.substr(target.rfind(':') + 1)));
  }
  return ports;
}

TEST(WireBudget, AOneBitRoundTakesHardlyMoreThanOneBitPerParameterEachWay) {
  JobOptionsForTest job;
  job.workers = 2;
  job.tensors = {1'500'000, 1000, 600'000};
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 1 << 18;
  job.optimizer.freeze_step = 1;
  job.steps = 5;  // 4 of them in one bit
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  // The workers of this process share the counter, which sees the connections of both. It is read
  // when both have finished a step and neither has begun the next.
  absl::Mutex mutex;
  std::vector<uint32_t> finished(job.steps);
  std::vector<WireBytes> bytes(job.steps);
  WireByteCounter counter(PortsOf(cluster));
  Train(cluster, job, [&](uint32_t rank, int step, const Replica&, Worker&) {
    absl::MutexLock lock(&mutex);
    if (++finished[step] == job.workers) bytes[step] = counter.Read();
    mutex.Await(absl::Condition(
        +[](uint32_t* finished) { return *finished == 2; }, &finished[step]));
  });
  const WireBytes one_bit = bytes.back() - bytes.front();
  const double parameters = 2'101'000.0 * job.workers * (job.steps - 1);
  // Where others take the processors too, TCP sends again what is only late.
  const uint64_t sent = one_bit.sent - one_bit.retransmitted;
  for (double bits : {8 * sent / parameters, 8 * one_bit.received / parameters}) {
    EXPECT_GE(bits, 1.0);
    EXPECT_LE(bits, (1 + 32.0 / 4096) * 1.01);
  }
}

// Also of a session that nobody has asked before.
TEST(WireBytes, OfASessionCountConnectionsThatHaveBroken) {
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/broken");
  std::filesystem::remove_all(state_dir);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1, .state_dir = state_dir});
  JobOptionsForTest job;
  job.tensors = {100'000};
  job.optimizer.freeze_step = 100;
  Replica replica(job, /*rank=*/0);
  SessionOptions options;
  options.worker = job.worker;
  options.worker.world_size = 1;
  options.aggregators = cluster.targets();
  auto session = Session::Join(options, job.optimizer, replica.Parameters());
  ASSERT_TRUE(session.ok()) << session.status();
  constexpr int kSteps = 5;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSteps - 1) cluster.Kill(0);
    replica.gradient = GradientOf(0, step, replica.values.size());
    const auto report = (*session)->Step(replica.Gradients(), {GroupRates{}});
    ASSERT_TRUE(report.ok()) << report.status();
  }
  EXPECT_GE((*session)->wire_bytes().sent, kSteps * 4 * replica.values.size());
  EXPECT_TRUE((*session)->Leave().ok());
}

}  // namespace
}  // namespace signpost::testing
