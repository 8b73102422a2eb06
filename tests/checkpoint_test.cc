// Jobs that are saved, end, and go on from what was saved: with the bits that they would have had.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/optional.h"
#include "cli/proxy.h"
#include "kernels/simulated_gpu.h"
#include "proto/custom_codec.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "server/server.h"
#include "storage/disk.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"
#include "worker/checkpoint_dir.h"
#include "worker/grpc_channel.h"
#include "worker/resume_state.h"

namespace signpost::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string BytesOfAll(absl::Span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), 4 * values.size()};
}

// Files in memory. A crash can be planned: what is written until then is there, and nothing that
// comes after it.
class MemoryDisk final : public Disk {
 public:
  MemoryDisk() = default;
  explicit MemoryDisk(const MemoryDisk& other) : files_(other.Files()) {}

  // Each byte that is written counts as 1, and so does each operation.
  void DieAfter(uint64_t budget) {
    absl::MutexLock lock(&mutex_);
    budget_ = budget;
  }
  void Revive() {
    absl::MutexLock lock(&mutex_);
    budget_.reset();
  }
  uint64_t spent() const {
    absl::MutexLock lock(&mutex_);
    return spent_;
  }
  // Files of that name cannot be written: of none at first.
  void FillUpFor(const std::string& name) {
    absl::MutexLock lock(&mutex_);
    has_no_room_ = name;
  }
  // Called before each file is written.
  void OnWrite(std::function<void(const std::string& name)> on_write) {
    on_write_ = std::move(on_write);
  }
  std::map<std::string, std::string> Files() const {
    absl::MutexLock lock(&mutex_);
    return files_;
  }
  void FlipBit(const std::string& name, size_t byte, int bit) {
    absl::MutexLock lock(&mutex_);
    files_.at(name)[byte] ^= static_cast<char>(1 << bit);
  }

  absl::Status Write(const std::string& name, Fill fill) override {
    if (on_write_) on_write_(name);
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    if (!has_no_room_.empty() && absl::EndsWith(name, has_no_room_)) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot write ", name));
    }
    std::string& file = files_[name];
    file.clear();
    return fill([&](absl::string_view part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const uint64_t written = Spend(part.size());
      file.append(part.data(), written);
      return written < part.size() ? Dead() : absl::OkStatus();
    });
  }
  absl::Status Sync(const std::string& name) override { return Operation(); }
  absl::Status SyncDirectory() override { return Operation(); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    files_[to] = std::move(files_.at(from));
    files_.erase(from);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Read(const std::string& name) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    const auto found = files_.find(name);
    if (found == files_.end()) return absl::NotFoundError(absl::StrCat("no file ", name));
    return found->second;
  }
  absl::StatusOr<std::vector<std::string>> List() override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    std::vector<std::string> names;
    for (const auto& [name, contents] : files_) names.push_back(name);
    return names;
  }
  absl::Status Remove(const std::string& name) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    files_.erase(name);
    return absl::OkStatus();
  }

 private:
  static absl::Status Dead() { return absl::UnavailableError("the process is dead"); }
  absl::Status Operation() {
    absl::MutexLock lock(&mutex_);
    return Spend(1) == 0 ? Dead() : absl::OkStatus();
  }
  // As much of it as is left.
  uint64_t Spend(uint64_t cost) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (budget_) {
      cost = std::min(cost, *budget_);
      *budget_ -= cost;
    }
    spent_ += cost;
    return cost;
  }

  mutable absl::Mutex mutex_;
  std::map<std::string, std::string> files_ ABSL_GUARDED_BY(mutex_);
  absl::optional<uint64_t> budget_ ABSL_GUARDED_BY(mutex_);
  std::string has_no_room_ ABSL_GUARDED_BY(mutex_);
  uint64_t spent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::function<void(const std::string& name)> on_write_;
};

// A part of a training: from where it stands, or resumes, until so many steps are done.
struct Plan {
  JobOptionsForTest job;
  int until = 0;
  std::vector<int> checkpoint_after = {};  // steps done
  Disk* checkpoints = nullptr;
  Disk* resume_from = nullptr;
  std::vector<std::string>* save_states = nullptr;  // by rank; at the end
  const std::vector<std::string>* resume_from_states = nullptr;
  // Called before a rank's Checkpoint, and after each rank's Join.
  std::function<void(uint32_t rank)> before_checkpoint = nullptr;
  std::function<void(uint32_t rank, Worker& worker)> after_join = nullptr;
};

// What a rank ends with.
struct End {
  std::string values, momentum, variance, fresh_variance, error;

  bool operator==(const End&) const = default;
};

std::vector<End> RunIn(Cluster& cluster, const Plan& plan) {
  std::vector<End> ends(plan.job.workers);
  OnEachRank(plan.job.workers, [&](uint32_t rank) {
    Replica replica(plan.job, rank);
    ResumeFrom resume_from = {.checkpoints = plan.resume_from};
    if (plan.resume_from_states != nullptr) resume_from.state = (*plan.resume_from_states)[rank];
    const bool resumes = plan.resume_from != nullptr || plan.resume_from_states != nullptr;
    if (resumes) std::fill(replica.values.begin(), replica.values.end(), 7.0f);
    auto worker = Worker::Join(replica.Options(), plan.job.optimizer, replica.Parameters(),
                               cluster.Connect(), resume_from);
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (plan.after_join) plan.after_join(rank, **worker);
    while (true) {
      const int done = static_cast<int>((*worker)->steps());
      if (std::count(plan.checkpoint_after.begin(), plan.checkpoint_after.end(), done) > 0) {
        if (plan.before_checkpoint) plan.before_checkpoint(rank);
        const absl::Status saved = (*worker)->Checkpoint(*plan.checkpoints);
        ASSERT_TRUE(saved.ok()) << "rank " << rank << ": " << saved;
      }
      if (done >= plan.until) break;
      replica.gradient = GradientOf(rank, done, replica.values.size());
      replica.BeforeStep(**worker);
      auto report = (*worker)->Step(replica.Gradients(), {plan.job.rates});
      ASSERT_TRUE(report.ok()) << report.status();
    }
    if (plan.save_states != nullptr) {
      absl::StatusOr<std::string> state = (*worker)->SaveState();
      ASSERT_TRUE(state.ok()) << "rank " << rank << ": " << state.status();
      (*plan.save_states)[rank] = *std::move(state);
    }
    std::string momentum;
    for (uint32_t chunk = 0; chunk < (*worker)->layout().chunks().size(); ++chunk) {
      momentum += BytesOfAll((*worker)->optimizer().Momentum(chunk));
    }
    replica.GetValues();
    ends[rank] = {BytesOfAll(replica.values), momentum,
                  BytesOfAll((*worker)->optimizer().variance()),
                  BytesOfAll((*worker)->optimizer().fresh_variance()),
                  BytesOfAll((*worker)->optimizer().error())};
    EXPECT_TRUE((*worker)->Leave().ok());
  });
  return ends;
}

// Another part of a training, in aggregators of its own.
std::vector<End> RunAnew(uint32_t aggregators, const Plan& plan) {
  Cluster cluster({.aggregators = aggregators});
  return RunIn(cluster, plan);
}

