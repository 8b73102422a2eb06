// Jobs that go on from what was saved: with the bits that they would have had, or not at all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/simulated_gpu.h"
#include "proto/codec.h"
#include "proto/custom_codec.h"
#include "tests/checkpoint_job.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/memory_disk.h"
#include "tests/status_is.h"
#include "worker/resume_state.h"

namespace signpost::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum absl::StatusCode;

struct ResumeCase {
  std::string name;
  int saved_after;
  OptimizerOptions optimizer;
};

constexpr LambOptions kLamb;
// Steps 0, 1 and 3 update the variance; 5, 7 and 10 end intervals.
constexpr ZeroOneOptions kZeroOne = {
    .var_update_scaler = 1, .local_step_scaler = 1, .local_step_clipper = 3};

// Refreshes its variance in the steps from 9 on.
constexpr OptimizerOptions kFollowing = {.freeze_step = 1,
                                         .variance_refresh_interval = OptimizerOptions::kAuto};

OptimizerOptions AsDeepSpeed(OptimizerOptions options) {
  options.bias_correction = false;
  options.variance_floor = 0;
  options.as_deepspeed = true;
  return options;
}

class ResumeTest : public ::testing::TestWithParam<ResumeCase> {};

TEST_P(ResumeTest, EqualsNoInterruptionBitForBitOnAnyNumberOfShards) {
  JobOptionsForTest job;
  job.optimizer = GetParam().optimizer;
  job.rates.beta2 = 0.75;  // a job that looks for its freeze step finds it soon
  UseExampleCodec(job.worker);
  const std::vector<End> expected = RunAnew(2, {.job = job, .until = 12});
  const int saved_after = GetParam().saved_after;
  MemoryDisk disk;
  std::vector<std::string> states(job.workers);
  RunAndSave(2, job, saved_after, disk, &states);
  for (const uint32_t aggregators : {1, 2, 3}) {
    SCOPED_TRACE(aggregators);
    EXPECT_EQ(RunAnew(aggregators, {.job = job, .until = 12, .resume_from = &disk}), expected);
    EXPECT_EQ(RunAnew(aggregators, {.job = job, .until = 12, .resume_from_states = &states}),
              expected);
  }

  if (job.optimizer.freeze_step == OptimizerOptions::kAuto) {
    EXPECT_EQ(Load(disk, job)->optimizer.schedule.freeze_step(), saved_after > 8 ? 8 : 0);
  }

  // Saved on a host, or on a GPU, and resumed on either.
  kernels::cuda::SimulatedGpu gpu(/*seed=*/1);
  JobOptionsForTest gpu_job = job;
  gpu_job.gpu_of = [&](uint32_t rank) { return rank != 2 ? &gpu : nullptr; };
  MemoryDisk gpu_disk;
  RunAndSave(2, gpu_job, saved_after, gpu_disk);
  EXPECT_EQ(RunAnew(2, {.job = gpu_job, .until = 12, .resume_from = &disk}), expected);
  EXPECT_EQ(RunAnew(2, {.job = gpu_job, .until = 12, .resume_from_states = &states}), expected);
  EXPECT_EQ(RunAnew(2, {.job = job, .until = 12, .resume_from = &gpu_disk}), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, ResumeTest,
    ::testing::ValuesIn(std::vector<ResumeCase>{
        {"BeforeTheFirstStep", 0, {.freeze_step = 5}},
        {"InTheWarmUp", 2, {.freeze_step = 5}},
        {"AtTheFreeze", 5, {.freeze_step = 5, .warm_up_codec = BFLOAT16}},
        {"AfterTheFirstOneBitStep", 6, {.freeze_step = 5}},
        {"AmongOneBitSteps", 9, {.freeze_step = 5, .warm_up_codec = BFLOAT16}},
        {"AmongInt8Steps", 7, {.freeze_step = 5, .codec = INT8}},
        {"AmongInt4Steps", 9, {.freeze_step = 5, .warm_up_codec = INT8, .codec = INT4}},
        {"AmongBf16Steps", 8, {.freeze_step = 5, .codec = BFLOAT16}},
        {"AmongFp16Steps", 6, {.freeze_step = 5, .warm_up_codec = INT4, .codec = FLOAT16}},
        {"AmongFp32Steps", 8, {.freeze_step = 5, .warm_up_codec = ONE_BIT, .codec = FLOAT32}},
        {"BeforeARefreshOfTheVariance", 8, {.freeze_step = 5, .variance_refresh_interval = 3}},
        {"AfterARefreshOfTheVariance", 9, {.freeze_step = 5, .variance_refresh_interval = 3}},
        {"AfterARefreshThatMadeTheFirstErrors",
         9,
         {.freeze_step = 5,
          .codec = FLOAT32,
          .variance_codec = INT8,
          .variance_refresh_interval = 3}},
        {"OfAVarianceThatFollowsBeforeARefresh", 9, kFollowing},
        {"OfAVarianceThatFollowsAmongRefreshes", 11, kFollowing},
        {"OfLambWithAVarianceThatFollows",
         10,
         {.freeze_step = 1, .variance_refresh_interval = OptimizerOptions::kAuto, .lamb = kLamb}},
        {"BeforeTheFreezeIsFound", 6, {.freeze_step = OptimizerOptions::kAuto}},
        {"AfterTheFreezeWasFound", 10, {.freeze_step = OptimizerOptions::kAuto}},
        {"OfAdam", 7, {}},
        {"OfLamb", 7, {.lamb = kLamb}},
        {"OfLambInTheWarmUp", 3, {.freeze_step = 5, .lamb = kLamb}},
        {"OfLambAtTheFreeze", 5, {.freeze_step = 5, .warm_up_codec = BFLOAT16, .lamb = kLamb}},
        {"OfLambAmongOneBitSteps", 9, {.freeze_step = 5, .lamb = kLamb}},
        {"OfLambAmongFp32Steps", 6, {.freeze_step = 5, .codec = FLOAT32, .lamb = kLamb}},
        {"OfLambAmongInt4StepsAfterARefresh",
         9,
         {.freeze_step = 5, .codec = INT4, .variance_refresh_interval = 3, .lamb = kLamb}},
        {"OfZeroOneAdamBetweenUpdates", 4, {.freeze_step = 5, .zero_one = kZeroOne}},
        {"OfZeroOneAdamAtTheFreeze", 5, {.freeze_step = 5, .zero_one = kZeroOne}},
        {"OfZeroOneAdamAfterASynchronisation", 8, {.freeze_step = 5, .zero_one = kZeroOne}},
        {"OfZeroOneAdamAfterALocalStep", 9, {.freeze_step = 5, .zero_one = kZeroOne}},
        {"OfZeroOneAdamAfterTwoOfThem",
         10,
         {.freeze_step = 5, .codec = INT8, .zero_one = kZeroOne}},
        {"AsDeepSpeedAfterTheFirstStep", 1, AsDeepSpeed({.freeze_step = 5})},
        {"AsDeepSpeedAmongOneBitSteps", 8, AsDeepSpeed({.freeze_step = 5})},
        {"OfLambAsDeepSpeed", 7, AsDeepSpeed({.freeze_step = 5, .lamb = kLamb})},
        {"OfZeroOneAdamAsDeepSpeedAtTheFreeze", 5,
         AsDeepSpeed({.freeze_step = 5, .zero_one = kZeroOne})},
        {"OfZeroOneAdamAsDeepSpeedAfterALocalStep", 10,
         AsDeepSpeed({.freeze_step = 5, .zero_one = kZeroOne})}}),
    [](const auto& info) { return info.param.name; });

// In the warm-up for those that differ there, and among steps after it.
std::vector<ResumeCase> WithEachCodec() {
  std::vector<ResumeCase> cases;
  for (const NamedOptimizer& optimizer : EachOptimizerWithEachCodec(5, kZeroOne)) {
    const bool is_after_warm_up =
        optimizer.options.warm_up_codec == OptimizerOptions().warm_up_codec;
    const bool refreshes = optimizer.options.variance_refresh_interval > 0;  // in step 8
    cases.push_back({optimizer.name, refreshes ? 9 : is_after_warm_up ? 8 : 3, optimizer.options});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Each, ResumeTest, ::testing::ValuesIn(WithEachCodec()),
                         [](const auto& info) { return info.param.name; });

TEST(Checkpoint, TakingOneChangesNothing) {
  const JobOptionsForTest job;
  const std::vector<End> expected = RunAnew(2, {.job = job, .until = 12});
  MemoryDisk disk;
  EXPECT_EQ(
      RunAnew(
          2, {.job = job, .until = 12, .checkpoint_after = {3, 5, 6, 9, 12}, .checkpoints = &disk}),
      expected);
  EXPECT_THAT(CheckpointsIn(disk),
              ElementsAre(HasSubstr("step-000000000012-"), HasSubstr("step-000000000009-")))
      << "two are kept";
  EXPECT_EQ(disk.Files().size(), 2 * (job.workers + 2)) << "and nothing else";
}

TEST(Checkpoint, ResumingTellsFromWhereAndCanBeSavedAgainAtOnce) {
  const JobOptionsForTest job;
  MemoryDisk disk, again;
  RunAndSave(2, job, /*until=*/8, disk);
  RunAnew(3, {.job = job,
              .until = 8,
              .checkpoint_after = {8},
              .checkpoints = &again,
              .resume_from = &disk,
              .after_join = [&](uint32_t rank, Worker& worker) {
                EXPECT_EQ(worker.steps(), 8u);
                EXPECT_EQ(worker.resumed().checkpoint, CheckpointsIn(disk)[0]);
                EXPECT_TRUE(worker.resumed().warnings.empty());
              }});
  for (uint32_t rank = 0; rank < job.workers; ++rank) {
    const auto first = Load(disk, job, rank), second = Load(again, job, rank);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    EXPECT_EQ(first->values, second->values);
    EXPECT_EQ(first->optimizer.error, second->optimizer.error);
    EXPECT_EQ(first->aggregator_errors, second->aggregator_errors);
    EXPECT_FALSE(first->aggregator_errors.empty());
  }
}

TEST(Checkpoint, ResumingWithOtherWorkersKeepsTheMeanOfTheErrors) {
  JobOptionsForTest job;
  MemoryDisk disk;
  RunAndSave(2, job, /*until=*/8, disk);
  std::vector<float> mean;
  for (uint32_t rank = 0; rank < job.workers; ++rank) {
    const std::vector<float> error = Load(disk, job, rank)->optimizer.error;
    if (mean.empty()) mean.resize(error.size());
    for (size_t i = 0; i < error.size(); ++i) mean[i] += error[i];
  }
  for (float& error : mean) error /= 4;
  std::map<uint32_t, std::vector<float>> before;
  for (uint32_t rank = 0; rank < 4; ++rank) before.merge(Load(disk, job, rank)->aggregator_errors);

  job.workers = 3;
  EXPECT_THAT(MessageOf(Load(disk, job).status()),
              HasSubstr("was taken of 4 workers, and 3 resume from it"));
  job.worker.resume_with_other_world_size = true;
  MemoryDisk again;
  RunAnew(2, {.job = job,
              .until = 10,
              .checkpoint_after = {8},
              .checkpoints = &again,
              .resume_from = &disk,
              .after_join = [&](uint32_t rank, Worker& worker) {
                EXPECT_EQ(BytesOfAll(worker.optimizer().error()), BytesOfAll(mean));
              }});
  std::map<uint32_t, std::vector<float>> after;
  for (uint32_t rank = 0; rank < 3; ++rank) after.merge(Load(again, job, rank)->aggregator_errors);
  EXPECT_EQ(after, before) << "the aggregators' errors are what they were";
}

// Nothing that is saved depends on when rounds close.
TEST(Checkpoint, AJobMayComeToHaveARoundDeadlineOrAnotherOrNone) {
  JobOptionsForTest job;
  const std::vector<End> whole = RunAnew(2, {.job = job, .until = 14});
  MemoryDisk disk;
  Plan plan = {.job = job, .until = 6, .checkpoint_after = {6}, .checkpoints = &disk};
  std::vector<std::string> states(job.workers);
  plan.save_states = &states;
  RunAnew(2, plan);
  plan.save_states = nullptr;

  plan.job.worker.round_deadline = absl::Seconds(20);
  plan.job.worker.min_workers = 3;
  plan.until = 8;
  plan.checkpoint_after = {8};
  plan.resume_from_states = &states;
  RunAnew(2, plan);
  plan.resume_from_states = nullptr;
  plan.resume_from = &disk;
  plan.job.worker.round_deadline = absl::Seconds(25);
  plan.job.worker.min_workers = 2;
  plan.until = 10;
  plan.checkpoint_after = {10};
  RunAnew(2, plan);
  plan.job = job;
  plan.until = 14;
  plan.checkpoint_after = {};
  EXPECT_EQ(RunAnew(2, plan), whole);
}

// 0/1 Adam's local steps are each rank's own, and their sums each group's.
TEST(Checkpoint, OfLocalStepsIsForAsManyWorkersAndTheSameGroups) {
  JobOptionsForTest job;
  job.optimizer.zero_one = kZeroOne;
  MemoryDisk local, synchronised;
  std::vector<std::string> states(job.workers);
  RunAndSave(2, job, /*until=*/9, local, &states);
  RunAndSave(2, job, /*until=*/8, synchronised);

  const auto resume = [&](const ResumeFrom& from, uint32_t group) {
    Replica replica(job, 0);
    std::vector<Parameter> parameters = replica.Parameters();
    parameters.back().group = group;
    Cluster cluster({});
    return Worker::Join(replica.Options(), job.optimizer, parameters, cluster.Connect(), from)
        .status();
  };
  for (const ResumeFrom& from :
       {ResumeFrom{.checkpoints = &local}, ResumeFrom{.state = states[0]}}) {
    const absl::Status status = resume(from, /*group=*/1);
    EXPECT_THAT(status, StatusIs(kFailedPrecondition, HasSubstr("other parameter groups")));
  }

  job.workers = 3;
  job.worker.resume_with_other_world_size = true;
  const absl::Status status = Load(local, job).status();
  EXPECT_THAT(status, StatusIs(kFailedPrecondition, HasSubstr("between two synchronisations")));
  RunAnew(2, {.job = job, .until = 12, .resume_from = &synchronised});
}

TEST(RankState, OfAnotherRankOrWorldOrModelIsRefusedByName) {
  JobOptionsForTest job = {.workers = 2};
  std::vector<std::string> states(2);
  RunAnew(1, {.job = job, .until = 7, .save_states = &states});
  const auto refusal = [&](const JobOptionsForTest& other, uint32_t rank) {
    const absl::Status status = Load({.state = states[0]}, other, rank).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return MessageOf(status);
  };
  EXPECT_THAT(refusal(job, 1), HasSubstr("that of rank 0 of 2, and this is rank 1 of 2"));
  JobOptionsForTest other = job;
  other.workers = 3;
  EXPECT_THAT(refusal(other, 0), HasSubstr("that of rank 0 of 2, and this is rank 0 of 3"));
  other = job;
  other.optimizer.variance_floor = 0.1;
  EXPECT_THAT(refusal(other, 0), HasSubstr("the saved state is of another job: option optimizer"));
  MemoryDisk disk;
  EXPECT_TRUE(
      absl::IsInvalidArgument(Load({.checkpoints = &disk, .state = states[0]}, job, 0).status()));
}

// Of the same name and version, which makes something else of the same numbers.
TEST(Checkpoint, OfAnotherBuildOfItsCodecIsRefusedWithBothDigests) {
  JobOptionsForTest job = {.workers = 1};
  UseExampleCodec(job.worker);
  job.optimizer.codec = CUSTOM;
  MemoryDisk disk;
  std::vector<std::string> states(1);
  RunAndSave(1, job, /*until=*/7, disk, &states);
  const CustomCodec codec =
      OpenCodec("topk", job.worker.codec_options, job.worker.block_elements)->description;
  CustomCodec changed = codec;
  changed.set_digest(codec.digest() + 1);
  for (const ResumeFrom& from :
       {ResumeFrom{.checkpoints = &disk}, ResumeFrom{.state = states[0]}}) {
    EXPECT_EQ(Load(from, job, 0, codec).status(), absl::OkStatus());
    const absl::Status refusal = Load(from, job, 0, changed).status();
    EXPECT_THAT(refusal, StatusIs(kFailedPrecondition,
                                  HasSubstr(absl::StrFormat("is %08x here but %08x in the job",
                                                            changed.digest(), codec.digest()))));
  }
}

// What ranks are told that resume from these and may not, all together.
std::string RefusalsOf(const JobOptionsForTest& job, const std::vector<ResumeFrom>& from) {
  Cluster cluster({});
  absl::Mutex mutex;
  std::string messages;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    const std::vector<float> before = replica.values;
    auto worker = Worker::Join(replica.Options(), job.optimizer, replica.Parameters(),
                               cluster.Connect(), from[rank]);
    EXPECT_FALSE(worker.ok());
    EXPECT_EQ(replica.values, before) << "parameters are untouched";
    absl::MutexLock lock(&mutex);
    absl::StrAppend(&messages, MessageOf(worker.status()));
  });
  return messages;
}

