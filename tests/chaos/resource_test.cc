// Real processes that run out of something, or find it damaged: disk, memory, file descriptors,
// snapshots. The job goes on with the same bits, or is refused by name.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ios>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/failure_timeout.h"
#include "tests/chaos/supervised.h"
#include "tests/job.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr uint32_t kShards = 2;
using Shards = std::vector<std::unique_ptr<Supervised>>;

JobOptionsForTest Job() {
  JobOptionsForTest job;
  job.tensors = {4096, 2048};  // of whole blocks: a one-bit frame has 3/8 bytes per element
  job.worker.chunk_elements = 1024;
  job.steps = 40;
  job.optimizer.freeze_step = 6;
  return job;
}

std::vector<std::vector<float>> TrainUndisturbed() {
  Cluster cluster({.aggregators = kShards});
  return Train(cluster, Job());
}

// An empty directory of the test.
std::string NewDirectory(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// Ascending in age, newest last.
std::vector<std::string> SnapshotsIn(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".snapshot") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

void CutInHalf(const std::string& path) {
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
}

void FlipABit(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto middle = static_cast<std::streamoff>(std::filesystem::file_size(path) / 2);
  file.seekg(middle);
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(middle);
  file.put(byte);
}

using Damage = void (*)(const std::string& path);

class DamageTest : public ::testing::TestWithParam<Damage> {};

TEST_P(DamageTest, OfTheNewestSnapshotCostsARoundOrTwoOfReplay) {
  const Damage damage = GetParam();
  const std::string root = NewDirectory("damaged");
  int damaged = 0;
  Shards shards;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = kShards};
    options.state_dir = absl::StrCat(root, "/", shard);
    if (shard == 1) {
      options.before_restart = [&damaged, damage, directory = options.state_dir] {
        const std::vector<std::string> snapshots = SnapshotsIn(directory);
        ASSERT_GE(snapshots.size(), 2);
        damage(snapshots.back());
        ++damaged;
      };
    }
    shards.push_back(std::make_unique<Supervised>(options));
  }
  constexpr int kKillFrom[] = {4, 12, 25};
  size_t kills = 0;
  const auto results =
      Train([&] { return ConnectTo(shards); }, Job(),
            [&](uint32_t rank, int step, const Replica&, Worker&) {
              if (rank != 0 || kills == std::size(kKillFrom) || step < kKillFrom[kills]) return;
              if (SnapshotsIn(root + "/1").size() < 2)
                return absl::SleepFor(absl::Milliseconds(100));
              shards[1]->Signal(SIGKILL);
              shards[1]->AwaitListeningAfter(++kills);
            });
  EXPECT_EQ(results, TrainUndisturbed());
  EXPECT_EQ(damaged, 3);
  int set_aside = 0;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/1")) {
    set_aside += entry.path().extension() == ".damaged";
  }
  EXPECT_EQ(set_aside, 3);
}

TEST_P(DamageTest, OfAllSnapshotsIsRefusedByName) {
  const Damage damage = GetParam();
  const std::string root = NewDirectory("all-damaged"), copy = root + "/copy";
  Shards shards;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = kShards};
    options.state_dir = absl::StrCat(root, "/", shard);
    if (shard == 1) {
      options.before_restart = [&, directory = options.state_dir] {
        std::filesystem::copy(directory, copy, std::filesystem::copy_options::recursive);
      };
    }
    shards.push_back(std::make_unique<Supervised>(options));
  }
  Train([&] { return ConnectTo(shards); }, Job(),
        [&](uint32_t rank, int step, const Replica&, Worker&) {
          if (rank != 0 || step != 15) return;
          shards[1]->Signal(SIGKILL);
          shards[1]->AwaitListeningAfter(1);
        });
  const std::vector<std::string> snapshots = SnapshotsIn(copy);
  ASSERT_GE(snapshots.size(), 2);  // three if it died before it removed the oldest
  for (const std::string& path : snapshots) damage(path);

  FILE* const output = popen(
      absl::StrCat("cli/signpost aggregator --shard 1/2 --state-dir ", copy, " 2>&1").c_str(), "r");
  std::string text;
  for (int byte; (byte = fgetc(output)) != EOF;) text.push_back(static_cast<char>(byte));
  EXPECT_EQ(WEXITSTATUS(pclose(output)), 65) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("no snapshot of a job can be gone on from"),
                          HasSubstr(std::filesystem::path(snapshots[0]).filename()),
                          HasSubstr("--allow-error-reset")));
}