// What a rank of the job would resume from.
absl::StatusOr<ResumeState> Load(const ResumeFrom& from, const JobOptionsForTest& job,
                                 uint32_t rank, const CustomCodec& codec = {}) {
  Replica replica(job, rank);
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : replica.Parameters()) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(parameter.name);
    tensor.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
  }
  JobOptions options;
  options.set_block_elements(job.worker.block_elements);
  options.set_chunk_elements(job.worker.chunk_elements);
  options.set_gamma(job.worker.gamma);
  options.set_round_deadline_us(absl::ToInt64Microseconds(job.worker.round_deadline));
  options.set_min_workers(job.worker.min_workers);
  options.set_optimizer(DescribeOptions(job.optimizer));
  options.set_state_numbers(StateNumbers(job.optimizer));
  if (!codec.name().empty()) *options.mutable_custom_codec() = codec;
  return LoadResumeState(from, {tensors, options, rank, job.workers});
}

absl::StatusOr<ResumeState> Load(Disk& disk, const JobOptionsForTest& job, uint32_t rank = 0) {
  return Load(ResumeFrom{.checkpoints = &disk}, job, rank);
}

// What ranks are told that resume from these and may not, all together.
std::string RefusalsOf(const JobOptionsForTest& job, const std::vector<ResumeFrom>& from) {
  Cluster cluster({});
  absl::Mutex mutex;
  std::string messages;
  OnEachRank(2, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = 2;
    const std::vector<float> before = replica.values;
    auto worker =
        Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect(), from[rank]);
    EXPECT_FALSE(worker.ok());
    EXPECT_EQ(replica.values, before) << "parameters are untouched";
    absl::MutexLock lock(&mutex);
    absl::StrAppend(&messages, std::string(worker.status().message()));
  });
  return messages;
}

// Of the one of step 6, whichever comes first.
auto OfDifferentSteps() {
  return ::testing::AnyOf(HasSubstr("option first_step is 6 here but 8 in the job"),
                          HasSubstr("its first_step was to be 6, and that of rank 1 is 8"));
}

std::vector<std::string> CheckpointsIn(Disk& disk) {
  std::vector<std::string> names;
  const auto entries = CheckpointDir(disk).List();
  EXPECT_TRUE(entries.ok()) << entries.status();
  for (const CheckpointEntry& entry : *entries) names.push_back(entry.name);
  return names;
}

// As if nothing had happened.

struct ResumeCase {
  std::string name;
  int saved_after;
  OptimizerOptions optimizer;
};

constexpr LambOptions kLamb;
// Steps 0, 1 and 3 update the variance; 5, 7 and 10 end intervals.
constexpr ZeroOneOptions kZeroOne = {
    .var_update_scaler = 1, .local_step_scaler = 1, .local_step_clipper = 3};

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
  RunAnew(2, {.job = job,
              .until = saved_after,
              .checkpoint_after = {saved_after},
              .checkpoints = &disk,
              .save_states = &states});
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
  RunAnew(2, {.job = gpu_job,
              .until = saved_after,
              .checkpoint_after = {saved_after},
              .checkpoints = &gpu_disk});
  EXPECT_EQ(RunAnew(2, {.job = gpu_job, .until = 12, .resume_from = &disk}), expected);
  EXPECT_EQ(RunAnew(2, {.job = gpu_job, .until = 12, .resume_from_states = &states}), expected);
  EXPECT_EQ(RunAnew(2, {.job = job, .until = 12, .resume_from = &gpu_disk}), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, ResumeTest,
    ::testing::Values(
        ResumeCase{"BeforeTheFirstStep", 0, {.freeze_step = 5}},
        ResumeCase{"InTheWarmUp", 2, {.freeze_step = 5}},
        ResumeCase{"AtTheFreeze", 5, {.freeze_step = 5, .warm_up_codec = BFLOAT16}},
        ResumeCase{"AfterTheFirstOneBitStep", 6, {.freeze_step = 5}},
        ResumeCase{"AmongOneBitSteps", 9, {.freeze_step = 5, .warm_up_codec = BFLOAT16}},
        ResumeCase{"AmongInt8Steps", 7, {.freeze_step = 5, .codec = INT8}},
        ResumeCase{"AmongInt4Steps", 9, {.freeze_step = 5, .warm_up_codec = INT8, .codec = INT4}},
        ResumeCase{"AmongBf16Steps", 8, {.freeze_step = 5, .codec = BFLOAT16}},
        ResumeCase{
            "AmongFp16Steps", 6, {.freeze_step = 5, .warm_up_codec = INT4, .codec = FLOAT16}},
        ResumeCase{
            "AmongFp32Steps", 8, {.freeze_step = 5, .warm_up_codec = ONE_BIT, .codec = FLOAT32}},
        ResumeCase{
            "BeforeARefreshOfTheVariance", 8, {.freeze_step = 5, .variance_refresh_interval = 3}},
        ResumeCase{
            "AfterARefreshOfTheVariance", 9, {.freeze_step = 5, .variance_refresh_interval = 3}},
        ResumeCase{"AfterARefreshThatMadeTheFirstErrors",
                   9,
                   {.freeze_step = 5,
                    .codec = FLOAT32,
                    .variance_codec = INT8,
                    .variance_refresh_interval = 3}},
        ResumeCase{"BeforeTheFreezeIsFound", 6, {.freeze_step = OptimizerOptions::kAuto}},
        ResumeCase{"AfterTheFreezeWasFound", 10, {.freeze_step = OptimizerOptions::kAuto}},
        ResumeCase{"OfAdam", 7, {}}, ResumeCase{"OfLamb", 7, {.lamb = kLamb}},
        ResumeCase{"OfLambInTheWarmUp", 3, {.freeze_step = 5, .lamb = kLamb}},
        ResumeCase{
            "OfLambAtTheFreeze", 5, {.freeze_step = 5, .warm_up_codec = BFLOAT16, .lamb = kLamb}},
        ResumeCase{"OfLambAmongOneBitSteps", 9, {.freeze_step = 5, .lamb = kLamb}},
        ResumeCase{"OfLambAmongFp32Steps", 6, {.freeze_step = 5, .codec = FLOAT32, .lamb = kLamb}},
        ResumeCase{
            "OfLambAmongInt4StepsAfterARefresh",
            9,
            {.freeze_step = 5, .codec = INT4, .variance_refresh_interval = 3, .lamb = kLamb}},
        ResumeCase{"OfZeroOneAdamBetweenUpdates", 4, {.freeze_step = 5, .zero_one = kZeroOne}},
        ResumeCase{"OfZeroOneAdamAtTheFreeze", 5, {.freeze_step = 5, .zero_one = kZeroOne}},
        ResumeCase{
            "OfZeroOneAdamAfterASynchronisation", 8, {.freeze_step = 5, .zero_one = kZeroOne}},
        ResumeCase{"OfZeroOneAdamAfterALocalStep", 9, {.freeze_step = 5, .zero_one = kZeroOne}},
        ResumeCase{"OfZeroOneAdamAfterTwoOfThem",
                   10,
                   {.freeze_step = 5, .codec = INT8, .zero_one = kZeroOne}},
        ResumeCase{"AsDeepSpeedAfterTheFirstStep", 1, AsDeepSpeed({.freeze_step = 5})},
        ResumeCase{"AsDeepSpeedAmongOneBitSteps", 8, AsDeepSpeed({.freeze_step = 5})},
        ResumeCase{"OfLambAsDeepSpeed", 7, AsDeepSpeed({.freeze_step = 5, .lamb = kLamb})},
        ResumeCase{"OfZeroOneAdamAsDeepSpeedAtTheFreeze", 5,
                   AsDeepSpeed({.freeze_step = 5, .zero_one = kZeroOne})},
        ResumeCase{"OfZeroOneAdamAsDeepSpeedAfterALocalStep", 10,
                   AsDeepSpeed({.freeze_step = 5, .zero_one = kZeroOne})}),
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
  RunAnew(2, {.job = job, .until = 8, .checkpoint_after = {8}, .checkpoints = &disk});
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
  RunAnew(2, {.job = job, .until = 8, .checkpoint_after = {8}, .checkpoints = &disk});
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
  EXPECT_THAT(std::string(Load(disk, job).status().message()),
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
  RunAnew(2, {.job = job,
              .until = 9,
              .checkpoint_after = {9},
              .checkpoints = &local,
              .save_states = &states});
  RunAnew(2, {.job = job, .until = 8, .checkpoint_after = {8}, .checkpoints = &synchronised});

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
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("other parameter groups"));
  }

  job.workers = 3;
  job.worker.resume_with_other_world_size = true;
  const absl::Status status = Load(local, job).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("between two synchronisations"));
  RunAnew(2, {.job = job, .until = 12, .resume_from = &synchronised});
}

