#include "worker/resume_state.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "worker/checkpoint_dir.h"

namespace signpost {
namespace {

struct Chosen {
  CheckpointEntry entry;  // whose manifest is readable
  std::vector<std::string> warnings;
  std::set<std::string> damaged;
};

absl::Status NoCheckpointError() {
  return absl::NotFoundError("there is no committed checkpoint to resume");
}

absl::StatusOr<Chosen> ChooseCheckpoint(const CheckpointDir& dir) {
  absl::StatusOr<std::vector<CheckpointEntry>> entries = dir.List();
  if (!entries.ok()) return entries.status();
  if (entries->empty()) return NoCheckpointError();
  Chosen chosen;
  bool found = false;
  for (CheckpointEntry& entry : *entries) {
    if (found && entry.manifest.ok()) continue;
    absl::Status status = entry.manifest.status();
    if (status.ok()) status = dir.Verify(entry.name, *entry.manifest);
    if (status.ok()) {
      found = true;
      chosen.entry = std::move(entry);
      continue;
    }
    if (!absl::IsDataLoss(status)) return status;
    chosen.warnings.push_back(std::string(status.message()));
    chosen.damaged.insert(entry.name);
  }
  if (found) return chosen;
  return absl::DataLossError(
      absl::StrCat("no checkpoint is whole: ", absl::StrJoin(chosen.warnings, "; ")));
}

absl::Status CheckRank(const ResumingWorker& worker) {
  if (worker.rank < worker.world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("rank %d is not in [0, %d)", worker.rank, worker.world_size));
}

absl::StatusOr<Layout> LayoutOf(const CheckpointManifest& manifest) {
  const std::vector<Tensor> tensors(manifest.tensors().begin(), manifest.tensors().end());
  return Layout::Create(tensors, manifest.options());
}

// FAILED_PRECONDITION if `what` was saved of a job that differs in more than its world size.
absl::Status CheckIsOfJob(absl::string_view what, const CheckpointManifest& manifest,
                          const ResumingWorker& worker, const Layout& layout) {
  JobOptions options = worker.options;  // what tells a run from another is not compared
  options.set_parameters_crc32c(manifest.options().parameters_crc32c());
  options.set_first_step(manifest.options().first_step());
  options.set_local_steps(manifest.options().local_steps());
  // Nor what nothing that was saved depends on.
  options.set_round_deadline_us(manifest.options().round_deadline_us());
  options.set_min_workers(manifest.options().min_workers());
  if (options.chunk_elements() == 0) {
    options.set_chunk_elements(manifest.options().chunk_elements());
  }
  const absl::Status status = CheckSameJob(worker.tensors, options, layout);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, " is of another job: ", status.message()));
}

absl::Status CheckWorldSize(const Chosen& chosen, const ResumingWorker& worker) {
  const uint32_t saved = chosen.entry.manifest->world_size();
  if (worker.world_size == saved) return absl::OkStatus();
  if (chosen.entry.manifest->schedule().local_steps() > 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint %s was taken of %d workers between two synchronisations, when each had "
        "parameters of its own; %d can only go on from one that was taken after a synchronisation",
        chosen.entry.name, saved, worker.world_size));
  }
  if (worker.allow_other_world_size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "checkpoint %s was taken of %d workers, and %d resume from it. If that is meant, set "
      "resume_with_other_world_size: each worker then takes the mean of the %d workers' errors",
      chosen.entry.name, saved, worker.world_size, saved));
}

absl::Status CheckIsOfRank(const SavedRank& saved, uint32_t saved_world_size,
                           const ResumingWorker& worker) {
  if (saved.rank == worker.rank && saved_world_size == worker.world_size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "the saved state is that of rank %d of %d, and this is rank %d of %d. Each rank goes on from "
      "the state that it has saved itself; a checkpoint is one for all ranks",
      saved.rank, saved_world_size, worker.rank, worker.world_size));
}

// DATA_LOSS if the files do not go together: only between synchronisations a rank has a momentum of
// its own, and the job none.
absl::Status CheckGoTogether(const CheckpointManifest& manifest, const SavedParameters& parameters,
                             const SavedRank& rank) {
  const bool is_local = manifest.schedule().local_steps() > 0;
  if (parameters.momentum.empty() == is_local && rank.local_sum.empty() != is_local) {
    return absl::OkStatus();
  }
  return absl::DataLossError("its parts are not of the same step");
}

class Loader {
 public:
  Loader(const CheckpointDir& dir, const CheckpointEntry& entry, const Layout& layout)
      : dir_(dir), name_(entry.name), manifest_(*entry.manifest), layout_(layout) {}

