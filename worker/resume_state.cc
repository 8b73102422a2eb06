#include "worker/resume_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
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

absl::StatusOr<Chosen> ChooseCheckpoint(const CheckpointDir& dir) {
  absl::StatusOr<std::vector<CheckpointEntry>> entries = dir.List();
  if (!entries.ok()) return entries.status();
  if (entries->empty()) return absl::NotFoundError("there is no committed checkpoint to resume");
  Chosen chosen;
  bool found = false;
  for (CheckpointEntry& entry : *entries) {
    if (found && entry.manifest.ok()) break;
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

absl::Status CheckFits(const Chosen& chosen, const ResumingWorker& worker, const Layout& layout) {
  const CheckpointManifest& manifest = *chosen.entry.manifest;
  JobOptions options = worker.options;  // what tells a run from another is not compared
  options.set_parameters_crc32c(manifest.options().parameters_crc32c());
  options.set_first_step(manifest.options().first_step());
  if (absl::Status status = CheckSameJob(worker.tensors, options, layout); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("checkpoint ", chosen.entry.name,
                                                    " is of another job: ", status.message()));
  }
  if (worker.world_size == manifest.world_size() || worker.allow_other_world_size) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "checkpoint %s was taken of %d workers, and %d resume from it. If that is meant, set "
      "resume_with_other_world_size: each worker then takes the mean of the %d workers' errors",
      chosen.entry.name, manifest.world_size(), worker.world_size, manifest.world_size()));
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
  for (const std::vector<float>* numbers : {&saved.values, &saved.momentum, &saved.variance}) {
    crc = Crc32c(
        {reinterpret_cast<const uint8_t*>(numbers->data()), numbers->size() * sizeof(float)}, crc);
  }
  return crc;
}

}  // namespace

absl::StatusOr<ResumeState> LoadNewestCheckpoint(Disk& disk, const ResumingWorker& worker) {
  if (worker.rank >= worker.world_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d is not in [0, %d)", worker.rank, worker.world_size));
  }
  const CheckpointDir dir(disk);
  absl::StatusOr<Chosen> chosen = ChooseCheckpoint(dir);
  if (!chosen.ok()) return chosen.status();
  const CheckpointManifest& manifest = *chosen->entry.manifest;
  const std::vector<Tensor> tensors(manifest.tensors().begin(), manifest.tensors().end());
  const absl::StatusOr<Layout> layout = Layout::Create(tensors, manifest.options());
  if (!layout.ok()) return layout.status();
  if (absl::Status status = CheckFits(*chosen, worker, *layout); !status.ok()) return status;

  const Loader loader(dir, chosen->entry, *layout);
  absl::StatusOr<SavedParameters> parameters = loader.LoadParameters();
  if (!parameters.ok()) return parameters.status();
  absl::StatusOr<SavedRank> rank = worker.world_size == manifest.world_size()
                                       ? loader.LoadRank(worker.rank)
                                       : loader.LoadShareOf(worker.rank, worker.world_size);
  if (!rank.ok()) return rank.status();
  const uint32_t crc = Crc32cOf(*parameters);
  return ResumeState{.checkpoint = chosen->entry.name,
                     .warnings = std::move(chosen->warnings),
                     .damaged = std::move(chosen->damaged),
                     .optimizer = {.schedule = manifest.schedule(),
                                   .error = std::move(rank->error),
                                   .momentum = std::move(parameters->momentum),
                                   .variance = std::move(parameters->variance)},
                     .values = std::move(parameters->values),
                     .aggregator_errors = std::move(rank->aggregator_errors),
                     .parameters_crc32c = crc};
}

}  // namespace signpost