// Faults.

// A job of one worker that has saved at step 7 and stands at step 8.
class InterruptedCheckpointTest : public ::testing::Test {
 protected:
  InterruptedCheckpointTest() : cluster_({.aggregators = 2}), replica_(job_, 0) {
    job_.worker.world_size = 1;
    auto worker =
        Worker::Join(job_.worker, job_.optimizer, replica_.Parameters(), cluster_.Connect());
    EXPECT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    for (int step = 0; step < 8; ++step) {
      // Two, so that the third has one to remove.
      if (step == 6 || step == 7) {
        EXPECT_TRUE(worker_->Checkpoint(saved_).ok());
      }
      replica_.gradient = GradientOf(0, step, replica_.values.size());
      EXPECT_TRUE(worker_->Step(replica_.Gradients(), {job_.rates}).ok());
    }
  }

  static JobOptionsForTest OneWorker() {
    JobOptionsForTest job;
    job.workers = 1;
    job.tensors = {37, 1, 40};
    return job;
  }

  JobOptionsForTest job_ = OneWorker();
  Cluster cluster_;
  Replica replica_;
  std::unique_ptr<Worker> worker_;
  MemoryDisk saved_;
};

TEST_F(InterruptedCheckpointTest, AtAnyByteOrOperationThePreviousOneLoadsAndTheNextIsTaken) {
  MemoryDisk whole(saved_);
  ASSERT_TRUE(worker_->Checkpoint(whole).ok());
  int previous = 0, newest = 0;
  for (uint64_t budget = 0; budget < whole.spent(); ++budget) {
    MemoryDisk disk(saved_);
    disk.DieAfter(budget);
    const absl::Status status = worker_->Checkpoint(disk);
    disk.Revive();
    const auto loaded = Load(disk, job_);
    ASSERT_TRUE(loaded.ok()) << "after " << budget << ": " << loaded.status();
    ASSERT_TRUE(loaded->warnings.empty()) << loaded->warnings[0];
    const uint64_t step = loaded->optimizer.schedule.begun_steps();
    ASSERT_TRUE(step == 7 || step == 8);
    if (status.ok()) {
      ASSERT_EQ(step, 8u) << "it was committed, after " << budget;
    }
    ++(step == 7 ? previous : newest);
    ASSERT_TRUE(worker_->Checkpoint(disk).ok()) << "after " << budget;
    ASSERT_EQ(Load(disk, job_)->optimizer.schedule.begun_steps(), 8u);
  }
  EXPECT_GT(previous, 1000);
  EXPECT_GT(newest, 5);
}

TEST_F(InterruptedCheckpointTest, AMachineThatLosesWhatWasNotSyncedLeavesTheOneBeforeOrThisOne) {
  int previous = 0, newest = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    for (uint64_t operations = 1; operations <= 40; ++operations) {
      simulation::Scheduler scheduler(1000 * seed + operations);
      simulation::SimDisk disk(scheduler);
      for (const auto& [name, contents] : saved_.Files()) {
        ASSERT_TRUE(Replace(disk, name, {contents}).ok());
        ASSERT_TRUE(disk.Sync(name).ok());
      }
      ASSERT_TRUE(disk.SyncDirectory().ok());
      disk.DieIn(operations);
      const absl::Status status = worker_->Checkpoint(disk);
      disk.Crash();
      const auto loaded = Load(disk, job_);
      ASSERT_TRUE(loaded.ok()) << "seed " << seed << ": " << loaded.status();
      ASSERT_TRUE(loaded->warnings.empty()) << "seed " << seed << ": " << loaded->warnings[0];
      const uint64_t step = loaded->optimizer.schedule.begun_steps();
      ASSERT_TRUE(step == 7 || step == 8) << "seed " << seed;
      if (status.ok()) {
        ASSERT_EQ(step, 8u) << "it was committed; seed " << seed;
      }
      ++(step == 7 ? previous : newest);
    }
  }
  EXPECT_GT(previous, 100);
  EXPECT_GT(newest, 100);
}

TEST_F(InterruptedCheckpointTest, AnyFlippedBitIsNoticedAndTheOneBeforeIsUsed) {
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  const std::string newest = CheckpointsIn(saved_)[0];
  int flipped = 0;
  for (const auto& [name, contents] : saved_.Files()) {
    if (name.substr(0, newest.size()) != newest) continue;
    for (size_t byte = 0; byte < contents.size(); ++byte, ++flipped) {
      MemoryDisk disk(saved_);
      disk.FlipBit(name, byte, byte % 8);
      const auto loaded = Load(disk, job_);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ASSERT_EQ(loaded->optimizer.schedule.begun_steps(), 7u) << name << ", byte " << byte;
      ASSERT_EQ(loaded->warnings.size(), 1u);
      ASSERT_THAT(loaded->warnings[0], HasSubstr(newest));
      ASSERT_THAT(loaded->warnings[0], HasSubstr(name.substr(newest.size() + 1) + " is damaged"));
    }
  }
  EXPECT_GT(flipped, 1000);
}

TEST_F(InterruptedCheckpointTest, WhatIsDamagedDoesNotCountAsOneOfTheTwoThatAreKept) {
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  const std::vector<std::string> before = CheckpointsIn(saved_);
  saved_.FlipBit(absl::StrCat(before[0], "/parameters"), 100, 3);
  EXPECT_TRUE(worker_->Leave().ok());
  JobOptionsForTest job = job_;
  RunAnew(1, {.job = job,
              .until = 9,
              .checkpoint_after = {9},
              .checkpoints = &saved_,
              .resume_from = &saved_,
              .after_join = [&](uint32_t rank, Worker& worker) {
                EXPECT_EQ(worker.resumed().checkpoint, before[1]);
                EXPECT_EQ(worker.resumed().warnings.size(), 1u);
              }});
  EXPECT_THAT(CheckpointsIn(saved_), ElementsAre(HasSubstr("step-000000000009"), before[1]));
}

