#include "worker/checkpoint_dir.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "proto/try_again.h"
#include "worker/checkpoint_file.h"

namespace signpost {
namespace {

constexpr char kManifestFile[] = "manifest";
// A manifest has each tensor, file and rank once.
constexpr uint64_t kMostManifestBytes = uint64_t{256} << 20;
constexpr uint64_t kMostSumBytes = 4096;
constexpr uint64_t kMostFailureBytes = uint64_t{1} << 20;  // an error's text
constexpr size_t kGenerations = 2;

std::string PathOf(const std::string& checkpoint, const std::string& file) {
  return absl::StrCat(checkpoint, "/", file);
}

// What goes when a checkpoint is committed.
constexpr absl::string_view kSum = ".sum", kFailed = ".failed";

std::string SumFileName(uint32_t rank) { return absl::StrCat(RankFileName(rank), kSum); }
std::string FailureFileName(uint32_t rank) { return absl::StrCat(RankFileName(rank), kFailed); }

// Whether the rank wrote it for itself, or began to.
bool IsOfRank(uint32_t rank, const std::string& file) {
  const std::string name = RankFileName(rank);
  return file == name || absl::StartsWith(file, absl::StrCat(name, "."));
}

// The step of a checkpoint's directory; nothing for what is none.
std::optional<uint64_t> StepOf(const std::string& directory) {
  CheckpointId id;
  if (std::sscanf(directory.c_str(), "step-%" SCNu64 "-%" SCNx64, &id.step, &id.attempt) != 2 ||
      id.name() != directory) {
    return std::nullopt;
  }
  return id.step;
}

// Names of files by checkpoint.
using Tree = std::map<std::string, std::vector<std::string>>;

absl::StatusOr<Tree> ListTree(Disk& disk) {
  absl::StatusOr<std::vector<std::string>> names = disk.List();
  if (!names.ok()) return names.status();
  Tree tree;
  for (const std::string& name : *names) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || !StepOf(name.substr(0, slash))) continue;
    tree[name.substr(0, slash)].push_back(name.substr(slash + 1));
  }
  return tree;
}

CheckpointFile SumOf(const std::string& name, const SectionWriter& writer) {
  CheckpointFile file;
  file.set_name(name);
  uint32_t crc = 0;
  for (const absl::string_view part : writer.parts()) {
    file.set_bytes(file.bytes() + part.size());
    crc = Crc32c({reinterpret_cast<const uint8_t*>(part.data()), part.size()}, crc);
  }
  file.set_crc32c(crc);
  return file;
}

absl::Status ReplaceWithMessage(Disk& disk, const std::string& path,
                                const google::protobuf::MessageLite& message) {
  SectionWriter writer(kCheckpointFirstLine);
  writer.Add(message);
  return Replace(disk, path, writer.parts());
}

// A file of a single message.
absl::Status DecodeMessage(absl::string_view file, google::protobuf::MessageLite& message) {
  if (!absl::StartsWith(file, kCheckpointFirstLine)) {
    return absl::DataLossError("it does not begin as a checkpoint of this version");
  }
  SectionReader reader(file.substr(kCheckpointFirstLine.size()));
  if (absl::Status status = reader.Next(message); !status.ok()) return status;
  if (reader.at_end()) return absl::OkStatus();
  return absl::DataLossError("something follows its last section");
}

// That nothing further needs to look at what a manifest says before it relies on it.
absl::Status CheckManifest(const CheckpointManifest& manifest) {
  const std::vector<Tensor> tensors(manifest.tensors().begin(), manifest.tensors().end());
  const absl::StatusOr<Layout> layout = Layout::Create(tensors, manifest.options());
  if (!layout.ok()) return absl::DataLossError(layout.status().message());
  if (manifest.world_size() == 0) return absl::DataLossError("it has no workers");
  // It counts rounds: local steps are none.
  if (manifest.schedule().begun_steps() > manifest.step()) {
    return absl::DataLossError("its optimizer's schedule is of another step");
  }
  for (const TensorScale& scale : manifest.scales()) {
    if (scale.tensor() < tensors.size()) continue;
    return absl::DataLossError(absl::StrCat("it has a scale of tensor ", scale.tensor()));
  }
  for (uint32_t rank = 0; rank < manifest.world_size(); ++rank) {
    const absl::Status found = FindFile(manifest, RankFileName(rank)).status();
    if (!found.ok()) return found;
  }
  return FindFile(manifest, kParametersFile).status();
}