  absl::StatusOr<SavedRank> LoadRank(uint32_t rank) const {
    absl::StatusOr<std::string> contents = ReadFile(RankFileName(rank));
    if (!contents.ok()) return contents.status();
    absl::StatusOr<SavedRank> saved = DecodeRankPart(*contents, rank, layout_);
    if (!saved.ok()) return Explain(saved.status(), RankFileName(rank));
    return saved;
  }

  absl::StatusOr<SavedParameters> LoadParameters() const {
    absl::StatusOr<std::string> contents = ReadFile(kParametersFile);
    if (!contents.ok()) return contents.status();
    absl::StatusOr<SavedParameters> saved = DecodeParametersPart(*contents, layout_);
    if (!saved.ok()) return Explain(saved.status(), kParametersFile);
    return saved;
  }

  // The mean of all workers' errors, and those aggregators' errors that this rank of so many is to
  // give back.
  absl::StatusOr<SavedRank> LoadShareOf(uint32_t rank, uint32_t world_size) const {
    SavedRank share;
    for (uint32_t from = 0; from < manifest_.world_size(); ++from) {
      absl::StatusOr<SavedRank> saved = LoadRank(from);
      if (!saved.ok()) return saved;
      if (from == 0) {
        share.error = std::move(saved->error);
      } else {
        for (size_t i = 0; i < share.error.size(); ++i) share.error[i] += saved->error[i];
      }
      for (auto& [chunk, error] : saved->aggregator_errors) {
        if (chunk % world_size == rank) share.aggregator_errors[chunk] = std::move(error);
      }
    }
    for (float& error : share.error) error /= static_cast<float>(manifest_.world_size());
    return share;
  }

 private:
  absl::StatusOr<std::string> ReadFile(const std::string& name) const {
    const absl::StatusOr<CheckpointFile> file = FindFile(manifest_, name);
    if (!file.ok()) return file.status();
    return dir_.Read(name_, *file);
  }

  absl::Status Explain(const absl::Status& status, absl::string_view file) const {
    return absl::Status(status.code(),
                        absl::StrCat("checkpoint ", name_, ": ", file, ": ", status.message()));
  }

  const CheckpointDir& dir_;
  const std::string& name_;
  const CheckpointManifest& manifest_;
  const Layout& layout_;
};

uint32_t Crc32cOf(const SavedParameters& saved) {
  uint32_t crc = 0;
  for (const std::vector<float>* numbers :
       {&saved.values, &saved.momentum, &saved.variance, &saved.fresh_variance}) {
    crc = Crc32c(
        {reinterpret_cast<const uint8_t*>(numbers->data()), numbers->size() * sizeof(float)}, crc);
  }
  return crc;
}

ResumeState ResumeStateOf(const CheckpointManifest& manifest, SavedParameters parameters,
                          SavedRank rank) {
  std::string scales;
  for (const TensorScale& scale : manifest.scales()) scale.AppendToString(&scales);
  const uint32_t crc = Crc32c({reinterpret_cast<const uint8_t*>(scales.data()), scales.size()},
                              Crc32cOf(parameters));
  const bool is_local = !rank.local_sum.empty();
  return {.step = manifest.step(),
          .groups = {manifest.groups().begin(), manifest.groups().end()},
          .optimizer = {.schedule = manifest.schedule(),
                        .error = std::move(rank.error),
                        .momentum = std::move(is_local ? rank.momentum : parameters.momentum),
                        .variance = std::move(parameters.variance),
                        .fresh_variance = std::move(parameters.fresh_variance),
                        .scales = manifest.scales(),
                        .anchor = is_local ? parameters.values : std::vector<float>(),
                        .local_sum = std::move(rank.local_sum)},
          .values = std::move(is_local ? rank.values : parameters.values),
          .aggregator_errors = std::move(rank.aggregator_errors),
          .chunk_elements = manifest.options().chunk_elements(),
          .parameters_crc32c = crc};
}

}  // namespace