TEST_F(InterruptedCheckpointTest, AMissingFileIsDamageAndAllDamagedAreNamed) {
  const std::vector<std::string> names = CheckpointsIn(saved_);
  ASSERT_TRUE(saved_.Remove(absl::StrCat(names[0], "/rank-0")).ok());
  EXPECT_EQ(Load(saved_, job_)->optimizer.schedule.begun_steps(), 6u);
  ASSERT_TRUE(saved_.Remove(absl::StrCat(names[1], "/parameters")).ok());
  const absl::Status status = Load(saved_, job_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  for (const std::string& name : names) EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  MemoryDisk empty;
  EXPECT_TRUE(absl::IsNotFound(Load(empty, job_).status()));
  EXPECT_TRUE(absl::IsNotFound(NewestCheckpointStep(empty).status()));
}

TEST_F(InterruptedCheckpointTest, ADiskThatCannotBeReadForTheMomentDamagesNothing) {
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  uint64_t operations = 0;
  absl::StatusOr<ResumeState> loaded;
  do {
    saved_.DieAfter(operations++);
    loaded = Load(saved_, job_);
    saved_.Revive();
    EXPECT_TRUE(loaded.ok() || absl::IsUnavailable(loaded.status())) << loaded.status();
  } while (!loaded.ok() && operations < 100);
  EXPECT_GT(operations, 5);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->optimizer.schedule.begun_steps(), 8u);
  EXPECT_THAT(loaded->warnings, SizeIs(0));
}

TEST_F(InterruptedCheckpointTest, AMissingManifestIsTold) {
  const std::vector<std::string> names = CheckpointsIn(saved_);
  ASSERT_TRUE(saved_.Remove(absl::StrCat(names[0], "/manifest")).ok());
  const auto loaded = Load(saved_, job_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->optimizer.schedule.begun_steps(), 6u);
  EXPECT_THAT(loaded->warnings, ElementsAre(absl::StrCat("checkpoint ", names[0],
                                                         ": manifest is damaged: it is gone")));
  EXPECT_EQ(*NewestCheckpointStep(saved_), 6u);
  ASSERT_TRUE(saved_.Remove(absl::StrCat(names[1], "/manifest")).ok());
  EXPECT_TRUE(absl::IsDataLoss(Load(saved_, job_).status())) << "it does not begin anew";
  EXPECT_TRUE(absl::IsDataLoss(NewestCheckpointStep(saved_).status()));
}

TEST_F(InterruptedCheckpointTest, ADirectoryOfAnotherStepIsDamaged) {
  const std::string name = CheckpointsIn(saved_)[1];
  std::string other = name;
  other[other.find('6')] = '9';
  for (const auto& [file, contents] : MemoryDisk(saved_).Files()) {
    if (file.substr(0, name.size()) != name) continue;
    ASSERT_TRUE(Replace(saved_, other + file.substr(name.size()), {contents}).ok());
  }
  const auto loaded = Load(saved_, job_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->optimizer.schedule.begun_steps(), 7u);
  ASSERT_THAT(loaded->warnings, SizeIs(1));
  EXPECT_THAT(loaded->warnings[0], HasSubstr(other + ": manifest is damaged: it is of step 6"));
}

// So that a disk needs room for three checkpoints, and no more.
TEST_F(InterruptedCheckpointTest, WhatRunsThatDiedHaveLeftGoesBeforeTheNextIsWritten) {
  ASSERT_TRUE(Replace(saved_, "step-000000000008-0123456789abcdef/parameters.tmp", {"torn"}).ok());
  bool was_there = false;
  saved_.OnWrite([&](const std::string&) {
    for (const auto& [name, contents] : saved_.Files()) {
      was_there |= name.find("0123456789abcdef") != std::string::npos;
    }
  });
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  EXPECT_FALSE(was_there);
}

TEST_F(InterruptedCheckpointTest, WhatAnEarlierAttemptHasLeftIsNoPartOfALaterOneAndGoes) {
  for (const char* name : {"step-000000000008-0123456789abcdef/rank-0",
                           "step-000000000008-0123456789abcdef/rank-0.sum",
                           "step-000000000005-0123456789abcdef/parameters.tmp"}) {
    ASSERT_TRUE(Replace(saved_, name, {"torn"}).ok());
  }
  ASSERT_TRUE(Replace(saved_, "notes.txt", {"somebody's"}).ok());
  ASSERT_TRUE(Replace(saved_, "step-000000000900-0123456789abcdef/rank-0", {"not ours yet"}).ok());
  EXPECT_EQ(Load(saved_, job_)->optimizer.schedule.begun_steps(), 7u);
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  EXPECT_EQ(Load(saved_, job_)->optimizer.schedule.begun_steps(), 8u);
  EXPECT_EQ(saved_.Files().size(), 2 * 3u + 2) << "two checkpoints, and what is not ours";
}

TEST_F(InterruptedCheckpointTest, ItIsTakenOncePerStep) {
  MemoryDisk disk;
  ASSERT_TRUE(worker_->Checkpoint(disk).ok());
  const auto files = disk.Files();
  ASSERT_TRUE(worker_->Checkpoint(disk).ok());
  EXPECT_EQ(disk.Files(), files);

  replica_.values[0] += 1;  // as a mean over steps, which would be lost
  const absl::Status status = worker_->Checkpoint(disk);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step 8 is saved already, with other parameters than there are now"));
  EXPECT_EQ(disk.Files(), files);
}

TEST_F(InterruptedCheckpointTest, ResumingWithAnotherOptionOrTensorNamesIt) {
  JobOptionsForTest job = job_;
  job.optimizer.variance_floor = 0.1;
  EXPECT_THAT(std::string(Load(saved_, job).status().message()), HasSubstr("option optimizer is"));
  job = job_;
  job.optimizer.codec = INT8;
  job.optimizer.variance_codec = BFLOAT16;
  EXPECT_THAT(std::string(Load(saved_, job).status().message()),
              HasSubstr("is 'codec=int8 variance_codec=bf16' here but 'codec=onebit "
                        "variance_codec=fp32' in the job"));
  job = job_;
  job.worker.gamma = 1.2f;
  EXPECT_THAT(std::string(Load(saved_, job).status().message()), HasSubstr("option gamma is 1.2"));
  job = job_;
  job.tensors[1] = 2;
  const absl::Status status = Load(saved_, job).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor 1 is 'tensor1' [2] here"));
}

TEST(RankState, AnyFlippedBitAndAnyMissingByteIsNoticed) {
  JobOptionsForTest job;
  job.workers = 1;
  job.tensors = {37, 1, 40};
  std::vector<std::string> states(1);
  RunAnew(1, {.job = job, .until = 7, .save_states = &states});
  ASSERT_TRUE(Load({.state = states[0]}, job, 0).ok());
  for (size_t byte = 0; byte < states[0].size(); ++byte) {
    std::string state = states[0];
    state[byte] ^= static_cast<char>(1 << (byte % 8));
    ASSERT_TRUE(absl::IsDataLoss(Load({.state = state}, job, 0).status())) << byte;
    state = states[0].substr(0, byte);
    ASSERT_TRUE(absl::IsDataLoss(Load({.state = state}, job, 0).status())) << byte;
  }
  EXPECT_TRUE(absl::IsDataLoss(Load({.state = states[0] + "x"}, job, 0).status()));
}