// Blames a section if it can.
absl::Status CheckSections(absl::string_view contents) {
  if (!absl::StartsWith(contents, kCheckpointFirstLine)) {
    return absl::DataLossError("it does not begin as a checkpoint of this version");
  }
  SectionReader reader(contents.substr(kCheckpointFirstLine.size()));
  while (!reader.at_end()) {
    absl::string_view bytes;
    if (absl::Status status = reader.Next(bytes); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckContents(absl::string_view contents, const CheckpointFile& file) {
  if (absl::Status status = CheckSections(contents); !status.ok()) return status;
  const uint32_t crc = Crc32c({reinterpret_cast<const uint8_t*>(contents.data()), contents.size()});
  if (contents.size() == file.bytes() && crc == file.crc32c()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrFormat("it has %d bytes and CRC-32C %08x, the manifest says "
                      "%d bytes and %08x",
                      contents.size(), crc, file.bytes(), file.crc32c()));
}

absl::Status Damaged(const std::string& checkpoint, const std::string& file,
                     const absl::Status& why) {
  return absl::DataLossError(
      absl::StrCat("checkpoint ", checkpoint, ": ", file, " is damaged: ", why.message()));
}

// The ranks' sums are there before the parameters, and go once there is a manifest.
bool HadManifest(const std::vector<std::string>& files) {
  return absl::c_linear_search(files, kParametersFile) &&
         absl::c_none_of(files, [](const auto& file) { return absl::EndsWith(file, kSum); });
}

}  // namespace

std::string CheckpointId::name() const {
  return absl::StrFormat("step-%012d-%016x", step, attempt);
}

// FNV-1a, 64 bits.
uint64_t AttemptOf(const std::vector<uint64_t>& epochs) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t epoch : epochs) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ (epoch >> shift & 0xff)) * 0x100000001b3;
    }
  }
  return hash;
}

std::string RankFileName(uint32_t rank) { return absl::StrCat("rank-", rank); }

absl::StatusOr<CheckpointFile> FindFile(const CheckpointManifest& manifest,
                                        const std::string& name) {
  for (const CheckpointFile& file : manifest.files()) {
    if (file.name() == name) return file;
  }
  return absl::DataLossError(absl::StrCat("the manifest does not list ", name));
}

absl::StatusOr<std::vector<CheckpointEntry>> CheckpointDir::List() const {
  absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  std::vector<CheckpointEntry> entries, without_manifest;
  for (const auto& [checkpoint, files] : *tree) {
    if (!absl::c_linear_search(files, kManifestFile)) {
      // It may have come behind the list.
      if (HadManifest(files) && absl::IsNotFound(ReadManifest(checkpoint).status())) {
        without_manifest.push_back(
            {checkpoint, Damaged(checkpoint, kManifestFile, absl::DataLossError("it is gone"))});
      }
      continue;
    }
    absl::StatusOr<CheckpointManifest> manifest = ReadManifest(checkpoint);
    if (absl::IsNotFound(manifest.status())) continue;  // removed meanwhile
    // The disk may be at fault for the moment only: then nothing may be passed over.
    if (!manifest.ok() && !absl::IsDataLoss(manifest.status())) return manifest.status();
    entries.push_back({checkpoint, std::move(manifest)});
  }
  absl::c_stable_sort(entries, [](const CheckpointEntry& a, const CheckpointEntry& b) {
    if (!a.manifest.ok() || !b.manifest.ok()) return a.manifest.ok() > b.manifest.ok();
    return a.manifest->sequence() > b.manifest->sequence();
  });
  // Others are on their way out.
  const bool has_newest = !entries.empty() && entries.front().manifest.ok();
  const std::optional<uint64_t> newest = has_newest ? StepOf(entries.front().name) : std::nullopt;
  for (CheckpointEntry& entry : without_manifest) {
    if (StepOf(entry.name) > newest) entries.push_back(std::move(entry));
  }
  return entries;
}

absl::StatusOr<CheckpointManifest> CheckpointDir::ReadManifest(
    const std::string& checkpoint) const {
  const absl::StatusOr<std::string> file =
      disk_.Read(PathOf(checkpoint, kManifestFile), kMostManifestBytes);
  if (!file.ok()) return file.status();
  CheckpointManifest manifest;
  absl::Status status = DecodeMessage(*file, manifest);
  if (status.ok()) status = CheckManifest(manifest);
  if (status.ok() && manifest.step() != StepOf(checkpoint)) {
    status = absl::DataLossError(absl::StrCat("it is of step ", manifest.step()));
  }
  if (!status.ok()) return Damaged(checkpoint, kManifestFile, status);
  return manifest;
}

absl::Status CheckpointDir::WriteRank(const CheckpointId& id, uint32_t rank,
                                      const SectionWriter& part, uint32_t parameters_crc32c) {
  const std::string name = RankFileName(rank);
  if (absl::Status status = Replace(disk_, PathOf(id.name(), name), part.parts()); !status.ok()) {
    return status;
  }
  CheckpointFile sum = SumOf(name, part);
  sum.set_parameters_crc32c(parameters_crc32c);
  return ReplaceWithMessage(disk_, PathOf(id.name(), SumFileName(rank)), sum);
}

