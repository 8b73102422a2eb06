// What recovery costs: the time from a SIGKILL to the next step that all workers have made, and the
// time of a step with a state directory against one without.
//
//   bazel run -c opt //tests/chaos:recovery_benchmark -- recovery DIRECTORY [PARAMETERS] [KILLS]
//   bazel run -c opt //tests/chaos:recovery_benchmark -- cost DIRECTORY [PARAMETERS] [PAIRS] [MS]
//
// Aggregators are processes, the four workers threads of this one. For each step a worker computes
// for MS milliseconds of a core, in place of a gradient. With none, a step is kernels and exchange
// only, and the share of what recovery costs as large as it can be. State is kept below DIRECTORY.

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tests/chaos/supervised.h"
#include "tests/cluster.h"
#include "worker/worker.h"

namespace signpost::testing {
namespace {

constexpr uint32_t kWorkers = 4, kShards = 2;
constexpr int kFreezeStep = 3;
// Of a cost run. By the first that is timed, no frame of the warm-up is kept any more.
constexpr int kFirstTimedStep = 24, kStepsOfARun = 55;

std::vector<std::unique_ptr<Supervised>> StartShards(const std::string& directory,
                                                     bool with_state) {
  std::vector<std::unique_ptr<Supervised>> shards;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = kShards};
    if (with_state) options.state_dir = absl::StrCat(directory, "/", shard);
    shards.push_back(std::make_unique<Supervised>(options));
  }
  return shards;
}

// Calls after_step(rank, report) after each step, on the rank's thread, until it returns false.
using AfterEachStep = std::function<bool(uint32_t rank, const StepReport& report)>;

