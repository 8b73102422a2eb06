// What a worker saves of its job, alone and together with the other ranks.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/dense.h"
#include "proto/layout.h"
#include "trace/span.h"
#include "worker/checkpoint_dir.h"
#include "worker/float_mode.h"
#include "worker/worker.h"

namespace signpost {
namespace {

// How soon a worker looks again whether other ranks have written their part of a checkpoint; then
// after twice that, and so on, up to kOfferInterval.
constexpr absl::Duration kFirstLookInterval = absl::Milliseconds(5);

// A rank that lives and has lost its connection makes a new one within a second or so; some
// networks take longer.
constexpr absl::Duration kReconnectPatience = absl::Seconds(10);

constexpr char kWhyOneIsMissing[] =
    "Has every rank called Checkpoint after this step, and is the directory one that all workers "
    "see?";

// What a checkpoint waits for.
struct Missing {
  std::vector<uint32_t> ranks;  // nobody: it is there
  bool is_commit = false;       // all parts are there: rank 0 is to commit them
};

absl::StatusOr<Missing> MissingFor(bool commits, const CheckpointDir& dir, const CheckpointId& id,
                                   uint32_t world_size, uint32_t call) {
  // In this order: what is committed has lost its sums.
  absl::StatusOr<std::vector<uint32_t>> ranks = dir.MissingRanks(id, world_size);
  if (!ranks.ok()) return ranks.status();
  if (!commits) {
    const absl::StatusOr<bool> committed = dir.IsCommitted(id);
    if (!committed.ok()) return committed.status();
    if (*committed) return Missing();
  }
  const absl::Status status = dir.CheckNobodyFailed(id, world_size, call);
  if (!status.ok()) return status;
  if (!commits && ranks->empty()) return Missing{{0}, /*is_commit=*/true};
  return Missing{*std::move(ranks)};
}

uint32_t Crc32cOf(absl::Span<const float> values) {
  return Crc32c({reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
}

// In layout order.
std::vector<float> MomentumOf(const OneBitAdam& adam, const Layout& layout) {
  std::vector<float> all;
  all.reserve(layout.elements());
  for (uint32_t chunk = 0; chunk < layout.chunks().size(); ++chunk) {
    const PageVector<float> momentum = adam.Momentum(chunk);
    all.insert(all.end(), momentum.begin(), momentum.end());
  }
  return all;
}

// What all ranks have alike, on the host.
class HostReplica {
 public:
  HostReplica(const OneBitAdam& adam, const Layout& layout)
      : anchor_(adam.anchor()), variance_(adam.variance()), fresh_variance_(adam.fresh_variance()) {
    const bool is_local = anchor_.size() > 0;
    size_t first = 0;
    for (uint32_t tensor = 0; tensor < layout.tensors().size(); ++tensor) {
      const size_t elements = ElementCount(layout.tensors()[tensor]);
      if (is_local) {
        spans_.push_back(absl::Span<const float>(anchor_).subspan(first, elements));
      } else {
        values_.push_back(adam.values(tensor));
        spans_.push_back(values_.back());
      }
      first += elements;
    }
    if (!is_local) momentum_ = MomentumOf(adam, layout);
  }

  ParametersPart PartOf(uint64_t step) const {
    return {step, spans_, momentum_, variance_, fresh_variance_};
  }

 private:
  HostFloats anchor_;
  std::vector<HostFloats> values_;
  std::vector<absl::Span<const float>> spans_;  // of anchor_ or values_
  std::vector<float> momentum_;
  HostFloats variance_, fresh_variance_;
};

// What a rank has for itself, on the host.
class HostRank {
 public:
  HostRank(const OneBitAdam& adam, const Layout& layout)
      : error_(adam.error()), local_sum_(adam.local_sum()) {
    if (local_sum_.size() == 0) return;
    values_.reserve(layout.elements());
    for (uint32_t tensor = 0; tensor < layout.tensors().size(); ++tensor) {
      const HostFloats values = adam.values(tensor);
      values_.insert(values_.end(), values.begin(), values.end());
    }
    momentum_ = MomentumOf(adam, layout);
  }

  RankPart PartOf(uint64_t step, uint32_t rank, const ChunkErrors& errors) const {
    return {step, rank, error_, errors, values_, momentum_, local_sum_};
  }

 private:
  HostFloats error_, local_sum_;
  std::vector<float> values_, momentum_;
};

// Another job's would give way to this one's, one by one, and neither could resume.
absl::Status CheckIsOfThisModel(const std::vector<CheckpointEntry>& entries, const Layout& layout) {
  if (entries.empty() || !entries.front().manifest.ok()) return absl::OkStatus();
  const CheckpointManifest& newest = *entries.front().manifest;
  const std::vector<Tensor> tensors(newest.tensors().begin(), newest.tensors().end());
  const absl::StatusOr<Layout> theirs = Layout::Create(tensors, newest.options());
  if (!theirs.ok()) return theirs.status();
  const absl::Status status = CheckSameJob(layout.tensors(), newest.options(), *theirs);
  if (status.ok()) return status;
  return absl::FailedPreconditionError(absl::StrCat("checkpoint ", entries.front().name,
                                                    " is of another job: ", status.message(),
                                                    ". Each job needs a directory of its own"));
}

// A run that starts anew takes over a directory: the one before has ended, as far as it can tell.
// If that has not, each would give way to the other's likewise, and who resumes would go on from
// either. As only the oldest go, of two runs that both go on one finds its own behind the other's.
absl::Status CheckIsNotTakenOver(const std::vector<CheckpointEntry>& entries,
                                 const CheckpointId& id) {
  const auto is_of_this_run = [&](const CheckpointEntry& entry) {
    return entry.manifest.ok() &&
           entry.name == CheckpointId{entry.manifest->step(), id.attempt}.name();
  };
  if (absl::c_none_of(entries, is_of_this_run) || is_of_this_run(entries.front())) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "checkpoint %s, of job '%s', has come after this run's: another run saves here. Each job "
      "needs a directory of its own",
      entries.front().name, entries.front().manifest->job()));
}

// The rank that saves, and where it is.
struct Saver {
  uint32_t rank;
  uint64_t step, round;
  const Optimizer& optimizer;
};

// These are ABORTED when those that are missing are not to be waited for, as Worker::Checkpoint
// says. An empty status, as of an aggregator that did not answer, is no reason.

absl::Status CheckNobodyHasLeft(const JobStatus& job) {
  for (uint32_t rank = 0; rank < job.world_size(); ++rank) {
    if (absl::c_linear_search(job.joined_ranks(), rank)) continue;
    return absl::AbortedError(absl::StrFormat(
        "saving a job needs all ranks, and rank %d has left it. What was saved before is what it "
        "can go on from",
        rank));
  }
  return absl::OkStatus();
}

// Whoever has left by now may have seen the checkpoint that is waited for here.
absl::Status CheckNobodyIsGone(const JobStatus& job, absl::Span<const uint32_t> missing_ranks,
                               const Saver& saver) {
  for (const uint32_t rank : missing_ranks) {
    if (absl::c_linear_search(job.returning_ranks(), rank)) {
      return absl::AbortedError(absl::StrFormat(
          "what is saved of step %d lacks the part of rank %d, which comes back, with the rounds "
          "that follow. Until it is there the job cannot be saved",
          saver.step, rank));
    }
    if (!absl::c_linear_search(job.absent_ranks(), rank) ||
        !absl::c_linear_search(job.joined_ranks(), rank)) {
      continue;
    }
    return absl::AbortedError(absl::StrFormat(
        "what is saved of step %d lacks the part of rank %d, from which nothing comes any more: "
        "rounds close without it. Until it is back the job cannot be saved",
        saver.step, rank));
  }
  if (job.step() <= saver.round) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrFormat("the others have gone on to step %d, and have not saved step %d",
                      saver.optimizer.StepsBefore(job.step()), saver.step));
}

absl::Status CheckNobodyHasGoneOn(const JobStatus& job, absl::Span<const uint32_t> missing_ranks,
                                  const Saver& saver) {
  // This rank has no frame of that round before it is done here. An aggregator that was started
  // again may be at an earlier one.
  const bool is_next = job.step() == saver.round;
  if (!is_next || !absl::c_linear_search(job.waiting_for_ranks(), saver.rank)) {
    return absl::OkStatus();
  }
  for (const uint32_t rank : missing_ranks) {
    if (absl::c_linear_search(job.waiting_for_ranks(), rank) ||
        absl::c_linear_search(job.absent_ranks(), rank)) {
      continue;
    }
    return absl::AbortedError(
        absl::StrFormat("the checkpoint of step %d lacks the part of rank %d, which has gone on to "
                        "the next step. %s",
                        saver.step, rank, kWhyOneIsMissing));
  }
  return absl::OkStatus();
}

// Of ranks: since when they have had no connection in any look.
using DisconnectedRanks = std::map<uint32_t, absl::Time>;

// While all are in a checkpoint no round closes without the one that has ended in it. Brings
// `disconnected` up to date.
absl::Status CheckNoProcessHasEnded(const JobStatus& job, absl::Span<const uint32_t> missing_ranks,
                                    absl::Time now, DisconnectedRanks& disconnected,
                                    const Saver& saver) {
  const DisconnectedRanks before = std::exchange(disconnected, {});
  for (const uint32_t rank : missing_ranks) {
    if (!absl::c_linear_search(job.disconnected_ranks(), rank)) continue;
    const auto found = before.find(rank);
    const absl::Time since = found == before.end() ? now : found->second;
    disconnected.emplace(rank, since);
    if (now - since < kReconnectPatience) continue;
    return absl::AbortedError(absl::StrFormat(
        "what is saved of step %d lacks the part of rank %d, whose process seems to have ended: it "
        "has had no connection for %s. Until another is in its place the job cannot be saved",
        saver.step, rank, absl::FormatDuration(kReconnectPatience)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Worker::Checkpoint(Disk& directory) {
  was_interrupted_ = false;
  const DefaultFloatMode float_mode;
  const trace::Span span(StepEvent(trace::Kind::kCheckpoint));
  if (std::exchange(checkpoint_step_, steps_) != steps_) checkpoint_calls_ = 0;
  ++checkpoint_calls_;
  if (absl::Status status = CheckCanBeSaved(); !status.ok()) return status;
  CheckpointDir dir(directory);
  const CheckpointId id = {steps_, AttemptOf(shards_.epochs())};
  absl::StatusOr<bool> committed = dir.IsCommitted(id);
  if (!committed.ok()) return committed.status();
  if (*committed) return dir.CheckHasParameters(id, CommonCrc32c());
  const absl::StatusOr<std::vector<CheckpointEntry>> entries = dir.List();
  if (!entries.ok()) return entries.status();
  if (absl::Status status = CheckIsNotTakenOver(*entries, id); !status.ok()) {
    // Of its processes others may have come: then it is to be started again, as ever.
    const absl::Status over = CheckEpochStands();
    return over.ok() ? status : over;
  }
  if (absl::Status status = CheckIsOfThisModel(*entries, layout_); !status.ok()) return status;
  if (absl::Status status = CheckNobodyHasLeft(AskAboutJob()); !status.ok()) return status;
  dir.RemoveUncommitted(id, options_.rank).IgnoreError();  // the room may do without

  absl::StatusOr<CheckpointFile> parameters;
  absl::Status status = SaveRank(dir, id);
  if (status.ok() && options_.rank == 0) {
    parameters = SaveParameters(dir, id);
    status = parameters.status();
  }
  if (status.ok()) {
    status = AwaitRanks(dir, id);
    // Another rank's part is there, whatever becomes of its wait.
    if (options_.rank != 0) return status;
  }
  if (status.ok()) status = dir.Commit(id, Manifest(), *parameters);
  if (!status.ok()) {
    // Where that cannot be written either, they wait in vain.
    dir.WriteFailure(id, options_.rank, checkpoint_calls_, status).IgnoreError();
    return status;
  }
  // It is committed. What cannot be removed now is tried again with the next.
  dir.Prune(id, damaged_checkpoints_).IgnoreError();
  return absl::OkStatus();
}

absl::Status Worker::SaveRank(CheckpointDir& dir, const CheckpointId& id) {
  const absl::StatusOr<ChunkErrors> errors = ReadErrors();
  if (!errors.ok()) return errors.status();
  const HostRank rank(*adam_, layout_);
  if (absl::Status status = adam_->Check(); !status.ok()) return status;
  SectionWriter part(kCheckpointFirstLine);
  AddRankPart(rank.PartOf(steps_, options_.rank, *errors), part);
  return dir.WriteRank(id, options_.rank, part, CommonCrc32c());
}

absl::StatusOr<CheckpointFile> Worker::SaveParameters(CheckpointDir& dir,
                                                      const CheckpointId& id) const {
  const HostReplica replica(*adam_, layout_);
  if (absl::Status status = adam_->Check(); !status.ok()) return status;
  SectionWriter parameters(kCheckpointFirstLine);
  AddParametersPart(replica.PartOf(steps_), layout_, parameters);
  return dir.WriteParameters(id, parameters);
}

absl::StatusOr<std::string> Worker::SaveState() {
  const DefaultFloatMode float_mode;
  if (absl::Status status = CheckCanBeSaved(); !status.ok()) return status;
  if (absl::Status status = CheckNobodyHasLeft(AskAboutJob()); !status.ok()) return status;
  // Without the states of those who are gone the others' are good for nothing.
  const Saver saver = {options_.rank, steps_, round_, optimizer_};
  std::vector<uint32_t> all_ranks(options_.world_size);
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  if (absl::Status status = CheckNobodyIsGone(AskAboutJob(), all_ranks, saver); !status.ok()) {
    return status;
  }
  const absl::StatusOr<ChunkErrors> errors = ReadErrors();
  if (!errors.ok()) return errors.status();
  const HostRank rank(*adam_, layout_);
  const HostReplica replica(*adam_, layout_);
  if (absl::Status status = adam_->Check(); !status.ok()) return status;
  return WriteRankState(Manifest(), layout_, rank.PartOf(steps_, options_.rank, *errors),
                        replica.PartOf(steps_));
}

absl::Status Worker::CheckCanBeSaved() const {
  if (absl::Status status = CheckHasNotLeft(); !status.ok()) return status;
  if (failure_.ok()) return CheckNoStepIsOpen();
  return AfterFailure(
      absl::StrCat("an earlier step failed, and parts of it may have been taken; what was saved "
                   "before is what to go on from. It failed with: ",
                   failure_.message()));
}

uint32_t Worker::CommonCrc32c() const {
  return is_synchronised() ? ParametersCrc32c() : Crc32cOf(adam_->anchor());
}

CheckpointManifest Worker::Manifest() const {
  CheckpointManifest manifest;
  manifest.set_step(steps_);
  manifest.set_job(options_.job);
  manifest.set_world_size(options_.world_size);
  *manifest.mutable_options() = layout_.options();
  manifest.mutable_options()->set_parameters_crc32c(CommonCrc32c());
  manifest.mutable_options()->clear_first_step();
  manifest.mutable_options()->clear_local_steps();
  manifest.mutable_tensors()->Add(layout_.tensors().begin(), layout_.tensors().end());
  *manifest.mutable_schedule() = adam_->schedule();
  *manifest.mutable_scales() = adam_->Scales();
  for (const float epsilon : adam_->FrozenEpsilons()) manifest.add_frozen_epsilons(epsilon);
  if (!is_synchronised()) {
    for (const Parameter& parameter : parameters_) manifest.add_groups(parameter.group);
  }
  // Not by options_.clock, which stands still with this process.
  manifest.set_committed_us(absl::ToUnixMicros(absl::Now()));
  return manifest;
}

absl::StatusOr<ChunkErrors> Worker::ReadErrors() {
  SetDeadline(options_.exchange_timeout);
  const Saver saver = {options_.rank, steps_, round_, optimizer_};
  ChunkErrors errors;
  const uint32_t chunks = layout_.chunks().size();
  for (uint32_t chunk = options_.rank; chunk < chunks; chunk += options_.world_size) {
    absl::StatusOr<std::vector<float>> error = ReadError(chunk);
    if (!error.ok()) {
      if (absl::IsDataLoss(error.status())) return error.status();
      if (absl::Status status = CheckNobodyIsGone(AskAboutJob(), {}, saver); !status.ok())
        return status;
      return error.status();
    }
    errors[chunk] = *std::move(error);
  }
  return errors;
}

absl::StatusOr<std::vector<float>> Worker::ReadError(uint32_t chunk) {
  const uint32_t shard = shards_.ShardOf(chunk);
  absl::StatusOr<ReadErrorResponse> response;
  while (true) {
    response = shards_.ReadError(chunk, round_, exchanges_.deadline());
    const bool is_late = options_.clock->Now() >= exchanges_.deadline();
    if (!absl::IsAborted(response.status()) || is_late) break;
    const absl::Status offered = OfferAll(shard, /*had_failed=*/false);
    if (!offered.ok()) return offered;
  }
  if (!response.ok()) {
    return shards_.Explain(response.status(), shard,
                           absl::StrFormat("the error of chunk %d before step %d of job '%s'",
                                           chunk, round_, options_.job));
  }
  const absl::Span<const uint8_t> bytes = {
      reinterpret_cast<const uint8_t*>(response->payload().data()), response->payload().size()};
  std::vector<float> error(bytes.size() / sizeof(float));
  const size_t elements = layout_.chunks()[chunk].elements;
  const bool has_size = bytes.empty() || bytes.size() == elements * sizeof(float);
  if (!has_size || response->step() != round_ || response->chunk() != chunk ||
      response->payload_crc32c() != Crc32c(bytes)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "aggregator %s sent %d bytes for step %d, chunk %d where the error of step %d, chunk %d "
        "has %d, or another CRC-32C than it says",
        shards_.channel(shard).target(), bytes.size(), response->step(), response->chunk(), round_,
        chunk, elements * sizeof(float)));
  }
  if (!kernels::DenseWithinRange(kernels::DenseType::kFloat32, bytes.data(), error.size())) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the error of chunk %d is out of range: the training has diverged, and a checkpoint of it "
        "could not be resumed",
        chunk));
  }
  if (!error.empty()) std::memcpy(error.data(), bytes.data(), bytes.size());
  return error;
}