absl::StatusOr<CheckpointFile> CheckpointDir::ReadSum(const CheckpointId& id, uint32_t rank) const {
  const std::string name = SumFileName(rank);
  const absl::StatusOr<std::string> sum = disk_.Read(PathOf(id.name(), name), kMostSumBytes);
  if (!sum.ok()) return sum.status();
  CheckpointFile file;
  const absl::Status status = DecodeMessage(*sum, file);
  if (!status.ok()) return Damaged(id.name(), name, status);
  return file;
}

absl::Status CheckpointDir::CheckSameParameters(const CheckpointId& id, uint32_t world_size) const {
  std::vector<uint32_t> others;
  uint32_t wanted = 0, got = 0;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const absl::StatusOr<CheckpointFile> sum = ReadSum(id, rank);
    if (!sum.ok()) return sum.status();
    if (rank == 0) wanted = sum->parameters_crc32c();
    if (sum->parameters_crc32c() == wanted) continue;
    if (others.empty()) got = sum->parameters_crc32c();
    others.push_back(rank);
  }
  if (others.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "the parameters of rank %s are not those of rank 0 (CRC-32C %08x, and %08x), so step %d was "
      "not saved. What a program writes into parameters it must write on all ranks",
      absl::StrJoin(others, ", "), got, wanted, id.step));
}

absl::StatusOr<CheckpointFile> CheckpointDir::WriteParameters(const CheckpointId& id,
                                                              const SectionWriter& part) {
  absl::Status status = Replace(disk_, PathOf(id.name(), kParametersFile), part.parts());
  if (!status.ok()) return status;
  return SumOf(kParametersFile, part);
}

absl::StatusOr<std::vector<uint32_t>> CheckpointDir::MissingRanks(const CheckpointId& id,
                                                                  uint32_t world_size) const {
  absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  const std::vector<std::string>& files = (*tree)[id.name()];
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    if (!absl::c_binary_search(files, SumFileName(rank))) missing.push_back(rank);
  }
  return missing;
}

absl::StatusOr<bool> CheckpointDir::IsCommitted(const CheckpointId& id) const {
  absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  return absl::c_linear_search((*tree)[id.name()], kManifestFile);
}

// "<call> <code> <message>"
absl::Status CheckpointDir::WriteFailure(const CheckpointId& id, uint32_t rank, uint32_t call,
                                         const absl::Status& why) {
  const bool passes = IsTryAgain(why) || absl::IsCancelled(why);
  const absl::StatusCode code = passes ? absl::StatusCode::kAborted : why.code();
  const std::string text = absl::StrCat(call, " ", static_cast<int>(code), " ", why.message());
  return Replace(disk_, PathOf(id.name(), FailureFileName(rank)), {text});
}

absl::Status CheckpointDir::CheckNobodyFailed(const CheckpointId& id, uint32_t world_size,
                                              uint32_t call) const {
  absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  const std::vector<std::string>& files = (*tree)[id.name()];
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    if (!absl::c_binary_search(files, FailureFileName(rank))) continue;
    const absl::StatusOr<std::string> text =
        disk_.Read(PathOf(id.name(), FailureFileName(rank)), kMostFailureBytes);
    if (absl::IsNotFound(text.status())) continue;  // it was committed meanwhile
    if (!text.ok()) return text.status();
    const std::vector<std::string> parts = absl::StrSplit(*text, absl::MaxSplits(' ', 2));
    uint32_t failed_call = 0;
    int code = 0;
    const bool is_whole = parts.size() == 3 && absl::SimpleAtoi(parts[0], &failed_call) &&
                          absl::SimpleAtoi(parts[1], &code) && code != 0;
    if (!is_whole || failed_call < call) continue;
    return absl::Status(
        static_cast<absl::StatusCode>(code),
        absl::StrFormat("rank %d could not save step %d: %s", rank, id.step, parts[2]));
  }
  return absl::OkStatus();
}

absl::Status CheckpointDir::CheckHasParameters(const CheckpointId& id,
                                               uint32_t parameters_crc32c) const {
  const absl::StatusOr<CheckpointManifest> manifest = ReadManifest(id.name());
  if (!manifest.ok()) return manifest.status();
  if (manifest->options().parameters_crc32c() == parameters_crc32c) return absl::OkStatus();
  return TryAgain(absl::FailedPreconditionError(absl::StrFormat(
      "step %d is saved already, with other parameters than there are now (CRC-32C %08x, and "
      "%08x): what was written into them since is saved with the next step",
      id.step, manifest->options().parameters_crc32c(), parameters_crc32c)));
}