void Train(const std::vector<std::unique_ptr<Supervised>>& shards, size_t parameters,
           const AfterEachStep& after_step) {
  OnEachRank(kWorkers, [&](uint32_t rank) {
    std::vector<float> values(parameters), gradient(parameters);
    for (size_t i = 0; i < parameters; ++i)
      gradient[i] = 0.001f * ((i * 31 + rank * 7) % 13) - 0.006f;
    WorkerOptions options = {.job = "benchmark", .rank = rank, .world_size = kWorkers};
    auto worker = Worker::Join(options, {.freeze_step = kFreezeStep},
                               {{"w", {parameters}, absl::MakeSpan(values)}}, ConnectTo(shards));
    if (!worker.ok())
      return std::fprintf(stderr, "%s\n", worker.status().ToString().c_str()), void();
    const Gradient gradients[] = {gradient};
    while (true) {
      const auto report = (*worker)->Step(gradients, {{.learning_rate = 1e-4}});
      if (!report.ok()) {
        return std::fprintf(stderr, "%s\n", report.status().ToString().c_str()), void();
      }
      if (!after_step(rank, *report)) break;
    }
    (*worker)->Leave().IgnoreError();  // the shards go with their directory
  });
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void MeasureRecovery(const std::string& directory, size_t parameters, int kills) {
  std::filesystem::remove_all(directory);
  const auto shards = StartShards(directory, /*with_state=*/true);
  absl::Mutex mutex;
  std::vector<int64_t> steps(kWorkers, -1);  // that each has made
  bool done = false;
  const auto slowest_is = [&](int64_t step) {
    absl::MutexLock lock(&mutex);
    const auto is_there = [&] { return *std::min_element(steps.begin(), steps.end()) >= step; };
    mutex.Await(absl::Condition(&is_there));
  };
  std::thread killer([&] {
    std::vector<double> took;
    for (int kill = 0; kill < kills; ++kill) {
      slowest_is(kFreezeStep + 5 +
                 9 * kill);  // at another distance from the last snapshot each time
      const uint32_t shard = kill % kShards;
      int64_t under_way;
      {
        absl::MutexLock lock(&mutex);
        under_way = *std::max_element(steps.begin(), steps.end()) + 1;
      }
      const absl::Time start = absl::Now();
      shards[shard]->Signal(SIGKILL);
      shards[shard]->AwaitListeningAfter(kill / kShards + 1);
      const absl::Duration restart = absl::Now() - start;
      slowest_is(under_way + 1);  // the step under way may have had its answers already
      took.push_back(absl::ToDoubleSeconds(absl::Now() - start));
      std::printf(
          "shard %u killed in step %ld: listens again after %.3f s, next step made by all "
          "after %.3f s\n",
          shard, under_way, absl::ToDoubleSeconds(restart), took.back());
      std::fflush(stdout);
    }
    std::printf("%zu parameters: %d kills, median %.3f s, most %.3f s\n", parameters, kills,
                Median(took), *std::max_element(took.begin(), took.end()));
    absl::MutexLock lock(&mutex);
    done = true;
  });
  int64_t last = -1;  // the step after which all leave
  uint64_t replayed = 0;
  Train(shards, parameters, [&](uint32_t rank, const StepReport& report) {
    absl::MutexLock lock(&mutex);
    steps[rank] = static_cast<int64_t>(report.step);
    replayed += report.replayed_frames;
    if (done && last < 0) last = *std::max_element(steps.begin(), steps.end()) + 1;
    return last < 0 || steps[rank] < last;
  });
  killer.join();
  std::printf("%lu frames sent again in all\n", replayed);
}

// Of one-bit steps, once no dense frame is kept any more.
struct Cost {
  double step = 0;            // in seconds
  double worker_cpu = 0;      // in CPU seconds per step, of all workers
  double aggregator_cpu = 0;  // of all aggregators
  uint64_t kept_bytes = 0;    // the most that a rank kept
};

double CpuSecondsOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string field;
  double ticks = 0;
  for (int i = 1; i <= 15 && file >> field; ++i) {
    if (i >= 14) ticks += std::stod(field);  // utime and stime
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// In place of a gradient.
void Compute(absl::Duration cpu_time) {
  const auto now = [] {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return absl::DurationFromTimespec(time);
  };
  const absl::Duration end = now() + cpu_time;
  while (now() < end) {
  }
}

Cost MeasureRun(const std::string& directory, size_t parameters, absl::Duration compute,
                bool with_state) {
  std::filesystem::remove_all(directory);
  const auto shards = StartShards(directory, with_state);
  const auto aggregators_cpu = [&] {
    double seconds = 0;
    for (const auto& shard : shards) seconds += CpuSecondsOf(shard->pid());
    return seconds;
  };
  constexpr int kTimed = kStepsOfARun - 1 - kFirstTimedStep;
  absl::Mutex mutex;
  Cost cost;
  Train(shards, parameters, [&](uint32_t rank, const StepReport& report) {
    if (report.step + 1 >= kFirstTimedStep) Compute(compute);
    absl::MutexLock lock(&mutex);
    if (report.step >= kFirstTimedStep) {
      cost.kept_bytes = std::max(cost.kept_bytes, report.kept_bytes);
    }
    const bool is_last = report.step + 1 == kStepsOfARun;
    if (rank == 0 && (report.step == kFirstTimedStep || is_last)) {
      const double sign = is_last ? 1 : -1;
      cost.step += sign * absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) / kTimed;
      cost.worker_cpu += sign * CpuSecondsOf(getpid()) / kTimed;
      cost.aggregator_cpu += sign * aggregators_cpu() / kTimed;
    }
    return !is_last;
  });
  return cost;
}

void MeasureCost(const std::string& directory, size_t parameters, int pairs,
                 absl::Duration compute) {
  std::vector<double> ratios, cpu_ratios;
  for (int pair = 0; pair < pairs; ++pair) {
    Cost cost[2];
    for (const int i : {0, 1}) {
      const bool with_state = (pair + i) % 2 == 1;  // in turns
      cost[with_state] = MeasureRun(directory, parameters, compute, with_state);
    }
    ratios.push_back(cost[1].step / cost[0].step);
    cpu_ratios.push_back((cost[1].worker_cpu + cost[1].aggregator_cpu) /
                         (cost[0].worker_cpu + cost[0].aggregator_cpu));
    for (const bool with_state : {false, true}) {
      const Cost& one = cost[with_state];
      std::printf(
          "%s state: step %.4f s; CPU per step of workers %.4f s, of aggregators %.4f s; kept "
          "%.2f of half of the parameters' fp32 size\n",
          with_state ? "with   " : "without", one.step, one.worker_cpu, one.aggregator_cpu,
          static_cast<double>(one.kept_bytes) / (2.0 * parameters));
    }
    std::fflush(stdout);
  }
  for (const auto& [what, values] : {std::pair("step", ratios), std::pair("CPU", cpu_ratios)}) {
    std::printf("%zu parameters, %d pairs: %s %.3f times in the median, from %.3f to %.3f\n",
                parameters, pairs, what, Median(values),
                *std::min_element(values.begin(), values.end()),
                *std::max_element(values.begin(), values.end()));
  }
}

int Main(int argc, char** argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  size_t parameters = what == "cost" ? 25'000'000 : 8'000'000;
  int times = 8, compute_ms = 0;
  if ((what != "cost" && what != "recovery") || argc > 6 ||
      (argc > 3 && !absl::SimpleAtoi(argv[3], &parameters)) ||
      (argc > 5 && !absl::SimpleAtoi(argv[5], &compute_ms)) ||
      (argc > 4 && !absl::SimpleAtoi(argv[4], &times)) || parameters == 0 || times < 1) {
    std::fprintf(stderr,
                 "usage: recovery_benchmark recovery|cost DIRECTORY [PARAMETERS] [TIMES] [MS]\n");
    return 64;
  }
  const std::string directory = absl::StrCat(argv[2], "/recovery-benchmark");
  what == "cost" ? MeasureCost(directory, parameters, times, absl::Milliseconds(compute_ms))
                 : MeasureRecovery(directory, parameters, times);
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace signpost::testing

int main(int argc, char** argv) { return signpost::testing::Main(argc, argv); }
