// What `signpost k8s render` reserves for an aggregator, against what one takes: a real process
// with a state directory, whose workers are threads of this one.

#include "deploy/requirements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tests/chaos/supervised.h"
#include "tests/cluster.h"
#include "worker/worker.h"

namespace signpost::testing {
namespace {

using deploy::JobSize;
using deploy::Requirements;

// The most that the process has had in memory at once, "VmHWM:     1234 kB".
uint64_t MostResidentBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("VmHWM:", 0) != 0) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t kilobytes = 0;
    EXPECT_TRUE(absl::SimpleAtoi(words[words.size() - 2], &kilobytes)) << line;
    return kilobytes << 10;
  }
  ADD_FAILURE() << "no VmHWM of process " << pid;
  return 0;
}

uint64_t BytesBelow(const std::string& directory) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) bytes += entry.file_size();
  }
  return bytes;
}

// Workers average their gradients too while the variance warms up, as ddp_hook's do: what they hold
// for that is in what the job is sized for.
void Train(const JobSize& size, const std::vector<std::unique_ptr<Supervised>>& shards,
           int freeze_step, int steps) {
  OnEachRank(size.workers, [&](uint32_t rank) {
    std::vector<float> values(size.parameters), gradient(size.parameters);
    for (size_t i = 0; i < values.size(); ++i) gradient[i] = 1e-3f * ((i * 31 + rank) % 13) - 6e-3f;
    WorkerOptions options = {.job = "sized", .rank = rank, .world_size = size.workers};
    OptimizerOptions optimizer;
    optimizer.freeze_step = freeze_step;
    optimizer.warm_up_codec = size.warm_up_codec;
    optimizer.codec = size.codec;
    auto worker =
        Worker::Join(options, optimizer, {{"all", {size.parameters}, absl::MakeSpan(values)}},
                     ConnectTo(shards));
    ASSERT_TRUE(worker.ok()) << worker.status();
    options.job = "sized/gradients";
    auto gradients = Worker::JoinReduction(options, {.codec = size.warm_up_codec},
                                           {{"all", {size.parameters}}}, ConnectTo(shards));
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    for (int step = 0; step < steps; ++step) {
      // The others' frames wait for this rank's, as many as their windows allow: what a shard has
      // to hold does not depend on which rank happens to be fast.
      if (rank == 0 && step == freeze_step / 2) absl::SleepFor(absl::Seconds(1));
      if (step < freeze_step) {
        const auto report = (*gradients)->Reduce({absl::MakeSpan(gradient)});
        ASSERT_TRUE(report.ok()) << report.status();
      }
      const Gradient of_step[] = {gradient};
      const auto report = (*worker)->Step(of_step, {{.learning_rate = 1e-4}});
      ASSERT_TRUE(report.ok()) << report.status();
    }
    // Both jobs are still in the state directories when they are measured.
  });
}

void ExpectToFit(const JobSize& size) {
  const std::string root = absl::StrCat(::testing::TempDir(), "/requirements");
  std::filesystem::remove_all(root);
  const absl::StatusOr<Requirements> required = RequirementsOf(size);
  ASSERT_TRUE(required.ok()) << required.status();
  std::vector<std::unique_ptr<Supervised>> shards;
  for (uint32_t shard = 0; shard < size.aggregators; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = size.aggregators};
    options.state_dir = absl::StrCat(root, "/", shard);
    options.flags.push_back(absl::StrCat("--max-held-bytes=", required->aggregator_held_bytes));
    options.flags.push_back(
        absl::StrCat("--max-receive-bytes=", required->aggregator_receive_bytes));
    shards.push_back(std::make_unique<Supervised>(options));
  }
  Train(size, shards, /*freeze_step=*/5, /*steps=*/20);

  uint64_t memory = 0;
  uint64_t disk = 0;
  for (uint32_t shard = 0; shard < size.aggregators; ++shard) {
    memory = std::max(memory, MostResidentBytes(shards[shard]->pid()));
    disk = std::max(disk, BytesBelow(absl::StrCat(root, "/", shard)));
  }
  EXPECT_LE(memory, required->aggregator_memory_bytes);
  EXPECT_LE(disk, required->aggregator_disk_bytes);
  // What is never used would be paid for all the same. Snapshots of warm-ups, whose answers are
  // large, have been replaced by now.
  EXPECT_GE(3 * memory, required->aggregator_memory_bytes);
  EXPECT_GE(8 * disk, required->aggregator_disk_bytes);
  ::testing::Test::RecordProperty("memory_mb", static_cast<int>(memory >> 20));
  ::testing::Test::RecordProperty("required_memory_mb",
                                  static_cast<int>(required->aggregator_memory_bytes >> 20));
  ::testing::Test::RecordProperty("disk_mb", static_cast<int>(disk >> 20));
}

TEST(Requirements, AnAggregatorFitsWithAnFp32WarmUp) {
  ExpectToFit({.workers = 4, .aggregators = 2, .parameters = 16'000'000});
}

TEST(Requirements, AnAggregatorFitsWithAWarmUpInEightBits) {
  ExpectToFit({.workers = 4, .aggregators = 1, .parameters = 16'000'000, .warm_up_codec = INT8});
}

TEST(Requirements, AnAggregatorFitsWithManyWorkers) {
  ExpectToFit({.workers = 12, .aggregators = 2, .parameters = 8'000'000});
}

TEST(Requirements, AnAggregatorFitsThatIsOneOfMany) {
  ExpectToFit({.workers = 6, .aggregators = 4, .parameters = 24'000'000});
}

TEST(Requirements, AnAggregatorFitsAShardOfManyChunks) {
  ExpectToFit({.workers = 2, .aggregators = 1, .parameters = 32'000'000});
}

}  // namespace
}  // namespace signpost::testing
