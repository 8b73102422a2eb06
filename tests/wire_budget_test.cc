// The budget of a one-bit round: (1 + 32/block) bits per parameter each way and headers below 1%,
// read from the sockets' own counters.

#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"
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

}  // namespace
}  // namespace signpost::testing
