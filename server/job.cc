#include "server/job.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"

namespace signpost {
namespace {

void FillTotals(absl::Span<const OwnedChunk::Progress> chunks, JobStatus& status) {
  OwnedChunk::Progress total;
  for (const OwnedChunk::Progress& chunk : chunks) {
    total.payload_bytes_received += chunk.payload_bytes_received;
    total.payload_bytes_sent += chunk.payload_bytes_sent;
    total.rounds_closed += chunk.rounds_closed;
    total.rounds_skipped += chunk.rounds_skipped;
  }
  status.set_payload_bytes_received(total.payload_bytes_received);
  status.set_payload_bytes_sent(total.payload_bytes_sent);
  status.set_rounds_closed(total.rounds_closed);
  status.set_rounds_skipped(total.rounds_skipped);
}

bool Waits(const OwnedChunk::Progress& chunk) { return !chunk.missing_ranks.empty(); }

// Chunks that wait come first, and of those that do or do not, the one that is furthest behind.
bool ComesFirst(const OwnedChunk::Progress& a, const OwnedChunk::Progress& b) {
  return Waits(a) != Waits(b) ? Waits(a) : a.open_step < b.open_step;
}

// The step to report, and what the chunks that are at it wait for.
void FillWaiting(absl::Span<const OwnedChunk::Progress> chunks, absl::Time now, JobStatus& status) {
  const auto first = std::min_element(chunks.begin(), chunks.end(), ComesFirst);
  if (first == chunks.end()) return;
  status.set_step(first->open_step);
  if (!Waits(*first)) return;

  std::set<uint32_t> missing_ranks;
  absl::Time since = absl::InfiniteFuture();
  for (const OwnedChunk::Progress& chunk : chunks) {
    if (chunk.open_step != first->open_step || !Waits(chunk)) continue;
    missing_ranks.insert(chunk.missing_ranks.begin(), chunk.missing_ranks.end());
    since = std::min(since, chunk.waiting_since);
  }
  status.mutable_waiting_for_ranks()->Add(missing_ranks.begin(), missing_ranks.end());
  status.set_waiting_us(absl::ToInt64Microseconds(std::max(now - since, absl::ZeroDuration())));
}

}  // namespace

OpenSteps OpenStepsOf(const JobState& state) {
  OpenSteps steps;
  for (const ChunkState& chunk : state.chunks) steps[chunk.chunk] = chunk.open_step;
  return steps;
}

Job::Job(JobId id, uint32_t world_size, Layout layout, ShardId shard, SnapshotBell* bell)
    : id_(std::move(id)),
      world_size_(world_size),
      layout_(std::move(layout)),
      shard_(shard),
      shard_of_chunk_(layout_.ShardOfChunk(shard.shard_count)),
      chunks_(layout_.chunks().size()) {
  for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (shard_of_chunk_[chunk] != shard_.shard) continue;
    chunks_[chunk] = std::make_unique<OwnedChunk>(layout_, chunk, world_size_, bell);
  }
}

absl::StatusOr<std::unique_ptr<Job>> Job::Restore(const JobState& state, ShardId shard,
                                                  SnapshotBell* bell, uint64_t generation) {
  absl::StatusOr<Layout> layout = Layout::Create(state.tensors, state.options);
  if (!layout.ok()) return absl::DataLossError(layout.status().message());
  auto job = std::make_unique<Job>(state.id, static_cast<uint32_t>(state.incarnations.size()),
                                   *std::move(layout), shard, bell);
  size_t restored = 0;
  for (const ChunkState& chunk : state.chunks) {
    if (chunk.chunk >= job->chunks_.size() || job->chunks_[chunk.chunk] == nullptr) {
      return absl::DataLossError(
          absl::StrFormat("the state of job '%s' has chunk %d, which is not "
                          "this shard's",
                          state.id.name, chunk.chunk));
    }
    job->chunks_[chunk.chunk]->Restore(chunk, generation);
    ++restored;
  }
  const size_t owned =
      job->chunks_.size() - std::count(job->chunks_.begin(), job->chunks_.end(), nullptr);
  if (restored == owned) return job;
  return absl::DataLossError(
      absl::StrFormat("the state of job '%s' has %d chunks of %d", state.id.name, restored, owned));
}

