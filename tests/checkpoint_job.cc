#include "tests/checkpoint_job.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/checkpoint_dir.h"

namespace signpost::testing {

void OnEachWorker(Cluster& cluster, const JobOptionsForTest& job, const WorkerBody& body) {
  OnEachWorker(
      cluster, job, [](uint32_t, WorkerOptions&, Channels&) {}, body);
}

void OnEachWorker(Cluster& cluster, const JobOptionsForTest& job, const ChangeJoin& change,
                  const WorkerBody& body) {
  OnEachRank(job.workers, [&](uint32_t rank) {
    Replica replica(job, rank);
    WorkerOptions options = replica.Options();
    Channels channels = cluster.Connect();
    change(rank, options, channels);
    auto worker = Worker::Join(options, job.optimizer, replica.Parameters(), std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    body(rank, replica, **worker);
  });
}

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

std::vector<End> RunAnew(uint32_t aggregators, const Plan& plan) {
  Cluster cluster({.aggregators = aggregators});
  return RunIn(cluster, plan);
}

void RunAndSave(uint32_t aggregators, const JobOptionsForTest& job, int until, Disk& checkpoints,
                std::vector<std::string>* states) {
  RunAnew(aggregators, {.job = job,
                        .until = until,
                        .checkpoint_after = {until},
                        .checkpoints = &checkpoints,
                        .save_states = states});
}

absl::StatusOr<ResumeState> Load(const ResumeFrom& from, const JobOptionsForTest& job,
                                 uint32_t rank, const CustomCodec& codec) {
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

absl::StatusOr<ResumeState> Load(Disk& disk, const JobOptionsForTest& job, uint32_t rank) {
  return Load(ResumeFrom{.checkpoints = &disk}, job, rank);
}

std::vector<std::string> CheckpointsIn(Disk& disk) {
  std::vector<std::string> names;
  const auto entries = CheckpointDir(disk).List();
  EXPECT_TRUE(entries.ok()) << entries.status();
  for (const CheckpointEntry& entry : *entries) names.push_back(entry.name);
  return names;
}

std::string BytesOfAll(absl::Span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), 4 * values.size()};
}

}  // namespace signpost::testing