TEST(RankState, OfAnotherRankOrWorldOrModelIsRefusedByName) {
  JobOptionsForTest job;
  job.workers = 2;
  std::vector<std::string> states(2);
  RunAnew(1, {.job = job, .until = 7, .save_states = &states});
  const auto refusal = [&](const JobOptionsForTest& other, uint32_t rank) {
    const absl::Status status = Load({.state = states[0]}, other, rank).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
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
  JobOptionsForTest job;
  job.workers = 1;
  UseExampleCodec(job.worker);
  job.optimizer.codec = CUSTOM;
  MemoryDisk disk;
  std::vector<std::string> states(1);
  RunAnew(1, {.job = job,
              .until = 7,
              .checkpoint_after = {7},
              .checkpoints = &disk,
              .save_states = &states});
  const CustomCodec codec =
      OpenCodec("topk", job.worker.codec_options, job.worker.block_elements)->description;
  CustomCodec changed = codec;
  changed.set_digest(codec.digest() + 1);
  for (const ResumeFrom& from :
       {ResumeFrom{.checkpoints = &disk}, ResumeFrom{.state = states[0]}}) {
    EXPECT_EQ(Load(from, job, 0, codec).status(), absl::OkStatus());
    const absl::Status refusal = Load(from, job, 0, changed).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refusal)) << refusal;
    EXPECT_THAT(std::string(refusal.message()),
                HasSubstr(absl::StrFormat("is %08x here but %08x in the job", changed.digest(),
                                          codec.digest())));
  }
}

TEST(RankState, StatesOfDifferentStepsAreRefused) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.join_timeout = absl::Seconds(1);
  std::vector<std::string> early(2), late(2);
  RunAnew(1, {.job = job, .until = 6, .save_states = &early});
  RunAnew(1, {.job = job, .until = 8, .save_states = &late});
  EXPECT_THAT(RefusalsOf(job, {{.state = early[0]}, {.state = late[1]}}), OfDifferentSteps());
}

TEST(Checkpoint, ARankThatNeverComesIsNamedOnAllOthersSoonEnoughForItsNextStep) {
  JobOptionsForTest job;
  job.workers = 3;
  job.worker.exchange_timeout = absl::Seconds(6);
  Cluster cluster({});
  MemoryDisk disk;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank != 2) {
      const absl::Status status = (*worker)->Checkpoint(disk);
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("lacks the part of rank 2, which has gone on to the next step"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("one that all workers see"));
    }
    const absl::Status step = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    EXPECT_TRUE(step.ok()) << step;
  });
  EXPECT_TRUE(CheckpointsIn(disk).empty());
}

TEST(Checkpoint, ARankThatComesLateIsWaitedForAsLongAsInAStep) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = absl::Seconds(8);
  Cluster cluster({});
  MemoryDisk disk;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) absl::SleepFor(absl::Milliseconds(4500));  // as one that validates
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

// Through which a rank hears something else about the job.
class StatusChannel final : public ForwardingChannel {
 public:
  using Change = std::function<void(JobStatus& status)>;
  StatusChannel(std::unique_ptr<Channel> inner, Change change)
      : ForwardingChannel(std::move(inner)), change_(std::move(change)) {}

  absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                        absl::Time deadline) override {
    absl::StatusOr<StatusResponse> response = ForwardingChannel::Status(request, deadline);
    if (response.ok() && response->jobs_size() == 1) change_(*response->mutable_jobs(0));
    return response;
  }

 private:
  const Change change_;
};

// As when an aggregator was started again; and where the rank that is missing is absent.
TEST(Checkpoint, OnlyWhoHasGoneOnToTheNextStepHasGoneOn) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = absl::Seconds(8);
  Cluster cluster({});
  MemoryDisk disk;
  int looks = 0;
  absl::Notification have_been_seen;
  const auto change = [&](JobStatus& status) {
    status.clear_waiting_for_ranks();
    status.add_waiting_for_ranks(0);
    status.set_step(looks % 2);
    if (status.step() == 1) status.add_absent_ranks(1);
    if (++looks == 2) have_been_seen.Notify();
  };
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::vector<std::unique_ptr<Channel>> channels = cluster.Connect();
    if (rank == 0) channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), change);
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    const absl::Status step = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    ASSERT_TRUE(step.ok()) << step;
    if (rank == 1) have_been_seen.WaitForNotificationWithTimeout(absl::Seconds(30));
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

JobOptionsForTest ElasticPair() {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.min_workers = 1;
  job.worker.round_deadline = absl::Milliseconds(200);
  job.worker.exchange_timeout = absl::Minutes(10);
  return job;
}

TEST(Checkpoint, DoesNotWaitForARankThatComesBack) {
  const JobOptionsForTest job = ElasticPair();
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification is_over;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::vector<std::unique_ptr<Channel>> channels = cluster.Connect();
    if (rank == 0) {
      channels[0] = std::make_unique<StatusChannel>(
          std::move(channels[0]), [](JobStatus& status) { status.add_returning_ranks(1); });
    }
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) return is_over.WaitForNotification();
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("part of rank 1, which comes back"));
    is_over.Notify();
  });
}

TEST(Checkpoint, WaitsForARankThatLosesItsConnectionWhileItValidates) {
  const JobOptionsForTest job = ElasticPair();
  const auto server = *Server::Start({});
  cli::Proxy proxy(server->port());
  MemoryDisk disk;
  absl::Mutex mutex;
  bool may_come = false;
  // Rank 1 comes once it is known again that it lives, or rank 0 waits no more.
  const auto let_rank_1_come = [&](bool may) {
    const absl::MutexLock lock(&mutex);
    may_come = may_come || may;
  };
  const auto change = [&](const JobStatus& status) {
    let_rank_1_come(proxy.connections() > 1 && status.disconnected_ranks().empty());
  };
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    const std::string direct = absl::StrCat("127.0.0.1:", server->port());
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(ConnectToAggregator(rank == 0 ? direct : proxy.target(), FailureTimeout()));
    if (rank == 0) channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), change);
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    const absl::Status step = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    ASSERT_TRUE(step.ok()) << step;
    if (rank == 1) {
      proxy.Reset();
      const absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&may_come));
    }
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
    let_rank_1_come(true);
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

// As where the network is slow, or an aggregator was started again.
TEST(Checkpoint, DoesNotTakeARankForEndedThatHasNoConnectionInSomeLooks) {
  const JobOptionsForTest job = ElasticPair();
  Cluster cluster({});
  MemoryDisk disk;
  int looks = 0;
  absl::Notification have_been_seen;
  const auto change = [&](JobStatus& status) {
    if (++looks % 4 != 0) status.add_disconnected_ranks(1);
    if (looks == 8) have_been_seen.Notify();
  };
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    std::vector<std::unique_ptr<Channel>> channels = cluster.Connect();
    if (rank == 0) channels[0] = std::make_unique<StatusChannel>(std::move(channels[0]), change);
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) have_been_seen.WaitForNotificationWithTimeout(absl::Seconds(30));
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(status.ok()) << status;
  });
  EXPECT_EQ(CheckpointsIn(disk).size(), 1);
}

