// libFuzzer target: what a rank saved of itself, and the files of a checkpoint.
//
//   input = kind (uint8: 0 a rank's state, 1 its part, 2 the parameters, 3 a manifest, 4 a state's
//           description, 5 what is in a directory of this machine) bytes
//
// Files are tried as section_input.h has them, and once more as they are. A description is JSON.
// Directories are as crafted_directory.h has them.

#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "fuzzing/crafted_directory.h"
#include "fuzzing/memory_disk.h"
#include "fuzzing/section_input.h"
#include "fuzzing/seeds.h"
#include "proto/checkpoint.pb.h"
#include "proto/layout.h"
#include "storage/disk.h"
#include "storage/section_file.h"
#include "worker/checkpoint_dir.h"
#include "worker/checkpoint_file.h"
#include "worker/resume_state.h"
#include "worker/saved_state.h"

namespace signpost {
namespace {

using fuzzing::CraftedDirectory;
using fuzzing::FileOf;
using fuzzing::InputOf;
using fuzzing::MemoryDisk;

constexpr size_t kElements = 24;

// Rank 1 of 2, with tensors of 16 and 8 elements in two chunks.
ResumingWorker TheWorker() {
  static const auto* const tensors = [] {
    auto* made = new std::vector<Tensor>(2);
    for (const auto& [i, elements] : {std::pair{0, 16}, {1, 8}}) {
      (*made)[i].set_name(absl::StrCat("tensor", i));
      (*made)[i].add_shape(elements);
    }
    return made;
  }();
  ResumingWorker worker = {.tensors = *tensors, .rank = 1, .world_size = 2};
  worker.options.set_block_elements(8);
  worker.options.set_chunk_elements(16);
  worker.options.set_gamma(1.35f);
  return worker;
}

const Layout& TheLayout() {
  static const Layout* const layout =
      new Layout(*Layout::Create(TheWorker().tensors, TheWorker().options));
  return *layout;
}

std::string Written(const SectionWriter& writer) {
  std::string file;
  for (const absl::string_view part : writer.parts()) file.append(part.data(), part.size());
  return file;
}

void AddRank(const SavedRank& rank, SectionWriter& writer) {
  AddRankPart({.rank = rank.rank,
               .error = rank.error,
               .aggregator_errors = rank.aggregator_errors,
               .values = rank.values,
               .momentum = rank.momentum,
               .local_sum = rank.local_sum},
              writer);
}

void AddParameters(const SavedParameters& saved, SectionWriter& writer) {
  const absl::Span<const float> values = saved.values;
  const std::vector<absl::Span<const float>> tensors = {values.subspan(0, 16), values.subspan(16)};
  AddParametersPart({.values = tensors,
                     .momentum = saved.momentum,
                     .variance = saved.variance,
                     .fresh_variance = saved.fresh_variance},
                    TheLayout(), writer);
}

std::string RankFile(const SavedRank& rank) {
  SectionWriter writer(kCheckpointFirstLine);
  AddRank(rank, writer);
  return Written(writer);
}

std::string ParametersFile(const SavedParameters& saved) {
  SectionWriter writer(kCheckpointFirstLine);
  AddParameters(saved, writer);
  return Written(writer);
}

void TryRank(const std::string& file) {
  const absl::StatusOr<SavedRank> saved = DecodeRankPart(file, /*rank=*/1, TheLayout());
  if (!saved.ok()) return;
  ABSL_RAW_CHECK(saved->error.size() == kElements, "an error has all elements");
  const std::string written = RankFile(*saved);
  const absl::StatusOr<SavedRank> again = DecodeRankPart(written, /*rank=*/1, TheLayout());
  ABSL_RAW_CHECK(again.ok() && RankFile(*again) == written, "it is the same, written again");
  ABSL_RAW_CHECK(
      BytesOf(absl::MakeConstSpan(again->error)) == BytesOf(absl::MakeConstSpan(saved->error)),
      "to the bit");
}

void TryParameters(const std::string& file) {
  const absl::StatusOr<SavedParameters> saved = DecodeParametersPart(file, TheLayout());
  if (!saved.ok()) return;
  ABSL_RAW_CHECK(saved->values.size() == kElements && saved->variance.size() == kElements,
                 "parameters have all elements");
  const std::string written = ParametersFile(*saved);
  const absl::StatusOr<SavedParameters> again = DecodeParametersPart(written, TheLayout());
  ABSL_RAW_CHECK(again.ok() && ParametersFile(*again) == written, "they are the same again");
  ABSL_RAW_CHECK(
      BytesOf(absl::MakeConstSpan(again->values)) == BytesOf(absl::MakeConstSpan(saved->values)),
      "to the bit");
}

// A bit of it that is flipped, at a place that depends on the file.
std::string Flipped(std::string file) {
  const size_t bit = file.size() * 2654435761 % (file.size() * 8);
  file[bit / 8] = static_cast<char>(file[bit / 8] ^ (1 << bit % 8));
  return file;
}

void TryState(const std::string& state) {
  const absl::StatusOr<ResumeState> resumed = LoadRankState(state, TheWorker());
  if (!resumed.ok()) return;
  ABSL_RAW_CHECK(resumed->values.size() == kElements, "values are those of the layout");
  ABSL_RAW_CHECK(resumed->optimizer.error.size() == kElements, "and so is the error");
  ABSL_RAW_CHECK(resumed->optimizer.momentum.size() == kElements, "and the momentum");
  ABSL_RAW_CHECK(resumed->optimizer.variance.size() == kElements, "and the variance");
  for (const auto& [chunk, error] : resumed->aggregator_errors) {
    ABSL_RAW_CHECK(error.empty() || error.size() == TheLayout().chunks()[chunk].elements,
                   "an aggregator's error is its chunk's");
  }
  ABSL_RAW_CHECK(!LoadRankState(Flipped(state), TheWorker()).ok(), "each bit counts");
}

void TryManifest(const std::string& file) {
  MemoryDisk disk;
  const std::string name = CheckpointId{.step = 4, .attempt = 5}.name();
  disk.files[name + "/manifest"] = file;
  const CheckpointDir directory(disk);
  const auto entries = directory.List();
  if (!entries.ok() || entries->empty() || !entries->front().manifest.ok()) return;
  ABSL_RAW_CHECK(!directory.Verify(name, *entries->front().manifest).ok() ||
                     entries->front().manifest->files().empty(),
                 "files that are not there are missed");
  // It is of some job, or of this one without its files.
  ABSL_RAW_CHECK(!LoadNewestCheckpoint(disk, TheWorker()).ok(), "nothing comes of nothing");
}

void TryDescription(const std::string& text) {
  static const auto* const numbers = new std::vector<float>(16, 0.5f);
  std::vector<TensorFields> fields(2);
  for (const StateField field : {StateField::kExpAvg, StateField::kExpAvgSq, StateField::kError}) {
    fields[0][static_cast<size_t>(field)] = *numbers;
    fields[1][static_cast<size_t>(field)] = absl::MakeConstSpan(*numbers).subspan(8);
  }
  const absl::StatusOr<std::string> made =
      MakeState(text, {.rank = 1, .world_size = 2, .tensors = TheWorker().tensors}, fields);
  if (!made.ok()) return;
  const absl::StatusOr<SavedState> state = SavedState::Read(*made);
  ABSL_RAW_CHECK(state.ok(), "a state that was made can be read");
  ABSL_RAW_CHECK(state->Field(0, StateField::kExpAvg) == *numbers, "and has its fields");
}

SavedRank GoodRank() {
  SavedRank rank = {.rank = 1, .error = std::vector<float>(kElements, 0.25f)};
  rank.aggregator_errors[0] = std::vector<float>(TheLayout().chunks()[0].elements, 0.5f);
  rank.aggregator_errors[1];
  return rank;
}

SavedParameters GoodParameters() {
  const auto numbers = [](float value) { return std::vector<float>(kElements, value); };
  return {numbers(1), numbers(2), numbers(3), numbers(4)};
}

CheckpointManifest GoodManifest() {
  CheckpointManifest manifest;
  manifest.set_step(4);
  manifest.set_job("job");
  manifest.set_world_size(2);
  *manifest.mutable_options() = TheWorker().options;
  const auto tensors = TheWorker().tensors;
  manifest.mutable_tensors()->Add(tensors.begin(), tensors.end());
  return manifest;
}

std::string GoodState() {
  const SavedRank rank = GoodRank();
  const SavedParameters parameters = GoodParameters();
  SectionWriter writer(kRankStateFirstLine);
  writer.Add(GoodManifest());
  AddRank(rank, writer);
  AddParameters(parameters, writer);
  return Written(writer);
}

std::string ManifestFile() {
  CheckpointManifest manifest = GoodManifest();
  manifest.add_files()->set_name("parameters");
  SectionWriter writer(kCheckpointFirstLine);
  writer.Add(manifest);
  return Written(writer);
}

// Opens a crafted directory. Checks that nothing outside the directory changes.
void TryRealDirectory(absl::string_view input) {
  const CheckpointId id = {.step = 4, .attempt = 5}, next = {.step = 6, .attempt = 1};
  const std::vector<CraftedDirectory::Name> names = {
      {id.name() + "/manifest", ManifestFile()},
      {id.name() + "/parameters", ParametersFile(GoodParameters())},
      {id.name() + "/rank-1", RankFile(GoodRank())},
      {id.name() + "/rank-1.sum", "?"},
      {next.name() + "/parameters.tmp", "?"},
      {next.name() + "/rank-1.tmp", "?"},
      {next.name() + "/rank-1", "?"},
      {next.name() + "/rank-1.failed.tmp", "?"},
      {id.name(), "?"},
      {next.name(), "?"}};
  const CraftedDirectory crafted(input, names);
  const std::unique_ptr<Disk> disk = OpenDirectory(crafted.path());
  LoadNewestCheckpoint(*disk, TheWorker()).IgnoreError();
  CheckpointDir directory(*disk);
  directory.List().IgnoreError();
  ABSL_RAW_CHECK(crafted.IsOutsideUnchanged(), "nothing outside is changed");
  SectionWriter part(kCheckpointFirstLine);
  AddRank(GoodRank(), part);
  const absl::Status written = directory.WriteRank(next, 1, part, /*parameters_crc32c=*/0);
  if (written.ok()) {
    ABSL_RAW_CHECK(disk->Read(next.name() + "/rank-1", uint64_t{1} << 20).ok(), "it is there");
  }
  directory.WriteParameters(next, part).IgnoreError();
  directory.WriteFailure(next, 1, 1, absl::UnknownError("?")).IgnoreError();
  directory.RemoveUncommitted(id, 1).IgnoreError();
  directory.Prune(next, {}).IgnoreError();
  ABSL_RAW_CHECK(crafted.IsOutsideUnchanged(), "nothing outside is changed");
}

void TryInput(absl::string_view input) {
  // It has much to say about damage.
  [[maybe_unused]] static auto* const handler = google::protobuf::SetLogHandler(nullptr);
  if (input.empty()) return;
  const absl::string_view bytes = input.substr(1);
  const int kind = static_cast<uint8_t>(input[0]) % 6;
  if (kind == 4) return TryDescription(std::string(bytes));
  if (kind == 5) return TryRealDirectory(bytes);
  const absl::string_view first_line = kind == 0 ? kRankStateFirstLine : kCheckpointFirstLine;
  void (*const kTry[])(const std::string&) = {TryState, TryRank, TryParameters, TryManifest};
  kTry[kind](FileOf(first_line, bytes));
  kTry[kind](absl::StrCat(first_line, bytes));
}

}  // namespace

std::vector<std::string> fuzzing::Seeds() {
  const std::string state = GoodState();
  ABSL_RAW_CHECK(LoadRankState(state, TheWorker()).ok(), "the seed is good");
  return {std::string(1, '\0') + InputOf(kRankStateFirstLine, state),
          "\1" + InputOf(kCheckpointFirstLine, RankFile(GoodRank())),
          "\2" + InputOf(kCheckpointFirstLine, ParametersFile(GoodParameters())),
          "\3" + InputOf(kCheckpointFirstLine, ManifestFile()),
          "\4" + SavedState::Read(state)->Description(),
          std::string("\5\1\0\0\1\1\0\2\2\0\2\4\0\4\5\0\6\6\0", 19),
          std::string("\5\3\10\0\3\11\0", 7)};
}

}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