INSTANTIATE_TEST_SUITE_P(EachKind, DamageTest, ::testing::Values(CutInHalf, FlipABit),
                         [](const auto& info) {
                           return info.param == CutInHalf ? "CutInHalf" : "BitFlipped";
                         });

// A file system of its own, which goes with the process.
bool MountSmallDisk(const std::string& directory) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("signpost", directory.c_str(), "tmpfs", 0, "size=512k,mode=700") == 0;
}

JobStatus StatusOf(const Supervised& shard) {
  const auto response = ConnectToAggregator(shard.target(), FailureTimeout())
                            ->Status({}, absl::Now() + absl::Seconds(10));
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() && response->jobs_size() == 1 ? response->jobs(0) : JobStatus();
}

TEST(FullDisk, StopsTheJobWithAReasonAndLetsItGoOnWhenThereIsRoom) {
  const std::string root = NewDirectory("full");
  std::filesystem::create_directories(root + "/1");
  if (!MountSmallDisk(root + "/1")) GTEST_SKIP() << "cannot mount a tmpfs: " << strerror(errno);
  Shards shards;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = kShards};
    options.state_dir = absl::StrCat(root, "/", shard);
    if (shard == 1) options.wrapper = {"sh", "-c", "exec \"$0\" \"$@\" 2>" + root + "/log"};
    shards.push_back(std::make_unique<Supervised>(options));
  }
  const std::string filler = root + "/1/filler";
  const auto fill = [&] {
    const int fd = open(filler.c_str(), O_WRONLY | O_CREAT, 0600);
    const std::string zeros(4096, '\0');
    while (write(fd, zeros.data(), zeros.size()) > 0) {
    }
    EXPECT_EQ(errno, ENOSPC);
    close(fd);
  };
  constexpr int kFullAfter = 15;
  absl::Mutex mutex;
  int last_step = 0;
  std::optional<int> full_step;  // after which the disk was full
  std::thread watcher([&] {
    JobStatus status, before;
    do {  // until it says so and stands still
      before = status;
      absl::SleepFor(absl::Milliseconds(300));
      status = StatusOf(*shards[1]);
    } while (status.state_error().empty() || status.rounds_closed() != before.rounds_closed());
    EXPECT_THAT(status.state_error(),
                AllOf(HasSubstr("No space left on device"), ::testing::Not(HasSubstr(root))));
    {
      absl::MutexLock lock(&mutex);
      // Half of the parameters' fp32 size is five such rounds, and some were durable.
      EXPECT_LT(last_step, full_step.value_or(0) + 8);
    }
    EXPECT_TRUE(std::filesystem::remove(filler));
  });
  uint64_t most_kept = 0;
  std::vector<std::vector<float>> results(Job().workers);
  OnEachRank(Job().workers, [&](uint32_t rank) {
    const JobOptionsForTest job = Job();
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), ConnectTo(shards));
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < job.steps; ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      auto report = (*worker)->Step(replica.Gradients(), {job.rates});
      ASSERT_TRUE(report.ok()) << report.status();
      // Snapshots have caught up with the warm-up, whose frames are large: four rounds are kept.
      const bool has_caught_up = report->kept_bytes <= 4 * replica.values.size() * 3 / 8;
      const bool may_fill = rank == 0 && step >= kFullAfter;
      if (may_fill && !has_caught_up) absl::SleepFor(absl::Milliseconds(100));
      absl::MutexLock lock(&mutex);
      last_step = std::max(last_step, step);
      if (may_fill && has_caught_up && !full_step) {
        fill();
        full_step = step;
      }
      if (full_step) most_kept = std::max(most_kept, report->kept_bytes);
    }
    EXPECT_TRUE((*worker)->Leave().ok());
    results[rank] = replica.values;
  });
  watcher.join();
  std::stringstream log;
  log << std::ifstream(root + "/log").rdbuf();
  // Once, though it was tried several times.
  EXPECT_THAT(log.str(), MatchesRegex("signpost aggregator: cannot write down where jobs are: "
                                      "[^\n]*No space left on device[^\n]*\n"
                                      "signpost aggregator: [^\n]* is written down again\n"));
  EXPECT_EQ(results, TrainUndisturbed());
  EXPECT_LE(most_kept, 2 * results[0].size());
  EXPECT_GT(most_kept, 0);
}