absl::Status CheckpointDir::RemoveUncommitted(const CheckpointId& but, uint32_t rank) {
  const absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  absl::Status first_error;
  for (const auto& [checkpoint, files] : *tree) {
    if (absl::c_linear_search(files, kManifestFile) || checkpoint == but.name()) continue;
    if (*StepOf(checkpoint) > but.step) continue;
    std::vector<std::string> removed = files;
    if (rank != 0) {
      if (absl::c_any_of(files, [](const auto& file) { return IsOfRank(0, file); })) continue;
      std::erase_if(removed, [rank](const auto& file) { return !IsOfRank(rank, file); });
    }
    first_error.Update(RemoveCheckpoint(checkpoint, removed));
  }
  return first_error;
}

absl::StatusOr<uint64_t> CheckpointDir::LastSequence() const {
  const absl::StatusOr<std::vector<CheckpointEntry>> entries = List();
  if (!entries.ok()) return entries.status();
  const bool has_one = !entries->empty() && entries->front().manifest.ok();
  return has_one ? entries->front().manifest->sequence() : 0;
}

absl::Status CheckpointDir::Commit(const CheckpointId& id, CheckpointManifest manifest,
                                   const CheckpointFile& parameters) {
  const absl::StatusOr<uint64_t> last = LastSequence();
  if (!last.ok()) return last.status();
  manifest.set_sequence(*last + 1);
  *manifest.add_files() = parameters;
  for (uint32_t rank = 0; rank < manifest.world_size(); ++rank) {
    absl::StatusOr<CheckpointFile> sum = ReadSum(id, rank);
    if (!sum.ok()) return sum.status();
    sum->clear_parameters_crc32c();
    *manifest.add_files() = *std::move(sum);
  }
  return ReplaceWithMessage(disk_, PathOf(id.name(), kManifestFile), manifest);
}

absl::Status CheckpointDir::Prune(const CheckpointId& newest,
                                  const std::set<std::string>& damaged) {
  const absl::StatusOr<std::vector<CheckpointEntry>> committed = List();
  if (!committed.ok()) return committed.status();
  const absl::StatusOr<Tree> tree = ListTree(disk_);
  if (!tree.ok()) return tree.status();
  std::set<std::string> kept, replaced;
  for (const CheckpointEntry& entry : *committed) {
    if (!entry.manifest.ok()) continue;
    const bool is_kept = kept.size() < kGenerations && !damaged.contains(entry.name);
    (is_kept ? kept : replaced).insert(entry.name);
  }
  absl::Status first_error;
  for (const auto& [checkpoint, files] : *tree) {
    if (checkpoint == newest.name()) {
      for (const std::string& file : files) {
        if (!absl::EndsWith(file, kSum) && !absl::EndsWith(file, kFailed)) continue;
        first_error.Update(disk_.Remove(PathOf(checkpoint, file)));
      }
    } else if (replaced.contains(checkpoint) ||
               (!kept.contains(checkpoint) && *StepOf(checkpoint) <= newest.step)) {
      first_error.Update(RemoveCheckpoint(checkpoint, files));
    }
  }
  return first_error;
}

absl::Status CheckpointDir::RemoveCheckpoint(const std::string& checkpoint,
                                             const std::vector<std::string>& files) {
  // The manifest first, for good: a checkpoint without one is none, one without files is damaged.
  absl::Status status;
  if (absl::c_linear_search(files, kManifestFile)) {
    status = disk_.Remove(PathOf(checkpoint, kManifestFile));
    if (status.ok()) status = disk_.SyncDirectory();
  }
  for (const std::string& file : files) {
    if (!status.ok()) break;
    if (file != kManifestFile) status = disk_.Remove(PathOf(checkpoint, file));
    if (absl::IsNotFound(status)) status = absl::OkStatus();  // another rank removes it too
  }
  return status;
}

absl::StatusOr<std::string> CheckpointDir::Read(const std::string& checkpoint,
                                                const CheckpointFile& file) const {
  absl::StatusOr<std::string> contents = disk_.Read(PathOf(checkpoint, file.name()), file.bytes());
  // The disk may be at fault for the moment only.
  if (!contents.ok() && !absl::IsNotFound(contents.status()) &&
      !absl::IsDataLoss(contents.status())) {
    return contents.status();
  }
  const absl::Status status = contents.ok() ? CheckContents(*contents, file) : contents.status();
  if (!status.ok()) return Damaged(checkpoint, file.name(), status);
  return contents;
}

absl::Status CheckpointDir::Verify(const std::string& checkpoint,
                                   const CheckpointManifest& manifest) const {
  for (const CheckpointFile& file : manifest.files()) {
    if (absl::Status status = Read(checkpoint, file).status(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace signpost
