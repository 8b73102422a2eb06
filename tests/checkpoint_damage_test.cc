// Checkpoints that are interrupted, and files that are damaged: the one before is used.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "storage/disk.h"
#include "tests/checkpoint_job.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/memory_disk.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_disk.h"
#include "tests/status_is.h"
#include "worker/checkpoint_dir.h"
#include "worker/resume_state.h"

namespace signpost::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using enum absl::StatusCode;

// A job of one worker that has saved at step 7 and stands at step 8.
class InterruptedCheckpointTest : public ::testing::Test {
 protected:
  InterruptedCheckpointTest() : cluster_({.aggregators = 2}), replica_(job_, 0) {
    auto worker =
        Worker::Join(replica_.Options(), job_.optimizer, replica_.Parameters(), cluster_.Connect());
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

  // Of the checkpoint that the job would be resumed from.
  uint64_t StepIn(Disk& disk) { return Load(disk, job_)->optimizer.schedule.begun_steps(); }

  // Where a Checkpoint that has ended so was interrupted.
  void LoadsThisOneOrTheOneBefore(Disk& disk, const absl::Status& ended) {
    const auto loaded = Load(disk, job_);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ASSERT_TRUE(loaded->warnings.empty()) << loaded->warnings[0];
    const uint64_t step = loaded->optimizer.schedule.begun_steps();
    ASSERT_TRUE(step == 8 || (step == 7 && !ended.ok())) << step << ", and it ended with " << ended;
    ++(step == 7 ? previous_ : newest_);
  }

  JobOptionsForTest job_ = {.workers = 1, .tensors = {37, 1, 40}};
  Cluster cluster_;
  Replica replica_;
  std::unique_ptr<Worker> worker_;
  MemoryDisk saved_;
  int previous_ = 0, newest_ = 0;  // how often it was which
};

TEST_F(InterruptedCheckpointTest, AtAnyByteOrOperationThePreviousOneLoadsAndTheNextIsTaken) {
  MemoryDisk whole(saved_);
  ASSERT_TRUE(worker_->Checkpoint(whole).ok());
  for (uint64_t budget = 0; budget < whole.spent(); ++budget) {
    MemoryDisk disk(saved_);
    disk.DieAfter(budget);
    const absl::Status status = worker_->Checkpoint(disk);
    disk.Revive();
    ASSERT_NO_FATAL_FAILURE(LoadsThisOneOrTheOneBefore(disk, status)) << "after " << budget;
    ASSERT_TRUE(worker_->Checkpoint(disk).ok()) << "after " << budget;
    ASSERT_EQ(StepIn(disk), 8u);
  }
  EXPECT_GT(previous_, 1000);
  EXPECT_GT(newest_, 5);
}

TEST_F(InterruptedCheckpointTest, AMachineThatLosesWhatWasNotSyncedLeavesTheOneBeforeOrThisOne) {
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
      ASSERT_NO_FATAL_FAILURE(LoadsThisOneOrTheOneBefore(disk, status)) << "seed " << seed;
    }
  }
  EXPECT_GT(previous_, 100);
  EXPECT_GT(newest_, 100);
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
  RunAnew(1, {.job = job_,
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
  EXPECT_EQ(StepIn(saved_), 6u);
  ASSERT_TRUE(saved_.Remove(absl::StrCat(names[1], "/parameters")).ok());
  const absl::Status status = Load(saved_, job_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  for (const std::string& name : names) EXPECT_THAT(MessageOf(status), HasSubstr(name));
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
  EXPECT_EQ(StepIn(saved_), 7u);
  ASSERT_TRUE(worker_->Checkpoint(saved_).ok());
  EXPECT_EQ(StepIn(saved_), 8u);
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
  EXPECT_THAT(
      status,
      StatusIs(kFailedPrecondition,
               HasSubstr("step 8 is saved already, with other parameters than there are now")));
  EXPECT_EQ(disk.Files(), files);
}

TEST_F(InterruptedCheckpointTest, ResumingWithAnotherOptionOrTensorNamesIt) {
  JobOptionsForTest job = job_;
  job.optimizer.variance_floor = 0.1;
  EXPECT_THAT(MessageOf(Load(saved_, job).status()), HasSubstr("option optimizer is"));
  job = job_;
  job.optimizer.codec = INT8;
  job.optimizer.variance_codec = BFLOAT16;
  EXPECT_THAT(MessageOf(Load(saved_, job).status()),
              HasSubstr("is 'codec=int8 variance_codec=bf16' here but 'codec=onebit "
                        "variance_codec=fp32' in the job"));
  job = job_;
  job.worker.gamma = 1.2f;
  EXPECT_THAT(MessageOf(Load(saved_, job).status()), HasSubstr("option gamma is 1.2"));
  job = job_;
  job.tensors[1] = 2;
  const absl::Status status = Load(saved_, job).status();
  EXPECT_THAT(status, StatusIs(kFailedPrecondition, HasSubstr("tensor 1 is 'tensor1' [2] here")));
}

TEST(RankState, AnyFlippedBitAndAnyMissingByteIsNoticed) {
  const JobOptionsForTest job = {.workers = 1, .tensors = {37, 1, 40}};
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

}  // namespace
}  // namespace signpost::testing
