// SIGKILL at every failpoint of an aggregator, on each of two shards, at three different steps: the
// workers, which are threads of this process, notice nothing, and end with the same bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "failpoint/failpoint.h"
#include "tests/chaos/supervised.h"
#include "tests/job.h"

namespace signpost::testing {
namespace {

constexpr uint32_t kShards = 2;

JobOptionsForTest Job() {
  JobOptionsForTest job;
  job.steps = 60;  // on a busy machine a snapshot is due less often
  job.optimizer.freeze_step = 6;
  return job;
}

// What is to be done to a shard.
struct Plan {
  // Of one process after the other. Each ends by being killed there.
  std::vector<std::string> failpoints;
  // After these steps the shard gets SIGTERM.
  std::vector<int> terminate_after = {};
  // The first so many processes must die, each at a later step than the one before.
  size_t deaths = 0;
  bool at_different_steps = true;
};

// Processes that die in the warm-up, at the freeze and in one-bit rounds, each followed by one that
// dies at the place while it recovers.
Plan WhileRecovering(absl::string_view name) {
  Plan plan;
  for (const char* first :
       {"round.closed=kill@4", "round.closed=kill@16", "round.closed=kill@30"}) {
    plan.failpoints.push_back(first);
    plan.failpoints.push_back(absl::StrCat(name, "=kill"));
  }
  plan.deaths = 6;
  plan.at_different_steps = false;  // two at each
  return plan;
}

// Where each of the three processes dies that come one after the other.
Plan AtCounts(absl::string_view name, const std::vector<int>& counts) {
  Plan plan;
  for (const int count : counts) plan.failpoints.push_back(absl::StrCat(name, "=kill@", count));
  plan.deaths = counts.size();
  return plan;
}

// What each round, each of its frames, or each snapshot comes by, counts up to different steps. A
// shard has three or four chunks, one or two snapshots in a step, and some more while it replays,
// because its chunks then go ahead one by one.
Plan PlanFor(Failpoint point, absl::string_view name) {
  Plan plan;
  switch (point) {
    case Failpoint::kStateDirCounted:
    case Failpoint::kStateDirLoaded:
    case Failpoint::kServerListening:
    case Failpoint::kReplayAsked:
      return WhileRecovering(name);
    case Failpoint::kFrameReceived:
    case Failpoint::kFrameContributed:
    case Failpoint::kAnswerSent:
      return AtCounts(name, {3, 80, 120});
    case Failpoint::kRoundClosed:
      return AtCounts(name, {1, 22, 30});
    case Failpoint::kFileHalfWritten:
      return AtCounts(name, {3, 200, 200});  // a snapshot has 20 to 50 parts
    case Failpoint::kFileCreated:
    case Failpoint::kFileWritten:
    case Failpoint::kFileSynced:
    case Failpoint::kFileRenamed:
      return AtCounts(name, {3, 12, 12});  // the first file is that of the generation
    case Failpoint::kSnapshotBegun:
    case Failpoint::kSnapshotSaved:
    case Failpoint::kSnapshotPruned:
    case Failpoint::kSnapshotAnnounced:
      return AtCounts(name, {2, 11, 11});
    case Failpoint::kSuspendBegun:
    case Failpoint::kSuspendHalfDone:
      plan = AtCounts(name, {1, 1, 1});
      plan.terminate_after = {2, 9, 19};
      return plan;
    // What happens once in a job, or once for each rank.
    case Failpoint::kJoinReceived:
      plan = AtCounts(name, {1, 2, 4});
      plan.at_different_steps = false;
      return plan;
    case Failpoint::kLeaveReceived:
      plan = AtCounts(name, {1, 2, 3});  // one rank may have left before the second death
      plan.at_different_steps = false;
      return plan;
    case Failpoint::kLeaveDurable:  // all may have left at once
    case Failpoint::kJoinDurable:
    case Failpoint::kJobHalfForgotten:
      return AtCounts(name, {1});
    case Failpoint::kWorkerSending:
    case Failpoint::kWorkerAnswered:
    case Failpoint::kNodeAnswered:
      break;
  }
  return plan;
}

std::vector<FailpointPlace> PlacesOfAggregators() {
  std::vector<FailpointPlace> places;
  for (const FailpointPlace& place : AllFailpoints()) {
    if (!absl::StartsWith(place.name, "worker.")) places.push_back(place);
  }
  return places;
}

const std::vector<std::vector<float>>& Undisturbed() {
  static const auto& results = *new auto([] {
    Cluster cluster({.aggregators = kShards});
    return Train(cluster, Job());
  }());
  return results;
}

class FailpointKillTest
    : public ::testing::TestWithParam<std::tuple<FailpointPlace, /*shard*/ uint32_t>> {};

TEST_P(FailpointKillTest, ChangesNothing) {
  const auto& [place, shard] = GetParam();
  const Plan plan = PlanFor(place.point, place.name);
  ASSERT_GT(plan.deaths, 0) << "nothing is planned for " << place.name;
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/", place.name, "-", shard);
  std::filesystem::remove_all(state_dir);

  absl::Mutex mutex;
  int step = 0;                 // of the fastest worker
  std::vector<int> died_after;  // how many steps it had made, by death
  std::vector<std::unique_ptr<Supervised>> shards;
  for (uint32_t i = 0; i < kShards; ++i) {
    SupervisedOptions options = {.shard = i, .shard_count = kShards};
    options.state_dir = absl::StrCat(state_dir, "/", i);
    if (i == shard) {
      options.failpoints = plan.failpoints;
      options.before_restart = [&] {
        absl::MutexLock lock(&mutex);
        died_after.push_back(step);
      };
    }
    shards.push_back(std::make_unique<Supervised>(options));
  }

  const auto results = Train([&] { return ConnectTo(shards); }, Job(),
                             [&](uint32_t rank, int done, const Replica&, Worker&) {
                               {
                                 absl::MutexLock lock(&mutex);
                                 step = std::max(step, done + 1);
                               }
                               const auto& terminate = plan.terminate_after;
                               const auto found =
                                   std::find(terminate.begin(), terminate.end(), done);
                               if (rank != 0 || found == terminate.end()) return;
                               shards[shard]->Signal(SIGTERM);  // a second one would end it at once
                               shards[shard]->AwaitListeningAfter(found - terminate.begin() + 1);
                             });
  EXPECT_EQ(results, Undisturbed());

  EXPECT_TRUE(shards[shard]->AwaitListeningAfter(plan.deaths));
  for (const int end : shards[shard]->ends()) {
    EXPECT_TRUE(WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL) << end;
  }
  absl::MutexLock lock(&mutex);
  ASSERT_EQ(died_after.size(), plan.deaths);
  if (!plan.at_different_steps) return;
  for (size_t i = 1; i < died_after.size(); ++i) EXPECT_GT(died_after[i], died_after[i - 1]);
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<FailpointPlace, uint32_t>>& info) {
  const auto& [place, shard] = info.param;
  return absl::StrCat(absl::StrReplaceAll(place.name, {{".", "_"}}), "_shard", shard);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FailpointKillTest,
                         ::testing::Combine(::testing::ValuesIn(PlacesOfAggregators()),
                                            ::testing::Range(0u, kShards)),
                         NameOf);

// Each process loads the codec before the job that needs it.
TEST(ACodecFromOutside, IsThereAgainInProcessesThatFollowThoseKilled) {
  JobOptionsForTest job = Job();
  job.steps = 24;
  job.optimizer.codec = CUSTOM;
  UseExampleCodec(job.worker);
  Cluster cluster({.aggregators = kShards});
  const std::vector<std::vector<float>> undisturbed = Train(cluster, job);

  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/codec");
  std::filesystem::remove_all(state_dir);
  std::vector<std::unique_ptr<Supervised>> shards;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    SupervisedOptions options = {.shard = shard, .shard_count = kShards};
    options.state_dir = absl::StrCat(state_dir, "/", shard);
    options.flags.push_back(absl::StrCat("--codec-library=", job.worker.codec_library));
    options.failpoints = {"round.closed=kill@4", "round.closed=kill@16", "round.closed=kill@16"};
    shards.push_back(std::make_unique<Supervised>(options));
  }
  EXPECT_EQ(Train([&] { return ConnectTo(shards); }, job), undisturbed);
  for (const std::unique_ptr<Supervised>& shard : shards) {
    EXPECT_TRUE(shard->AwaitListeningAfter(3));
    for (const int end : shard->ends()) {
      EXPECT_TRUE(WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL) << end;
    }
  }
}

TEST(Failpoints, AreAtTwelvePlacesOfAnAggregatorAtLeast) {
  EXPECT_GE(PlacesOfAggregators().size(), 12);
}

}  // namespace
}  // namespace signpost::testing
