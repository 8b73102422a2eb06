// Jobs that are saved, end, and go on from what was saved.

#ifndef SIGNPOST_TESTS_CHECKPOINT_JOB_H_
#define SIGNPOST_TESTS_CHECKPOINT_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/custom_codec.h"
#include "storage/disk.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "worker/channel.h"
#include "worker/resume_state.h"
#include "worker/worker.h"

namespace signpost::testing {

using Channels = std::vector<std::unique_ptr<Channel>>;

using WorkerBody = std::function<void(uint32_t rank, Replica& replica, Worker& worker)>;
using ChangeJoin = std::function<void(uint32_t rank, WorkerOptions& options, Channels& channels)>;

// Calls body on a thread for each rank of the job, with its worker, which has joined; with what
// `change` has made of what it would have joined with.
void OnEachWorker(Cluster& cluster, const JobOptionsForTest& job, const WorkerBody& body);
void OnEachWorker(Cluster& cluster, const JobOptionsForTest& job, const ChangeJoin& change,
                  const WorkerBody& body);

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

std::vector<End> RunIn(Cluster& cluster, const Plan& plan);
// Another part of a training, in aggregators of its own.
std::vector<End> RunAnew(uint32_t aggregators, const Plan& plan);
// One that ends with a checkpoint, and with the ranks' states if wanted.
void RunAndSave(uint32_t aggregators, const JobOptionsForTest& job, int until, Disk& checkpoints,
                std::vector<std::string>* states = nullptr);

// What a rank of the job would resume from.
absl::StatusOr<ResumeState> Load(const ResumeFrom& from, const JobOptionsForTest& job,
                                 uint32_t rank, const CustomCodec& codec = {});
absl::StatusOr<ResumeState> Load(Disk& disk, const JobOptionsForTest& job, uint32_t rank = 0);

// The newest first.
std::vector<std::string> CheckpointsIn(Disk& disk);

std::string BytesOfAll(absl::Span<const float> values);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_CHECKPOINT_JOB_H_