TEST(Checkpoint, ARankThatComesTooLateIsToldAtOnce) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = absl::Seconds(4);
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification is_given_up;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    if (rank == 1) options.exchange_timeout = absl::Minutes(2);
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) is_given_up.WaitForNotification();
    const absl::Status status = (*worker)->Checkpoint(disk);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("lacks the part of rank 1"));
    if (rank == 0) is_given_up.Notify();
  });
  EXPECT_TRUE(CheckpointsIn(disk).empty());
}

TEST(Checkpoint, WhatKeepsARankFromSavingIsToldOnAllAtOnceAndTrainingGoesOn) {
  JobOptionsForTest job;
  job.workers = 3;
  job.worker.exchange_timeout = absl::Minutes(5);
  for (const auto& [file, culprit] : {std::pair("rank-1.tmp", 1u),
                                      {"rank-2.sum.tmp", 2u},
                                      {"parameters.tmp", 0u},
                                      {"manifest.tmp", 0u}}) {
    SCOPED_TRACE(file);
    Cluster cluster({});
    MemoryDisk disk;
    disk.FillUpFor(file);
    absl::Notification others_try_again;
    disk.OnWrite([&, parts = 0](const std::string& name) mutable {
      if (absl::EndsWith(name, "rank-0.tmp") && ++parts == 2) others_try_again.Notify();
    });
    absl::Barrier* const all_failed = new absl::Barrier(static_cast<int>(job.workers));
    OnEachRank(job.workers, [&, culprit = culprit](uint32_t rank) {
      Replica replica(job, rank);
      WorkerOptions options = job.worker;
      options.rank = rank;
      options.world_size = job.workers;
      auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
      ASSERT_TRUE(worker.ok()) << worker.status();
      const absl::Status status = (*worker)->Checkpoint(disk);
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("cannot write"));
      if (rank != culprit) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(absl::StrCat("rank ", culprit, " could not save step")));
      }
      // Once there is room what was told of the call before counts no more.
      if (all_failed->Block()) delete all_failed;
      disk.FillUpFor("");
      if (rank == 1) others_try_again.WaitForNotification();
      const absl::Status again = (*worker)->Checkpoint(disk);
      EXPECT_TRUE(again.ok()) << again;
      EXPECT_TRUE((*worker)->Step(replica.Gradients(), {job.rates}).ok());
    });
    EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
    for (const auto& [name, contents] : disk.Files()) {
      EXPECT_FALSE(absl::EndsWith(name, ".failed")) << name;
    }
  }
}

// A disk would be full of them before long.
TEST(Checkpoint, InDirectoriesThatNotAllSeeTheLeftoversOfTheOneBeforeGoOnAllRanks) {
  JobOptionsForTest job;
  job.workers = 3;
  job.worker.exchange_timeout = absl::Seconds(4);
  Cluster cluster({});
  MemoryDisk disk_of_0, disk_of_others;
  ASSERT_TRUE(Replace(disk_of_others, "step-000000000000-0123456789abcdef/rank-1", {"torn"}).ok());
  ASSERT_TRUE(Replace(disk_of_others, "step-000000000000-0123456789abcdef/rank-11", {"its"}).ok());
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = job.worker;
    options.rank = rank;
    options.world_size = job.workers;
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = (*worker)->Checkpoint(rank == 0 ? disk_of_0 : disk_of_others);
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      const absl::Status step = (*worker)->Step(replica.Gradients(), {job.rates}).status();
      ASSERT_TRUE(step.ok()) << step;
    }
  });
  const auto names_in = [](const MemoryDisk& disk) {
    std::vector<std::string> names;
    for (const auto& [name, contents] : disk.Files()) names.push_back(name);
    return names;
  };
  EXPECT_THAT(names_in(disk_of_0),
              ElementsAre(HasSubstr("step-000000000001"), HasSubstr("step-000000000001"),
                          EndsWith("/rank-0.failed"), HasSubstr("step-000000000001")));
  EXPECT_THAT(names_in(disk_of_others),
              ElementsAre(EndsWith("/rank-11"), EndsWith("/rank-1"), EndsWith("/rank-1.sum"),
                          EndsWith("/rank-2"), EndsWith("/rank-2.sum")));
}

// Who writes into parameters on some ranks only has two models from then on.
TEST(Checkpoint, RanksWithOtherParametersAreNamedOnAllAndNothingIsSaved) {
  JobOptionsForTest job;
  job.workers = 3;
  for (const bool is_local : {false, true}) {
    job.optimizer = {.freeze_step = 2};
    if (is_local) job.optimizer.zero_one = {.local_step_scaler = 1, .local_step_clipper = 4};
    Cluster cluster({});
    MemoryDisk disk;
    OnEachRank(job.workers, [&](uint32_t rank) {
      Replica replica(job, rank);
      WorkerOptions options = job.worker;
      options.rank = rank;
      options.world_size = job.workers;
      auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
      ASSERT_TRUE(worker.ok()) << worker.status();
      while ((*worker)->steps() < 3 || (*worker)->is_synchronised() == is_local) {
        replica.gradient = GradientOf(rank, (*worker)->steps(), replica.values.size());
        ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job.rates}).ok());
      }
      if (rank == 1) replica.values[5] += 1;
      const absl::Status status = (*worker)->Checkpoint(disk);
      if (is_local) {
        EXPECT_TRUE(status.ok()) << "its values are its own between synchronisations: " << status;
        return;
      }
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("the parameters of rank 1 are not those of rank 0"));
    });
    EXPECT_EQ(CheckpointsIn(disk).empty(), !is_local);
  }
}

TEST(Checkpoint, ThatRank0StillWritesTheParametersIsWhatOthersSay) {
  JobOptionsForTest job;
  job.workers = 2;
  Cluster cluster({});
  MemoryDisk disk;
  absl::Notification given_up;
  disk.OnWrite([&](const std::string& name) {
    if (absl::StrContains(name, "parameters")) given_up.WaitForNotification();
  });
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = replica.Options();
    if (rank == 1) options.exchange_timeout = absl::Seconds(4);
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    const absl::Status status = (*worker)->Checkpoint(disk);
    if (rank == 0) {
      EXPECT_TRUE(status.ok()) << status;
      return;
    }
    given_up.Notify();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("step 0 is not committed after 4s"));
  });
  EXPECT_THAT(CheckpointsIn(disk), SizeIs(1));
}

// Writes down until when a worker is ready to wait for its Leave.
class LeaveNotingChannel final : public ForwardingChannel {
 public:
  LeaveNotingChannel(std::unique_ptr<Channel> inner, absl::Time& deadline)
      : ForwardingChannel(std::move(inner)), deadline_(deadline) {}

  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    deadline_ = deadline;
    return ForwardingChannel::Leave(request, deadline);
  }

 private:
  absl::Time& deadline_;
};

TEST(Checkpoint, AWorkerThatIsInterruptedInOneLeavesInAHurry) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = absl::Minutes(10);
  Cluster cluster({});
  MemoryDisk disk;
  const absl::Time start = SteadyNow();
  absl::Time deadline;
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = replica.Options();
    if (rank == 0) options.is_interrupted = [] { return true; };
    std::vector<std::unique_ptr<Channel>> channels = cluster.Connect();
    if (rank == 0) {
      channels[0] = std::make_unique<LeaveNotingChannel>(std::move(channels[0]), deadline);
    }
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) return;  // it does not save
    EXPECT_TRUE(absl::IsCancelled((*worker)->Checkpoint(disk)));
    EXPECT_TRUE((*worker)->Leave().ok());
    EXPECT_GT(deadline, start);
    EXPECT_LT(deadline, SteadyNow() + absl::Minutes(1));
  });
}

