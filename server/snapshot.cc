#include "server/snapshot.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/payload.h"
#include "proto/snapshot.pb.h"
#include "storage/block_vector.h"
#include "storage/section_file.h"

namespace signpost {
namespace {

constexpr absl::string_view kMagic = "signpost snapshot 2\n";
constexpr absl::string_view kLateRoundsMagic = "signpost late rounds 1\n";
// A job may be as large as memory has room for.
constexpr uint64_t kMostSnapshotBytes = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kMostLateRoundsBytes = uint64_t{256} << 20;

SnapshotHeader HeaderOf(const JobState& state, size_t chunks) {
  SnapshotHeader header;
  header.set_job(state.id.name);
  header.set_epoch(state.id.epoch);
  header.set_shard(state.shard.shard);
  header.set_shard_count(state.shard.shard_count);
  *header.mutable_options() = state.options;
  header.mutable_tensors()->Add(state.tensors.begin(), state.tensors.end());
  header.mutable_incarnations()->Add(state.incarnations.begin(), state.incarnations.end());
  header.mutable_left_ranks()->Add(state.left_ranks.begin(), state.left_ranks.end());
  header.mutable_given_up_ranks()->Add(state.given_up_ranks.begin(), state.given_up_ranks.end());
  header.mutable_returning_ranks()->Add(state.returning_ranks.begin(), state.returning_ranks.end());
  header.set_chunks(chunks);
  return header;
}

SnapshotContribution MessageOf(const Contribution& contribution) {
  SnapshotContribution to;
  to.set_codec(contribution.codec);
  to.set_error_scale(contribution.error_scale);
  to.set_loss_unit(contribution.loss_unit);
  to.set_rates_crc32c(contribution.rates_crc32c);
  to.set_payload_crc32c(contribution.payload_crc32c);
  return to;
}

SnapshotChunk HeaderOf(const ChunkState& state) {
  SnapshotChunk header;
  header.set_chunk(state.chunk);
  header.set_open_step(state.open_step);
  for (const ClosedRound& round : state.closed) {
    SnapshotRound& to = *header.add_closed_rounds();
    *to.mutable_answer() = round.answer->header;
    *to.mutable_rates() = round.rates;
    for (const Contribution& contribution : round.contributions) {
      *to.add_contributions() = MessageOf(contribution);
    }
  }
  return header;
}

// Has the error, which follows the header's section, begin at a block. `offset` is the header's.
void Pad(uint64_t offset, SnapshotChunk& header) {
  constexpr size_t kLeast = 128;            // of that many, up to 16383,
  constexpr size_t kTagAndLengthBytes = 3;  // they have three bytes before them
  const uint64_t begin =
      offset + 2 * SectionStream::kFrameBytes + header.ByteSizeLong() + kTagAndLengthBytes + kLeast;
  header.mutable_padding()->resize(kLeast + (kBlockBytes - begin % kBlockBytes) % kBlockBytes);
}

absl::Status Add(const ChunkState& state, SectionStream& stream) {
  SnapshotChunk header = HeaderOf(state);
  const absl::string_view error = BytesOf(absl::MakeConstSpan(state.error));
  if (error.size() >= kBlockBytes) Pad(stream.bytes(), header);
  absl::Status status = stream.Add(header);
  if (status.ok()) status = stream.Add(error);
  for (const ClosedRound& round : state.closed) {
    if (status.ok()) status = stream.Add(BytesOf(round.answer->payload.span()));
  }
  return status;
}

absl::Status CheckChunk(const SnapshotChunk& header, absl::string_view error,
                        const Layout& layout) {
  if (header.chunk() >= layout.chunks().size()) {
    return absl::DataLossError(absl::StrCat("the job has no chunk ", header.chunk()));
  }
  if (static_cast<uint64_t>(header.closed_rounds_size()) > header.open_step()) {
    return absl::DataLossError(absl::StrCat("chunk ", header.chunk(), " has ",
                                            header.closed_rounds_size(),
                                            " closed rounds before step ", header.open_step()));
  }
  const uint64_t error_bytes = uint64_t{4} * layout.chunks()[header.chunk()].elements;
  if (!error.empty() && error.size() != error_bytes) {
    return absl::DataLossError(absl::StrCat("the error of chunk ", header.chunk(), " has ",
                                            error.size(), " bytes, wanted ", error_bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckRound(const SnapshotRound& round, uint64_t step, absl::string_view payload,
                        uint32_t chunk, const Layout& layout, size_t world_size) {
  const Codec codec = round.answer().codec();
  const bool is_known = HasNumbers(codec) || codec == SKIP || codec == RESTORE;
  const uint64_t bytes = codec == RESTORE || !is_known ? 0 : layout.PayloadBytes(codec, chunk);
  if (is_known && round.answer().step() == step && round.answer().chunk() == chunk &&
      payload.size() == bytes && round.contributions_size() == static_cast<int>(world_size)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("what it has of step ", step, ", chunk ", chunk, " does not fit together"));
}

absl::StatusOr<ClosedRound> ReadRound(const SnapshotRound& from, uint64_t step, uint32_t chunk,
                                      SectionReader& reader, const Layout& layout,
                                      size_t world_size) {
  absl::string_view payload;
  absl::Status status = reader.Next(payload);
  if (status.ok()) status = CheckRound(from, step, payload, chunk, layout, world_size);
  if (!status.ok()) return status;
  auto answer = std::make_shared<Answer>(Answer{from.answer(), Payload(payload.size())});
  if (!payload.empty()) std::memcpy(answer->payload.data(), payload.data(), payload.size());
  ClosedRound round;
  round.answer = std::move(answer);
  round.rates = from.rates();
  for (const SnapshotContribution& contribution : from.contributions()) {
    round.contributions.push_back({contribution.codec(), contribution.error_scale(),
                                   contribution.loss_unit(), contribution.rates_crc32c(),
                                   contribution.payload_crc32c()});
  }
  return round;
}

absl::StatusOr<ChunkState> ReadChunk(SectionReader& reader, const Layout& layout,
                                     size_t world_size) {
  SnapshotChunk header;
  absl::string_view error;
  absl::Status status = reader.Next(header);
  if (status.ok()) status = reader.Next(error);
  if (status.ok()) status = CheckChunk(header, error, layout);
  if (!status.ok()) return status;

  ChunkState state;
  state.chunk = header.chunk();
  state.open_step = header.open_step();
  state.error.resize(error.size() / sizeof(float));
  if (!error.empty()) std::memcpy(state.error.data(), error.data(), error.size());
  uint64_t step = state.open_step - header.closed_rounds_size();
  for (const SnapshotRound& from : header.closed_rounds()) {
    absl::StatusOr<ClosedRound> round =
        ReadRound(from, step++, state.chunk, reader, layout, world_size);
    if (!round.ok()) return round.status();
    state.closed.push_back(*std::move(round));
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
  state.given_up_ranks.assign(header.given_up_ranks().begin(), header.given_up_ranks().end());
  state.returning_ranks.assign(header.returning_ranks().begin(), header.returning_ranks().end());

  for (const auto ranks :
       {&JobState::left_ranks, &JobState::given_up_ranks, &JobState::returning_ranks}) {
    for (const uint32_t rank : state.*ranks) {
      if (rank >= state.incarnations.size()) {
        return absl::DataLossError(absl::StrCat("the job has no rank ", rank));
      }
    }
  }
  const absl::StatusOr<Layout> layout = Layout::Create(state.tensors, state.options);
  if (!layout.ok()) return absl::DataLossError(layout.status().message());
  for (uint32_t i = 0; i < header.chunks(); ++i) {
    absl::StatusOr<ChunkState> chunk = ReadChunk(reader, *layout, state.incarnations.size());
    if (!chunk.ok()) return chunk.status();
    if (i > 0 && chunk->chunk <= state.chunks.back().chunk) {
      return absl::DataLossError(absl::StrCat("chunk ", chunk->chunk, " is out of order"));
    }
    state.chunks.push_back(*std::move(chunk));
  }
  if (!reader.at_end()) return absl::DataLossError("something follows its last section");
  return state;
}

}  // namespace

absl::Status WriteSnapshot(Disk& disk, const std::string& name, const JobState& job,
                           const ChunkSource& source, ChunkState& scratch) {
  return Replace(disk, name, [&](Disk::Append append) {
    SectionStream stream(append);
    absl::Status status = stream.Begin(kMagic);
    if (status.ok()) status = stream.Add(HeaderOf(job, source.chunks.size()));
    for (const uint32_t chunk : source.chunks) {
      if (status.ok()) status = source.save(chunk, scratch);
      if (status.ok()) status = Add(scratch, stream);
    }
    return status;
  });
}

absl::Status WriteLateRounds(Disk& disk, const std::string& name, const LateRounds& rounds) {
  SnapshotLateRounds message;
  for (const auto& [chunk, late_ranks] : rounds) {
    for (const auto& [step, ranks] : late_ranks) {
      SnapshotLateRound& round = *message.add_rounds();
      round.set_chunk(chunk);
      round.set_step(step);
      round.mutable_late_ranks()->Add(ranks.begin(), ranks.end());
    }
  }
  SectionWriter writer(kLateRoundsMagic);
  writer.Add(message);
  return Replace(disk, name, writer.parts());
}

absl::StatusOr<LateRounds> ReadLateRounds(Disk& disk, const std::string& name) {
  absl::StatusOr<std::string> file = disk.Read(name, kMostLateRoundsBytes);
  if (absl::IsNotFound(file.status())) return LateRounds();
  if (!file.ok()) return file.status();
  SnapshotLateRounds message;
  absl::Status status = absl::DataLossError("it does not begin as late rounds of this version");
  if (absl::StartsWith(*file, kLateRoundsMagic)) {
    SectionReader reader(absl::string_view(*file).substr(kLateRoundsMagic.size()));
    status = reader.Next(message);
    if (status.ok() && !reader.at_end()) {
      status = absl::DataLossError("something follows its last section");
    }
  }
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat(name, " is damaged: ", status.message()));
  }
  LateRounds rounds;
  for (const SnapshotLateRound& round : message.rounds()) {
    rounds[round.chunk()][round.step()].assign(round.late_ranks().begin(),
                                               round.late_ranks().end());
  }
  return rounds;
}

absl::StatusOr<JobState> ReadSnapshot(Disk& disk, const std::string& name) {
  absl::StatusOr<std::string> file = disk.Read(name, kMostSnapshotBytes);
  if (!file.ok()) return file.status();
  absl::StatusOr<JobState> state = Decode(*file);
  if (state.ok()) return state;
  return absl::DataLossError(absl::StrCat(name, " is damaged: ", state.status().message()));
}

}  // namespace signpost
