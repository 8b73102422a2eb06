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

absl::StatusOr<SectionReader> Open(absl::string_view file, CheckpointPart& part) {
  if (!absl::StartsWith(file, kCheckpointFirstLine)) {
    return absl::DataLossError("it does not begin as a checkpoint of this version");
  }
  SectionReader reader(file.substr(kCheckpointFirstLine.size()));
  if (absl::Status status = reader.Next(part); !status.ok()) return status;
  return reader;
}

absl::Status CheckAtEnd(const SectionReader& reader) {
  if (reader.at_end()) return absl::OkStatus();
  return absl::DataLossError("something follows its last section");
}

}  // namespace

void AddRankPart(const RankPart& part, SectionWriter& writer) {
  CheckpointPart header;
  header.set_step(part.step);
  header.set_rank(part.rank);
  for (const auto& [chunk, error] : part.aggregator_errors) header.add_chunks(chunk);
  writer.Add(header);
  AddError(part.error, writer);
  for (const auto& [chunk, error] : part.aggregator_errors) AddError(error, writer);
}

absl::StatusOr<SavedRank> DecodeRankPart(absl::string_view file, uint32_t rank,
                                         const Layout& layout) {
  CheckpointPart header;
  absl::StatusOr<SectionReader> reader = Open(file, header);
  if (!reader.ok()) return reader.status();
  if (header.rank() != rank) {
    return absl::DataLossError(absl::StrCat("it is rank ", header.rank(), "'s"));
  }
  SavedRank saved;
  if (absl::Status status = ReadError(*reader, layout.elements(), saved.error); !status.ok()) {
    return status;
  }
  saved.error.resize(layout.elements());
  for (const uint32_t chunk : header.chunks()) {
    if (chunk >= layout.chunks().size()) {
      return absl::DataLossError(absl::StrCat("the job has no chunk ", chunk));
    }
    const absl::Status status =
        ReadError(*reader, layout.chunks()[chunk].elements, saved.aggregator_errors[chunk]);
    if (!status.ok()) return status;
  }
  if (absl::Status status = CheckAtEnd(*reader); !status.ok()) return status;
  return saved;
}

void AddParametersPart(const ParametersPart& part, const Layout& layout, SectionWriter& writer) {
  CheckpointPart header;
  header.set_step(part.step);
  writer.Add(header);
  for (const Parameter& parameter : part.parameters) writer.Add(BytesOf(parameter.values));
  for (const absl::Span<const float> numbers : {part.momentum, part.variance}) {
    for (const Chunk& chunk : layout.chunks()) {
      writer.Add(BytesOf(numbers.subspan(chunk.first_element, chunk.elements)));
    }
  }
}

absl::StatusOr<SavedParameters> DecodeParametersPart(absl::string_view file, const Layout& layout) {
  CheckpointPart header;
  absl::StatusOr<SectionReader> reader = Open(file, header);
  if (!reader.ok()) return reader.status();
  SavedParameters saved;
  absl::Status status;
  for (const Tensor& tensor : layout.tensors()) {
    if (status.ok()) status = ReadNumbers(*reader, ElementCount(tensor), saved.values);
  }
  for (std::vector<float>* numbers : {&saved.momentum, &saved.variance}) {
    for (const Chunk& chunk : layout.chunks()) {
      if (status.ok()) status = ReadNumbers(*reader, chunk.elements, *numbers);
    }
  }
  if (status.ok()) status = CheckAtEnd(*reader);
  if (!status.ok()) return status;
  return saved;
}

}  // namespace signpost