absl::StatusOr<ResumeState> LoadNewestCheckpoint(Disk& disk, const ResumingWorker& worker) {
  if (absl::Status status = CheckRank(worker); !status.ok()) return status;
  const CheckpointDir dir(disk);
  absl::StatusOr<Chosen> chosen = ChooseCheckpoint(dir);
  if (!chosen.ok()) return chosen.status();
  const CheckpointManifest& manifest = *chosen->entry.manifest;
  const absl::StatusOr<Layout> layout = LayoutOf(manifest);
  if (!layout.ok()) return layout.status();
  absl::Status status =
      CheckIsOfJob(absl::StrCat("checkpoint ", chosen->entry.name), manifest, worker, *layout);
  if (status.ok()) status = CheckWorldSize(*chosen, worker);
  if (!status.ok()) return status;

  const Loader loader(dir, chosen->entry, *layout);
  absl::StatusOr<SavedParameters> parameters = loader.LoadParameters();
  if (!parameters.ok()) return parameters.status();
  absl::StatusOr<SavedRank> rank = worker.world_size == manifest.world_size()
                                       ? loader.LoadRank(worker.rank)
                                       : loader.LoadShareOf(worker.rank, worker.world_size);
  if (!rank.ok()) return rank.status();
  status = CheckGoTogether(manifest, *parameters, *rank);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("checkpoint ", chosen->entry.name, ": ", status.message()));
  }
  ResumeState state = ResumeStateOf(manifest, *std::move(parameters), *std::move(rank));
  state.checkpoint = chosen->entry.name;
  state.warnings = std::move(chosen->warnings);
  state.damaged = std::move(chosen->damaged);
  return state;
}

absl::StatusOr<uint64_t> NewestCheckpointStep(Disk& disk) {
  const absl::StatusOr<std::vector<CheckpointEntry>> entries = CheckpointDir(disk).List();
  if (!entries.ok()) return entries.status();
  if (entries->empty()) return NoCheckpointError();
  const absl::StatusOr<CheckpointManifest>& newest = entries->front().manifest;
  if (!newest.ok()) return newest.status();
  return newest->step();
}

absl::StatusOr<RankState> ReadRankState(
    absl::string_view state,
    absl::FunctionRef<absl::Status(const CheckpointManifest&, const Layout&)> check) {
  if (!absl::ConsumePrefix(&state, kRankStateFirstLine)) {
    return absl::DataLossError("the saved state is none of this version of signpost");
  }
  const auto damaged = [](const absl::Status& status) {
    return absl::DataLossError(absl::StrCat("the saved state is damaged: ", status.message()));
  };
  SectionReader reader(state);
  CheckpointManifest manifest;
  if (absl::Status status = reader.Next(manifest); !status.ok()) return damaged(status);
  absl::StatusOr<Layout> layout = LayoutOf(manifest);
  if (!layout.ok()) return damaged(layout.status());
  if (absl::Status status = check(manifest, *layout); !status.ok()) return status;
  absl::StatusOr<SavedRank> rank = ReadRankPart(reader, *layout);
  if (!rank.ok()) return damaged(rank.status());
  absl::StatusOr<SavedParameters> parameters = ReadParametersPart(reader, *layout);
  if (!parameters.ok()) return damaged(parameters.status());
  if (!reader.at_end()) return damaged(absl::DataLossError("something follows its last section"));
  if (absl::Status status = CheckGoTogether(manifest, *parameters, *rank); !status.ok()) {
    return damaged(status);
  }
  return RankState{std::move(manifest), *std::move(layout), *std::move(rank),
                   *std::move(parameters)};
}

std::string WriteRankState(const CheckpointManifest& manifest, const Layout& layout,
                           const RankPart& rank, const ParametersPart& parameters) {
  SectionWriter state(kRankStateFirstLine);
  state.Add(manifest);
  AddRankPart(rank, state);
  AddParametersPart(parameters, layout, state);
  return absl::StrJoin(state.parts(), "");
}

absl::StatusOr<ResumeState> LoadRankState(absl::string_view state, const ResumingWorker& worker) {
  if (absl::Status status = CheckRank(worker); !status.ok()) return status;
  absl::StatusOr<RankState> saved = ReadRankState(
      state, [&](const CheckpointManifest& manifest, const Layout& layout) {
        return CheckIsOfJob("the saved state", manifest, worker, layout);
      });
  if (!saved.ok()) return saved.status();
  absl::Status status = CheckIsOfRank(saved->rank, saved->manifest.world_size(), worker);
  if (!status.ok()) return status;
  return ResumeStateOf(saved->manifest, std::move(saved->parameters), std::move(saved->rank));
}

absl::StatusOr<ResumeState> LoadResumeState(const ResumeFrom& from, const ResumingWorker& worker) {
  if (from.checkpoints == nullptr) return LoadRankState(from.state.value_or(""), worker);
  if (!from.state) return LoadNewestCheckpoint(*from.checkpoints, worker);
  return absl::InvalidArgumentError(
      "a job resumes from checkpoints or from its ranks' saved states, not from both");
}

}  // namespace signpost
