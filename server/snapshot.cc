#include "server/snapshot.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/payload.h"
#include "proto/snapshot.pb.h"
#include "storage/section_file.h"

namespace signpost {
namespace {

constexpr absl::string_view kMagic = "signpost snapshot 1\n";

SnapshotHeader HeaderOf(const JobState& state) {
  SnapshotHeader header;
  header.set_job(state.id.name);
  header.set_epoch(state.id.epoch);
  header.set_shard(state.shard.shard);
  header.set_shard_count(state.shard.shard_count);
  *header.mutable_options() = state.options;
  header.mutable_tensors()->Add(state.tensors.begin(), state.tensors.end());
  header.mutable_incarnations()->Add(state.incarnations.begin(), state.incarnations.end());
  header.mutable_left_ranks()->Add(state.left_ranks.begin(), state.left_ranks.end());
  header.set_chunks(state.chunks.size());
  return header;
}

SnapshotChunk HeaderOf(const ChunkState& state) {
  SnapshotChunk header;
  header.set_chunk(state.chunk);
  header.set_open_step(state.open_step);
  if (state.last_answer == nullptr) return header;
  *header.mutable_last_answer() = state.last_answer->header;
  for (const Contribution& contribution : state.last_contributions) {
    SnapshotContribution& to = *header.add_last_contributions();
    to.set_codec(contribution.codec);
    to.set_error_scale(contribution.error_scale);
    to.set_rates_crc32c(contribution.rates_crc32c);
    to.set_payload_crc32c(contribution.payload_crc32c);
  }
  return header;
}

void Add(const ChunkState& state, SectionWriter& writer) {
  writer.Add(HeaderOf(state));
  writer.Add(BytesOf(absl::MakeConstSpan(state.error)));
  writer.Add(state.last_answer == nullptr ? "" : BytesOf(state.last_answer->payload.span()));
}

absl::Status CheckChunk(const SnapshotChunk& header, absl::string_view error,
                        absl::string_view payload, const Layout& layout, size_t world_size) {
  if (header.chunk() >= layout.chunks().size()) {
    return absl::DataLossError(absl::StrCat("the job has no chunk ", header.chunk()));
  }
  const uint64_t error_bytes = uint64_t{4} * layout.chunks()[header.chunk()].elements;
  const Codec codec = header.last_answer().codec();
  const bool known = IsDense(codec) || codec == ONE_BIT || codec == SKIP || codec == RESTORE;
  const bool has_answer = header.has_last_answer();
  const bool has_payload = has_answer && codec != RESTORE;
  if ((!error.empty() && error.size() != error_bytes) || (has_answer && !known) ||
      payload.size() != (has_payload ? layout.PayloadBytes(codec, header.chunk()) : 0) ||
      header.last_contributions_size() != (has_answer ? static_cast<int>(world_size) : 0)) {
    return absl::DataLossError(absl::StrCat("the parts of chunk ", header.chunk(),
                                            " do not have the sizes that the layout gives them"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ChunkState> ReadChunk(SectionReader& reader, const Layout& layout,
                                     size_t world_size) {
  SnapshotChunk header;
  absl::string_view error, payload;
  absl::Status status = reader.Next(header);
  if (status.ok()) status = reader.Next(error);
  if (status.ok()) status = reader.Next(payload);
  if (status.ok()) status = CheckChunk(header, error, payload, layout, world_size);
  if (!status.ok()) return status;

  ChunkState state;
  state.chunk = header.chunk();
  state.open_step = header.open_step();
  state.error.resize(error.size() / sizeof(float));
  if (!error.empty()) std::memcpy(state.error.data(), error.data(), error.size());
  if (!header.has_last_answer()) return state;
  auto answer = std::make_shared<Answer>(Answer{header.last_answer(), Payload(payload.size())});
  std::memcpy(answer->payload.data(), payload.data(), payload.size());
  state.last_answer = std::move(answer);
  for (const SnapshotContribution& from : header.last_contributions()) {
    state.last_contributions.push_back(
        {from.codec(), from.error_scale(), from.rates_crc32c(), from.payload_crc32c()});
  }
  return state;
}

absl::StatusOr<JobState> Decode(absl::string_view file) {
  if (!absl::StartsWith(file, kMagic)) {
    return absl::DataLossError("it does not begin as a snapshot of this version");
  }
  SectionReader reader(file.substr(kMagic.size()));
  SnapshotHeader header;
  if (absl::Status status = reader.Next(header); !status.ok()) return status;
  JobState state;
  state.id = {header.job(), header.epoch()};
  state.shard = {header.shard(), header.shard_count()};
  state.options = header.options();
  state.tensors.assign(header.tensors().begin(), header.tensors().end());
  state.incarnations.assign(header.incarnations().begin(), header.incarnations().end());
  state.left_ranks.assign(header.left_ranks().begin(), header.left_ranks().end());

  for (const uint32_t rank : state.left_ranks) {
    if (rank >= state.incarnations.size()) {
      return absl::DataLossError(absl::StrCat("the job has no rank ", rank));
    }
  }
  const absl::StatusOr<Layout> layout = Layout::Create(state.tensors, state.options);
  if (!layout.ok()) return absl::DataLossError(layout.status().message());
  for (uint32_t i = 0; i < header.chunks(); ++i) {
    absl::StatusOr<ChunkState> chunk = ReadChunk(reader, *layout, state.incarnations.size());
    if (!chunk.ok()) return chunk.status();
    state.chunks.push_back(*std::move(chunk));
  }
  if (!reader.at_end()) return absl::DataLossError("something follows its last section");
  return state;
}

}  // namespace

absl::Status WriteSnapshot(Disk& disk, const std::string& name, const JobState& state) {
  SectionWriter writer(kMagic);
  writer.Add(HeaderOf(state));
  for (const ChunkState& chunk : state.chunks) Add(chunk, writer);
  return Replace(disk, name, writer.parts());
}

absl::StatusOr<JobState> ReadSnapshot(Disk& disk, const std::string& name) {
  absl::StatusOr<std::string> file = disk.Read(name);
  if (!file.ok()) return file.status();
  absl::StatusOr<JobState> state = Decode(*file);
  if (state.ok()) return state;
  return absl::DataLossError(absl::StrCat(name, " is damaged: ", state.status().message()));
}

}  // namespace signpost