// Of the one of step 6, whichever comes first.
auto OfDifferentSteps() {
  return AnyOf(HasSubstr("option first_step is 6 here but 8 in the job"),
               HasSubstr("its first_step was to be 6, and that of rank 1 is 8"));
}

TEST(RankState, StatesOfDifferentStepsAreRefused) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.join_timeout = absl::Seconds(1);
  std::vector<std::string> early(2), late(2);
  RunAnew(1, {.job = job, .until = 6, .save_states = &early});
  RunAnew(1, {.job = job, .until = 8, .save_states = &late});
  EXPECT_THAT(RefusalsOf(job, {{.state = early[0]}, {.state = late[1]}}), OfDifferentSteps());
}

TEST(Checkpoint, RanksThatResumeFromDifferentOnesAreRefused) {
  JobOptionsForTest job = {.workers = 2};
  job.worker.join_timeout = absl::Seconds(1);
  MemoryDisk early, late;
  RunAndSave(1, job, /*until=*/6, early);
  RunAndSave(1, job, /*until=*/8, late);
  EXPECT_THAT(RefusalsOf(job, {{.checkpoints = &early}, {.checkpoints = &late}}),
              OfDifferentSteps());
}

// Whose rounds begin alike, with the same values.
TEST(Checkpoint, RanksThatResumeFromDifferentLocalStepsAreRefused) {
  JobOptionsForTest job = {.workers = 2};
  job.optimizer.zero_one = kZeroOne;
  job.worker.join_timeout = absl::Seconds(1);
  MemoryDisk early, late;
  RunAndSave(1, job, /*until=*/9, early);
  RunAndSave(1, job, /*until=*/10, late);
  EXPECT_THAT(RefusalsOf(job, {{.checkpoints = &early}, {.checkpoints = &late}}),
              AnyOf(HasSubstr("option local_steps is 1 here but 2 in the job"),
                    HasSubstr("with local_steps 1, and that of rank 1 is")));
}

TEST(Checkpoint, AWorkerThatIsInterruptedBeforeItResumesHasItsValuesStill) {
  const JobOptionsForTest job;
  MemoryDisk disk;
  RunAndSave(1, job, /*until=*/6, disk);
  Cluster cluster({});
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::fill(replica.values.begin(), replica.values.end(), 7.0f);
    WorkerOptions options = replica.Options();
    options.is_interrupted = [] { return true; };
    const auto worker = Worker::Join(options, job.optimizer, replica.Parameters(),
                                     cluster.Connect(), {.checkpoints = &disk});
    EXPECT_TRUE(absl::IsCancelled(worker.status())) << worker.status();
    EXPECT_THAT(replica.values, Each(7.0f));
  });
}

}  // namespace
}  // namespace signpost::testing