TEST(Checkpoint, AWorkerThatIsInterruptedBeforeItResumesHasItsValuesStill) {
  const JobOptionsForTest job;
  MemoryDisk disk;
  RunAnew(1, {.job = job, .until = 6, .checkpoint_after = {6}, .checkpoints = &disk});
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

// Frames that go nowhere until their process dies.
class LostFrames {
 public:
  void Add(Channel::ExchangeDone done) {
    absl::MutexLock lock(&mutex_);
    if (is_dead_) return done(absl::UnknownError("dead"));
    waiting_.push_back(std::move(done));
  }
  void Die() {
    absl::MutexLock lock(&mutex_);
    is_dead_ = true;
    for (Channel::ExchangeDone& done : waiting_) done(absl::UnknownError("dead"));
  }

 private:
  absl::Mutex mutex_;
  bool is_dead_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Channel::ExchangeDone> waiting_ ABSL_GUARDED_BY(mutex_);
};

// Of a process that dies, and so does not leave.
class DyingChannel final : public ForwardingChannel {
 public:
  DyingChannel(std::unique_ptr<Channel> inner, LostFrames* lost)
      : ForwardingChannel(std::move(inner)), lost_(lost) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    if (lost_ != nullptr) return lost_->Add(std::move(done));
    ForwardingChannel::Exchange(header, std::move(payload), deadline, std::move(done));
  }
  absl::Status Leave(const LeaveRequest&, absl::Time) override {
    return absl::UnknownError("dead");
  }

 private:
  LostFrames* const lost_;  // null: none are
};

// It dies when the first shard has all errors back, and the second waits for it.
TEST(Checkpoint, WhoseErrorsGoBackWhileARankIsStartedAnewIsToBeResumedAgain) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.exchange_timeout = absl::Minutes(5);
  MemoryDisk disk;
  RunAnew(1, {.job = job, .until = 6, .checkpoint_after = {6}, .checkpoints = &disk});
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const auto resume = [&](uint32_t rank, std::vector<std::unique_ptr<Channel>> channels) {
    Replica replica(job, rank);
    return Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), std::move(channels),
                        {.checkpoints = &disk})
        .status();
  };
  LostFrames lost;
  std::thread death([&] {
    const auto channels = cluster.Connect();
    JobStatus status;
    while (status.chunks() == 0 || status.rounds_closed() < status.chunks()) {
      const auto response = channels[0]->Status({}, SteadyNow() + absl::Seconds(30));
      ASSERT_TRUE(response.ok()) << response.status();
      if (response->jobs_size() > 0) status = response->jobs(0);
    }
    lost.Die();
  });
  OnEachRank(job.workers, [&](uint32_t rank) {
    std::vector<std::unique_ptr<Channel>> channels = cluster.Connect();
    for (uint32_t shard = 0; shard < channels.size() && rank == 1; ++shard) {
      channels[shard] =
          std::make_unique<DyingChannel>(std::move(channels[shard]), shard == 1 ? &lost : nullptr);
    }
    absl::Status status = resume(rank, std::move(channels));
    if (rank == 0) {
      EXPECT_TRUE(IsTryAgain(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("is over"));
    }
    // As whoever starts it again, also while the aggregator takes the one before to be there.
    do {
      status = resume(rank, cluster.Connect());
    } while (absl::IsAlreadyExists(status) || IsTryAgain(status));
    EXPECT_TRUE(status.ok()) << status;
  });
  death.join();
}

TEST(Checkpoint, RanksThatResumeFromDifferentOnesAreRefused) {
  JobOptionsForTest job;
  job.workers = 2;
  job.worker.join_timeout = absl::Seconds(1);
  MemoryDisk early, late;
  RunAnew(1, {.job = job, .until = 6, .checkpoint_after = {6}, .checkpoints = &early});
  RunAnew(1, {.job = job, .until = 8, .checkpoint_after = {8}, .checkpoints = &late});
  EXPECT_THAT(RefusalsOf(job, {{.checkpoints = &early}, {.checkpoints = &late}}),
              OfDifferentSteps());
}

// Two optimizers of a program, say, which were given the same directory.
TEST(Checkpoint, OfAnotherModelIsNotReplaced) {
  JobOptionsForTest job;
  MemoryDisk disk;
  RunAnew(1, {.job = job, .until = 6, .checkpoint_after = {6}, .checkpoints = &disk});
  const std::map<std::string, std::string> before = disk.Files();
  job.tensors[1] = 9;
  RunAnew(1, {.job = job, .until = 1, .after_join = [&](uint32_t rank, Worker& worker) {
                const absl::Status status = worker.Checkpoint(disk);
                EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
                EXPECT_THAT(
                    std::string(status.message()),
                    ::testing::ContainsRegex("is of another job: tensor 1 is .*9. here but"));
              }});
  EXPECT_EQ(disk.Files(), before);
}

class EpochEndingChannel final : public ForwardingChannel {
 public:
  EpochEndingChannel(std::unique_ptr<Channel> inner, const bool& is_over)
      : ForwardingChannel(std::move(inner)), is_over_(is_over) {}

  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override {
    if (is_over_) return TryAgain(absl::FailedPreconditionError("its epoch is over"));
    return ForwardingChannel::ReadError(request, deadline);
  }

 private:
  const bool& is_over_;
};

// Two runs of the same model that save in one directory: one takes it over, and whoever finds that
// it has been taken stops.
class SharedDirectoryTest : public ::testing::Test {
 protected:
  struct Run {
    Cluster cluster = Cluster({});
    bool is_over = false;
    JobOptionsForTest job;
    std::unique_ptr<Replica> replica;
    std::unique_ptr<Worker> worker;
  };

  Run& Begin(const std::string& name, const ResumeFrom& from = {}) {
    Run& run = runs_.emplace_back();
    run.job.worker.job = name;
    run.job.workers = run.job.worker.world_size = 1;
    run.replica = std::make_unique<Replica>(run.job, 0);
    std::vector<std::unique_ptr<Channel>> channels = run.cluster.Connect();
    channels[0] = std::make_unique<EpochEndingChannel>(std::move(channels[0]), run.is_over);
    auto worker = Worker::Join(run.job.worker, run.job.optimizer, run.replica->Parameters(),
                               std::move(channels), from);
    EXPECT_TRUE(worker.ok()) << worker.status();
    run.worker = *std::move(worker);
    return run;
  }

  absl::Status StepAndSave(Run& run) {
    std::vector<float>& gradient = run.replica->gradient;
    gradient = GradientOf(0, static_cast<int>(run.worker->steps()), run.replica->values.size());
    EXPECT_TRUE(run.worker->Step(run.replica->Gradients(), {run.job.rates}).ok());
    return run.worker->Checkpoint(disk_);
  }

  MemoryDisk disk_;
  std::list<Run> runs_;
};