// A memory cgroup, version 2 or 1, whose processes the kernel kills when they want too much.
class MemoryGroup {
 public:
  MemoryGroup() {
    for (const char* root : {"/sys/fs/cgroup", "/sys/fs/cgroup/memory"}) {
      path_ = absl::StrCat(root, "/signpost-test-", getpid());
      if (mkdir(path_.c_str(), 0755) != 0) continue;
      for (const char* name : {"memory.max", "memory.limit_in_bytes"}) {
        limit_ = absl::StrCat(path_, "/", name);
        if (std::filesystem::exists(limit_)) return;
      }
      rmdir(path_.c_str());
    }
    path_.clear();
  }
  ~MemoryGroup() {
    if (!path_.empty()) rmdir(path_.c_str());
  }

  bool SetLimit(const std::string& bytes) const {
    std::ofstream stream(limit_);
    stream << bytes;
    stream.close();
    return !path_.empty() && !stream.fail();
  }

  // Runs the command behind it in the group.
  std::vector<std::string> Wrapper() const {
    return {"sh", "-c", "echo $$ >$0/cgroup.procs && exec \"$@\"", path_};
  }

 private:
  std::string path_, limit_;
};

TEST(MemoryLimit, KillsAnAggregatorAndChangesNothing) {
  JobOptionsForTest job = Job();
  job.tensors = {2 << 20};  // the frames of a dense round have 32 MiB, errors and answers 8 each
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 1 << 20;
  job.steps = 4;
  job.optimizer.freeze_step = 2;
  const std::string root = NewDirectory("memory");
  const MemoryGroup group;
  if (!group.SetLimit("40M")) GTEST_SKIP() << "no memory cgroup can be made here";
  {
    SupervisedOptions options;
    options.state_dir = root + "/0";
    // More than there is: by itself it would refuse the job.
    options.flags.push_back("--max-held-bytes=1073741824");
    options.flags.push_back("--max-receive-bytes=1073741824");
    options.wrapper = group.Wrapper();
    options.before_restart = [&] { EXPECT_TRUE(group.SetLimit("4G")); };
    Shards shards;
    shards.push_back(std::make_unique<Supervised>(options));
    const auto results = Train([&] { return ConnectTo(shards); }, job);
    Cluster cluster({.aggregators = 1});
    EXPECT_EQ(results, Train(cluster, job));
    ASSERT_EQ(shards[0]->ends().size(), 1);
    EXPECT_EQ(WTERMSIG(shards[0]->ends()[0]), SIGKILL);
  }
}

// A connection on which nothing is sent, or -1.
int ConnectSilently(const std::string& target) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

TEST(FileDescriptors, RunOutUnderAFloodAndAreThereAgainAfterIt) {
  const std::string root = NewDirectory("descriptors");
  SupervisedOptions options;
  options.state_dir = root + "/0";
  options.wrapper = {"prlimit", "--nofile=64"};
  Shards shards;
  shards.push_back(std::make_unique<Supervised>(options));
  const std::string target = shards[0]->target();
  JobOptionsForTest job = Job();
  const auto results =
      Train([&] { return ConnectTo(shards); }, job,
            [&](uint32_t rank, int step, const Replica&, Worker&) {
              if (rank != 0 || step != 10) return;
              std::vector<int> flood;
              for (int i = 0; i < 200; ++i) flood.push_back(ConnectSilently(target));
              const auto descriptors = [&] {
                const std::filesystem::directory_iterator entries(
                    absl::StrCat("/proc/", shards[0]->pid(), "/fd"));
                return std::distance(begin(entries), end(entries));
              };
              // One may be free again that a snapshot had while the flood came.
              while (descriptors() < 63) absl::SleepFor(absl::Milliseconds(10));
              absl::SleepFor(absl::Milliseconds(200));
              for (const int fd : flood) close(fd);
              // A new connection is served, by the same process.
              const auto status = ConnectToAggregator(target, *FailureTimeout::Of(absl::Seconds(1)))
                                      ->Status({}, absl::Now() + absl::Seconds(10));
              EXPECT_TRUE(status.ok()) << status.status();
            });
  Cluster cluster({.aggregators = 1});
  EXPECT_EQ(results, Train(cluster, job));
  EXPECT_TRUE(shards[0]->ends().empty());
}

}  // namespace
}  // namespace signpost::testing