absl::Status Worker::AwaitRanks(const CheckpointDir& dir, const CheckpointId& id) {
  const Saver saver = {options_.rank, steps_, round_, optimizer_};
  const bool commits = options_.rank == 0;
  const absl::Time start = options_.clock->Now();
  SetDeadline(options_.exchange_timeout);
  absl::Time next_offer = start + kOfferInterval;
  absl::Duration interval = kFirstLookInterval;
  bool are_compared = false;
  DisconnectedRanks disconnected;
  StepReport report;
  while (true) {
    const absl::StatusOr<Missing> missing =
        MissingFor(commits, dir, id, options_.world_size, checkpoint_calls_);
    if (!missing.ok()) return missing.status();
    const bool are_all_there = missing->is_commit || (commits && missing->ranks.empty());
    if (are_all_there && !std::exchange(are_compared, true)) {
      const absl::Status status = dir.CheckSameParameters(id, options_.world_size);
      if (!status.ok() && !absl::IsNotFound(status)) return status;
    }
    if (missing->ranks.empty()) return absl::OkStatus();
    const absl::Time now = options_.clock->Now();
    if (now >= exchanges_.deadline() && missing->is_commit) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "the checkpoint of step %d is not committed after %s: all parts are there, and rank 0, "
          "which commits them, still writes the parameters or has ended. If writing them takes "
          "longer, so must the exchange timeout",
          steps_, absl::FormatDuration(options_.exchange_timeout)));
    }
    if (now >= exchanges_.deadline()) {
      return absl::DeadlineExceededError(
          absl::StrFormat("the checkpoint of step %d lacks the part of rank %s after %s. %s",
                          steps_, absl::StrJoin(missing->ranks, ", "),
                          absl::FormatDuration(options_.exchange_timeout), kWhyOneIsMissing));
    }
    if (now >= next_offer) {
      const bool may_be_gone =
          options_.min_workers > 0 && now >= start + 2 * options_.round_deadline;
      // Who has gone on waits for an exchange timeout: the others are to be there before. Not at
      // once, as file systems may show a part late.
      const bool may_have_gone_on =
          now >= start + options_.exchange_timeout / 2 && !missing->is_commit;
      if (may_be_gone || may_have_gone_on) {
        const JobStatus job = shards_.AskAboutJob();
        absl::Status status;
        if (may_be_gone) {
          status = CheckNobodyIsGone(job, missing->ranks, saver);
          status.Update(CheckNoProcessHasEnded(job, missing->ranks, now, disconnected, saver));
        }
        if (may_have_gone_on) status.Update(CheckNobodyHasGoneOn(job, missing->ranks, saver));
        if (!status.ok()) return status;
      }
      // A rank that ended here may have been started anew.
      if (absl::Status status = CheckEpochStands(); !status.ok()) return status;
      exchanges_.OfferToIdleShards();
      next_offer = options_.clock->Now() + kOfferInterval;
    }
    std::optional<WorkerInbox::Item> item = inbox_->Take(*options_.clock, interval);
    if (!item) {
      if (absl::Status status = CheckMayWait(); !status.ok()) return status;
      interval = std::min(2 * interval, kOfferInterval);
      continue;
    }
    absl::StatusOr<bool> done = Receive(*std::move(item), report);
    if (!done.ok()) return done.status();
  }
}

// Without a round deadline nobody can be gone: an empty one.
JobStatus Worker::AskAboutJob() const {
  return options_.min_workers == 0 ? JobStatus() : shards_.AskAboutJob();
}

}  // namespace signpost