TEST_F(SharedDirectoryTest, WhoeverHasSavedThereIsToldOfTheOtherRunByName) {
  Run& first = Begin("lr-1");
  Run& second = Begin("lr-2");
  EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  EXPECT_EQ(StepAndSave(second), absl::OkStatus()) << "the first may have ended";
  const std::map<std::string, std::string> before = disk_.Files();
  const absl::Status status = StepAndSave(first);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_FALSE(IsTryAgain(status));
  EXPECT_THAT(std::string(status.message()),
              ::testing::ContainsRegex("checkpoint step-000000000001-.*, of job 'lr-2', has come "
                                       "after this run's: another run saves here"));
  EXPECT_EQ(disk_.Files(), before);
  EXPECT_EQ(StepAndSave(second), absl::OkStatus());
}

// The slower one's are gone when it comes, and the faster one's are not.
TEST_F(SharedDirectoryTest, OfOneThatSavesMoreOftenTheOtherIsNoticedByIt) {
  Run& slow = Begin("slow");
  Run& fast = Begin("fast");
  EXPECT_EQ(StepAndSave(slow), absl::OkStatus());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(fast), absl::OkStatus());
  EXPECT_EQ(StepAndSave(slow), absl::OkStatus());
  EXPECT_THAT(std::string(StepAndSave(fast).message()), HasSubstr("of job 'slow', has come after"));
}

// One whose processes have been replaced is told what it would be told without the directory.
TEST_F(SharedDirectoryTest, ThatItsEpochIsOverComesFirst) {
  Run& first = Begin("a");
  EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  EXPECT_EQ(StepAndSave(Begin("a")), absl::OkStatus());
  first.is_over = true;
  const absl::Status status = StepAndSave(first);
  EXPECT_TRUE(IsTryAgain(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("its epoch is over"));
}

TEST_F(SharedDirectoryTest, RunsThatComeOneAfterTheOtherAreNotInEachOthersWay) {
  Run& first = Begin("a");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(first), absl::OkStatus());
  for (const ResumeFrom& from : {ResumeFrom{.checkpoints = &disk_}, ResumeFrom()}) {
    Run& next = Begin("a", from);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(StepAndSave(next), absl::OkStatus());
  }
}

// Whose rounds begin alike, with the same values.
TEST(Checkpoint, RanksThatResumeFromDifferentLocalStepsAreRefused) {
  JobOptionsForTest job;
  job.optimizer.zero_one = kZeroOne;
  job.workers = 2;
  job.worker.join_timeout = absl::Seconds(1);
  MemoryDisk early, late;
  RunAnew(1, {.job = job, .until = 9, .checkpoint_after = {9}, .checkpoints = &early});
  RunAnew(1, {.job = job, .until = 10, .checkpoint_after = {10}, .checkpoints = &late});
  EXPECT_THAT(RefusalsOf(job, {{.checkpoints = &early}, {.checkpoints = &late}}),
              ::testing::AnyOf(HasSubstr("option local_steps is 1 here but 2 in the job"),
                               HasSubstr("with local_steps 1, and that of rank 1 is")));
}

// Aggregators that die at the wrong moment, over a real network and on a real disk.
class CheckpointRecoveryTest : public ::testing::Test {
 protected:
  CheckpointRecoveryTest()
      : state_dir_(absl::StrCat(::testing::TempDir(), "/state")),
        checkpoint_dir_(absl::StrCat(::testing::TempDir(), "/checkpoints")) {
    std::filesystem::remove_all(state_dir_);
    std::filesystem::remove_all(checkpoint_dir_);
    EXPECT_TRUE(MakeDirectory(checkpoint_dir_).ok());
    disk_ = OpenDirectory(checkpoint_dir_);
    job_.optimizer.warm_up_codec = BFLOAT16;
    expected_ = RunAnew(2, {.job = job_, .until = 12});
  }

  ClusterOptions WithState() const {
    return {.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir_};
  }

  const std::string state_dir_, checkpoint_dir_;
  JobOptionsForTest job_;
  std::unique_ptr<Disk> disk_;
  std::vector<End> expected_;
};

TEST_F(CheckpointRecoveryTest, AggregatorsKilledWhileACheckpointIsTakenChangeNothing) {
  {
    Cluster cluster(WithState());
    const auto ends = RunIn(cluster, {.job = job_,
                                      .until = 12,
                                      .checkpoint_after = {3, 9},
                                      .checkpoints = disk_.get(),
                                      .before_checkpoint = [&](uint32_t rank) {
                                        // The others are in it, and cannot end it without this one.
                                        if (rank != 1) return;
                                        cluster.Kill(0);
                                        cluster.Kill(1);
                                      }});
    EXPECT_EQ(ends, expected_);
  }
  EXPECT_EQ(RunAnew(3, {.job = job_, .until = 12, .resume_from = disk_.get()}), expected_);
}

// From then on answers are other numbers than the aggregator's.
class FalsifyingChannel final : public ForwardingChannel {
 public:
  FalsifyingChannel(std::unique_ptr<Channel> inner, const std::atomic<bool>& falsifies)
      : ForwardingChannel(std::move(inner)), falsifies_(falsifies) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    ForwardingChannel::Exchange(
        header, std::move(payload), deadline,
        [this, done = std::move(done)](absl::StatusOr<Answer> answer) mutable {
          if (falsifies_ && answer.ok() && answer->payload.size() > 0) {
            answer->payload.data()[0] ^= 1;
            answer->header.set_payload_crc32c(Crc32c(answer->payload.span()));
          }
          done(std::move(answer));
        });
  }

 private:
  const std::atomic<bool>& falsifies_;
};

// A rank that waits for the others offers its frames, and so finds it out.
TEST_F(CheckpointRecoveryTest, NoStepFollowsWhenAnAggregatorHasComeToAnotherResult) {
  job_.workers = 2;
  Cluster cluster(WithState());
  std::atomic<bool> falsifies = false;
  absl::Notification done;
  OnEachRank(job_.workers, [&](uint32_t rank) {
    Replica replica(job_, rank);
    std::vector<std::unique_ptr<Channel>> channels;
    for (std::unique_ptr<Channel>& channel : cluster.Connect()) {
      channels.push_back(std::make_unique<FalsifyingChannel>(std::move(channel), falsifies));
    }
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = job_.workers;
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE((*worker)->Step(replica.Gradients(), {job_.rates}).ok());
    if (rank == 0) return done.WaitForNotification();
    falsifies = true;
    const absl::Status status = (*worker)->Checkpoint(*disk_);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    const absl::Status step = (*worker)->Step(replica.Gradients(), {job_.rates}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(step)) << step;
    EXPECT_THAT(std::string(step.message()), HasSubstr("comes to another result than before"));
    done.Notify();
  });
}

TEST_F(CheckpointRecoveryTest, AggregatorsKilledAroundTheRestoringRoundChangeNothing) {
  RunAnew(2, {.job = job_, .until = 7, .checkpoint_after = {7}, .checkpoints = disk_.get()});
  Cluster cluster(WithState());
  const auto ends = RunIn(cluster, {.job = job_,
                                    .until = 12,
                                    .resume_from = disk_.get(),
                                    .after_join = [&](uint32_t rank, Worker& worker) {
                                      if (rank != 2) return;
                                      cluster.Kill(0);
                                      cluster.Kill(1);
                                    }});
  EXPECT_EQ(ends, expected_);
}

}  // namespace
}  // namespace signpost::testing