void Job::Exchange(Frame frame, absl::Time now, OwnedChunk::Done done) {
  absl::Status status = CheckFrame(frame.header, frame.payload.span(), world_size_, layout_);
  if (status.ok()) status = CheckOwnership(frame.header.rank(), frame.header.chunk());
  if (!status.ok()) return done(status);
  OwnedChunk& chunk = *chunks_[frame.header.chunk()];
  chunk.Exchange(std::move(frame), now, std::move(done));
}

absl::StatusOr<ReadErrorResponse> Job::ReadError(const ReadErrorRequest& request) const {
  if (request.rank() >= world_size_ || request.chunk() >= chunks_.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d asked for the error of chunk %d; the job has %d ranks, %d chunks",
                        request.rank(), request.chunk(), world_size_, chunks_.size()));
  }
  absl::Status owned = CheckOwnership(request.rank(), request.chunk());
  if (!owned.ok()) return owned;
  const absl::StatusOr<std::vector<float>> error =
      chunks_[request.chunk()]->ReadError(request.step());
  if (!error.ok()) return error.status();
  ReadErrorResponse response;
  response.set_step(request.step());
  response.set_chunk(request.chunk());
  response.set_payload(error->data(), error->size() * sizeof(float));
  response.set_payload_crc32c(Crc32c(
      {reinterpret_cast<const uint8_t*>(response.payload().data()), response.payload().size()}));
  return response;
}

absl::Status Job::CheckOwnership(uint32_t rank, uint32_t chunk) const {
  const uint32_t owner = shard_of_chunk_[chunk];
  if (owner == shard_.shard) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " sent chunk ", chunk,
                                                 ", which belongs to shard ", owner, ", to shard ",
                                                 shard_.shard, " of ", shard_.shard_count));
}

bool Job::snapshot_due() const {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const auto& chunk) { return chunk != nullptr && chunk->snapshot_due(); });
}

absl::StatusOr<JobState> Job::Save(bool with_answers) {
  JobState state;
  state.id = id_;
  state.shard = shard_;
  state.options = layout_.options();
  state.tensors.assign(layout_.tensors().begin(), layout_.tensors().end());
  for (const std::unique_ptr<OwnedChunk>& chunk : chunks_) {
    if (chunk == nullptr) continue;
    absl::StatusOr<ChunkState> saved = chunk->Save(with_answers);
    if (!saved.ok()) return saved.status();
    state.chunks.push_back(*std::move(saved));
  }
  return state;
}

void Job::SetDurable(const OpenSteps& steps, absl::Time now) {
  for (const auto& [chunk, step] : steps) chunks_[chunk]->SetDurable(step, now);
}

uint64_t Job::open_step() const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const std::unique_ptr<OwnedChunk>& chunk : chunks_) {
    if (chunk != nullptr) least = std::min(least, chunk->progress().open_step);
  }
  return least;
}

void Job::End(const absl::Status& reason) {
  for (const std::unique_ptr<OwnedChunk>& chunk : chunks_) {
    if (chunk != nullptr) chunk->End(reason);
  }
}

void Job::FillStatus(absl::Time now, JobStatus& status) const {
  std::vector<OwnedChunk::Progress> chunks;
  for (const std::unique_ptr<OwnedChunk>& chunk : chunks_) {
    if (chunk != nullptr) chunks.push_back(chunk->progress());
  }
  status.set_job(id_.name);
  status.set_world_size(world_size_);
  status.set_parameters(layout_.elements());
  status.set_chunks(chunks.size());
  FillTotals(chunks, status);
  FillWaiting(chunks, now, status);
}

}  // namespace signpost
