#include "worker/checkpoint_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint.pb.h"

namespace signpost {
namespace {

bool AllBitsAreZero(absl::Span<const float> values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::bit_cast<uint32_t>(value) == 0; });
}

void AddError(absl::Span<const float> error, SectionWriter& writer) {
  writer.Add(AllBitsAreZero(error) ? "" : BytesOf(error));
}

// Appends a section that must hold this many numbers.
absl::Status ReadNumbers(SectionReader& reader, uint64_t elements, std::vector<float>& to) {
  absl::string_view bytes;
  if (absl::Status status = reader.Next(bytes); !status.ok()) return status;
  if (bytes.size() != elements * sizeof(float)) {
    return absl::DataLossError(absl::StrCat("a section has ", bytes.size(), " bytes, the layout ",
                                            "gives it ", elements * sizeof(float)));
  }
  to.resize(to.size() + elements);
  std::memcpy(to.data() + to.size() - elements, bytes.data(), bytes.size());
  return absl::OkStatus();
}

// As AddError wrote it; zeros stay empty.
absl::Status ReadError(SectionReader& reader, uint64_t elements, std::vector<float>& to) {
  SectionReader ahead = reader;
  absl::string_view bytes;
  if (absl::Status status = ahead.Next(bytes); !status.ok()) return status;
  if (!bytes.empty()) return ReadNumbers(reader, elements, to);
  reader = ahead;
  return absl::OkStatus();
}

// All of a file, with one of the functions that read a part.
template <typename Saved>
absl::StatusOr<Saved> Decode(absl::string_view file, const Layout& layout,
                             absl::StatusOr<Saved> (*read)(SectionReader&, const Layout&)) {
  if (!absl::StartsWith(file, kCheckpointFirstLine)) {
    return absl::DataLossError("it does not begin as a checkpoint of this version");
  }
  SectionReader reader(file.substr(kCheckpointFirstLine.size()));
  absl::StatusOr<Saved> saved = read(reader, layout);
  if (!saved.ok() || reader.at_end()) return saved;
  return absl::DataLossError("something follows its last section");
}

}  // namespace

void AddRankPart(const RankPart& part, SectionWriter& writer) {
  CheckpointPart header;
  header.set_step(part.step);
  header.set_rank(part.rank);
  for (const auto& [chunk, error] : part.aggregator_errors) header.add_chunks(chunk);
  header.set_is_local(!part.local_sum.empty());
  writer.Add(header);
  AddError(part.error, writer);
  for (const auto& [chunk, error] : part.aggregator_errors) AddError(error, writer);
  if (!header.is_local()) return;
  for (const absl::Span<const float> numbers : {part.values, part.momentum, part.local_sum}) {
    writer.Add(BytesOf(numbers));
  }
}

absl::StatusOr<SavedRank> ReadRankPart(SectionReader& reader, const Layout& layout) {
  CheckpointPart header;
  if (absl::Status status = reader.Next(header); !status.ok()) return status;
  SavedRank saved = {.rank = header.rank()};
  if (absl::Status status = ReadError(reader, layout.elements(), saved.error); !status.ok()) {
    return status;
  }
  saved.error.resize(layout.elements());
  for (const uint32_t chunk : header.chunks()) {
    if (chunk >= layout.chunks().size()) {
      return absl::DataLossError(absl::StrCat("the job has no chunk ", chunk));
    }
    if (saved.aggregator_errors.contains(chunk)) {
      return absl::DataLossError(absl::StrCat("chunk ", chunk, " is there twice"));
    }
    const absl::Status status =
        ReadError(reader, layout.chunks()[chunk].elements, saved.aggregator_errors[chunk]);
    if (!status.ok()) return status;
  }
  if (!header.is_local()) return saved;
  for (std::vector<float>* numbers : {&saved.values, &saved.momentum, &saved.local_sum}) {
    if (absl::Status status = ReadNumbers(reader, layout.elements(), *numbers); !status.ok()) {
      return status;
    }
  }
  return saved;
}

absl::StatusOr<SavedRank> DecodeRankPart(absl::string_view file, uint32_t rank,
                                         const Layout& layout) {
  absl::StatusOr<SavedRank> saved = Decode(file, layout, ReadRankPart);
  if (!saved.ok() || saved->rank == rank) return saved;
  return absl::DataLossError(absl::StrCat("it is rank ", saved->rank, "'s"));
}

void AddParametersPart(const ParametersPart& part, const Layout& layout, SectionWriter& writer) {
  CheckpointPart header;
  header.set_step(part.step);
  header.set_has_fresh_variance(!part.fresh_variance.empty());
  header.set_is_local(part.momentum.empty());
  writer.Add(header);
  for (const absl::Span<const float> values : part.values) writer.Add(BytesOf(values));
  for (const absl::Span<const float> numbers :
       {part.momentum, part.variance, part.fresh_variance}) {
    if (numbers.empty()) continue;
    for (const Chunk& chunk : layout.chunks()) {
      writer.Add(BytesOf(numbers.subspan(chunk.first_element, chunk.elements)));
    }
  }
}

absl::StatusOr<SavedParameters> ReadParametersPart(SectionReader& reader, const Layout& layout) {
  CheckpointPart header;
  absl::Status status = reader.Next(header);
  SavedParameters saved;
  for (const Tensor& tensor : layout.tensors()) {
    if (status.ok()) status = ReadNumbers(reader, ElementCount(tensor), saved.values);
  }
  std::vector<std::vector<float>*> fields;
  if (!header.is_local()) fields.push_back(&saved.momentum);
  fields.push_back(&saved.variance);
  if (header.has_fresh_variance()) fields.push_back(&saved.fresh_variance);
  for (std::vector<float>* numbers : fields) {
    for (const Chunk& chunk : layout.chunks()) {
      if (status.ok()) status = ReadNumbers(reader, chunk.elements, *numbers);
    }
  }
  if (!status.ok()) return status;
  return saved;
}

absl::StatusOr<SavedParameters> DecodeParametersPart(absl::string_view file, const Layout& layout) {
  return Decode(file, layout, ReadParametersPart);
}

}  // namespace signpost
