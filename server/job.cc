#include "server/job.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "log/log.h"
#include "proto/codec.h"
#include "proto/custom_codec.h"
#include "proto/payload_pool.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

void FillTotals(absl::Span<const OwnedChunk::Progress> chunks, JobStatus& status) {
  OwnedChunk::Progress total;
  for (const OwnedChunk::Progress& chunk : chunks) {
    total.rounds_closed += chunk.rounds_closed;
    total.rounds_skipped += chunk.rounds_skipped;
    total.rounds_closed_late += chunk.rounds_closed_late;
  }
  status.set_rounds_closed(total.rounds_closed);
  status.set_rounds_skipped(total.rounds_skipped);
  status.set_rounds_closed_late(total.rounds_closed_late);
}

bool Waits(const OwnedChunk::Progress& chunk) { return !chunk.missing_ranks.empty(); }

// Chunks that wait come first, and of those that do or do not, the one that is furthest behind.
bool ComesFirst(const OwnedChunk::Progress& a, const OwnedChunk::Progress& b) {
  return Waits(a) != Waits(b) ? Waits(a) : a.open_step < b.open_step;
}

// The step to report, and what the chunks that are at it wait for.
void FillWaiting(absl::Span<const OwnedChunk::Progress> chunks,
                 const std::vector<uint32_t>& absent_ranks, absl::Time now, JobStatus& status) {
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
  for (const uint32_t rank : absent_ranks) missing_ranks.erase(rank);
  status.mutable_waiting_for_ranks()->Add(missing_ranks.begin(), missing_ranks.end());
  status.set_waiting_us(absl::ToInt64Microseconds(std::max(now - since, absl::ZeroDuration())));
}

void FillHeld(absl::Span<const OwnedChunk::Progress> chunks, absl::Time now, JobStatus& status) {
  absl::Time since = absl::InfiniteFuture();
  for (const OwnedChunk::Progress& chunk : chunks) since = std::min(since, chunk.held_since);
  if (since < now) status.set_held_us(absl::ToInt64Microseconds(now - since));
}

std::vector<uint32_t> RanksThat(absl::Span<const RollEntry> entries,
                                absl::FunctionRef<bool(const RollEntry& rank)> is_one) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < entries.size(); ++rank) {
    if (is_one(entries[rank])) ranks.push_back(rank);
  }
  return ranks;
}

void Fill(absl::Span<const RollEntry> entries, Attendance& attendance) {
  for (uint32_t rank = 0; rank < entries.size(); ++rank) {
    attendance.is_absent[rank] = entries[rank].is_absent;
    attendance.absent_since[rank] = entries[rank].absent_since;
    attendance.has_left[rank] = entries[rank].has_left;
    attendance.first_step[rank] = entries[rank].first_step;
  }
}

}  // namespace

uint64_t LargestPayload(const Layout& layout, uint32_t chunk) {
  // In int8, a tensor of one element takes more than its 4 bytes.
  const uint64_t ours =
      std::max(layout.PayloadBytes(FLOAT32, chunk), layout.PayloadBytes(INT8, chunk));
  if (!layout.options().has_custom_codec()) return ours;
  return std::max(ours, layout.PayloadBytes(CUSTOM, chunk));
}

uint64_t ReservedBytes(uint32_t world_size, const Layout& layout, ShardId shard) {
  const std::vector<uint32_t> shard_of_chunk = layout.ShardOfChunk(shard.shard_count);
  uint64_t kept = 0, largest = 0;
  for (uint32_t chunk = 0; chunk < shard_of_chunk.size(); ++chunk) {
    if (shard_of_chunk[chunk] != shard.shard) continue;
    const uint64_t frame = PayloadPool::Footprint(LargestPayload(layout, chunk));
    const uint64_t error = PayloadPool::Footprint(layout.PayloadBytes(FLOAT32, chunk));
    kept += error + frame;
    largest = std::max(largest, frame);
  }
  return kept + (uint64_t{world_size} + 2) * largest;
}

OpenSteps OpenStepsOf(const JobState& state) {
  OpenSteps steps;
  for (const ChunkState& chunk : state.chunks) steps[chunk.chunk] = chunk.open_step;
  return steps;
}

RollEntry Roll::entry(uint32_t rank) const {
  absl::MutexLock lock(&mutex_);
  return ranks_[rank];
}

std::vector<RollEntry> Roll::entries() const {
  absl::MutexLock lock(&mutex_);
  return ranks_;
}

std::vector<uint32_t> Roll::absent_ranks() const {
  return RanksThat(entries(),
                   [](const RollEntry& rank) { return rank.is_absent || rank.has_left; });
}

std::vector<uint32_t> Roll::returning_ranks() const {
  return RanksThat(entries(), [](const RollEntry& rank) {
    return rank.comes_back && !rank.has_given_up && !rank.has_left;
  });
}

std::vector<uint32_t> Roll::maybe_returning_ranks() const {
  return RanksThat(entries(), [](const RollEntry& rank) {
    return rank.may_come_back() && !rank.has_given_up && !rank.has_left;
  });
}

std::vector<uint32_t> Roll::given_up_ranks() const {
  return RanksThat(entries(),
                   [](const RollEntry& rank) { return rank.has_given_up && !rank.has_left; });
}

uint32_t Roll::Hear(uint32_t rank, uint64_t step) {
  absl::MutexLock lock(&mutex_);
  RollEntry& heard = ranks_[rank];
  // One that came while its process gave up says nothing of the rank.
  if (!heard.has_given_up) {
    heard.is_absent = heard.comes_back = heard.came_back = heard.lacks_state = false;
    heard.was_heard = true;
    heard.newest_step = std::max(heard.newest_step, step);
  }
  return absl::c_count_if(ranks_, [](const RollEntry& r) { return r.is_absent || r.has_left; });
}

void Roll::SetAbsent(absl::Span<const uint32_t> ranks, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  for (const uint32_t rank : ranks) {
    if (!std::exchange(ranks_[rank].is_absent, true)) ranks_[rank].absent_since = now;
  }
}

uint32_t Roll::SetLeft(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_[rank].has_left = true;
  return absl::c_count_if(ranks_, [](const RollEntry& r) { return r.has_left; });
}

void Roll::Return(uint32_t rank, uint64_t first_step, bool is_same_process) {
  absl::MutexLock lock(&mutex_);
  RollEntry& back = ranks_[rank];
  back.is_absent = back.comes_back = true;
  back.has_left = back.was_heard = back.has_given_up = false;
  back.first_step = first_step;
  // The same one may have had the answer to an earlier call, which this is a copy of.
  if (is_same_process) return;
  back.lacks_state = true;
  ++back.returns;
}

void Roll::GiveState(uint32_t rank, uint32_t returns) {
  absl::MutexLock lock(&mutex_);
  if (returns == ranks_[rank].returns) ranks_[rank].lacks_state = false;
}

void Roll::HearReturning(uint32_t rank, uint64_t first_step) {
  absl::MutexLock lock(&mutex_);
  RollEntry& heard = ranks_[rank];
  heard.first_step = std::max(heard.first_step, first_step);
  // An old copy says nothing of a rank that takes part.
  if (!heard.was_heard) heard.comes_back = true;
}

void Roll::SetCameBack(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_[rank].came_back = true;
}

void Roll::GiveUp(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_[rank].is_absent = ranks_[rank].has_given_up = true;
}

bool Roll::HaveLeftBut(const std::set<uint32_t>& ranks) const {
  absl::MutexLock lock(&mutex_);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    // One that has sent frames since is there: what waits is an old copy.
    const RollEntry& other = ranks_[rank];
    const bool has_no_state = ranks.contains(rank) && !other.was_heard;
    if (!other.has_left && !other.has_given_up && !has_no_state) return false;
  }
  return true;
}

Job::Job(JobId id, uint32_t world_size, Layout layout, ShardId shard, Bell* bell)
    : id_(std::move(id)),
      world_size_(world_size),
      layout_(std::move(layout)),
      shard_(shard),
      shard_of_chunk_(layout_.ShardOfChunk(shard.shard_count)),
      reserved_bytes_(ReservedBytes(world_size_, layout_, shard_)),
      roll_(world_size),
      state_desk_(layout_) {
  for (uint32_t chunk = 0; chunk < shard_of_chunk_.size(); ++chunk) {
    if (shard_of_chunk_[chunk] != shard_.shard) continue;
    chunks_.try_emplace(chunk, layout_, chunk, world_size_, bell);
  }
}

absl::StatusOr<std::unique_ptr<Job>> Job::Restore(JobState state, ShardId shard, Bell* bell,
                                                  uint64_t generation, absl::Time now) {
  absl::StatusOr<Layout> layout = Layout::Create(state.tensors, state.options);
  if (!layout.ok()) return absl::DataLossError(layout.status().message());
  if (state.options.has_custom_codec()) {
    absl::StatusOr<std::shared_ptr<const NumberCodec>> codec =
        OpenCodecOf(state.options.custom_codec(), state.options.block_elements());
    if (!codec.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job '", state.id.name, "': ", codec.status().message()));
    }
    layout->set_custom_codec(*std::move(codec));
  }
  auto job = std::make_unique<Job>(state.id, static_cast<uint32_t>(state.incarnations.size()),
                                   *std::move(layout), shard, bell);
  job->has_trained_ = true;  // or may have, since that was written down
  for (ChunkState& chunk : state.chunks) {
    const auto owned = job->chunks_.find(chunk.chunk);
    if (owned == job->chunks_.end()) {
      return absl::DataLossError(
          absl::StrFormat("the state of job '%s' has chunk %d, which is not "
                          "this shard's",
                          state.id.name, chunk.chunk));
    }
    owned->second.Restore(std::move(chunk), generation, now);
  }
  if (state.chunks.size() == job->chunks_.size()) return job;
  return absl::DataLossError(absl::StrFormat("the state of job '%s' has %d chunks of %d",
                                             state.id.name, state.chunks.size(),
                                             job->chunks_.size()));
}

bool Job::Exchange(Frame frame, absl::Time now, OwnedChunk::Done done, Room::Offer offer) {
  if (absl::Status status = CheckAccepts(frame); !status.ok()) {
    done(status);
    return false;
  }
  if (frame.header.codec() == STATE) {
    const std::optional<uint64_t> generation =
        chunks_.at(frame.header.chunk()).GenerationOfState(frame.header);
    done(generation ? state_desk_.Give(std::move(frame), *generation)
                    : StateDesk::Receipt(frame.header));
    return false;
  }
  // A late frame of a process that has given up says nothing of its rank.
  if (absl::Status status = chunks_.at(frame.header.chunk()).CheckSender(frame.header);
      !status.ok()) {
    done(status);
    return false;
  }
  return IsContribution(frame.header.codec())
             ? Contribute(std::move(frame), now, std::move(done), offer)
             : HelpBack(std::move(frame), now, std::move(done));
}

absl::Status Job::CheckAccepts(const Frame& frame) const {
  const FrameHeader& header = frame.header;
  absl::Status status = CheckFrame(header, frame.payload.span(), world_size_, layout_);
  if (status.ok()) status = CheckOwnership(header.rank(), header.chunk());
  if (!status.ok() || IsContribution(header.codec()) || takes_back()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", header.rank(), " sent a ", CodecName(header.codec()),
                   " frame, but no rank can come back to this job: it has no round deadline"));
}

bool Job::HelpBack(Frame frame, absl::Time now, OwnedChunk::Done done) {
  OwnedChunk& chunk = chunks_.at(frame.header.chunk());
  const uint32_t rank = frame.header.rank();
  // Who knows of a process has come back before, and listens again.
  if (frame.header.generation() == 0) {
    chunk.SetReturning(rank, /*has_state=*/frame.header.codec() != FETCH);
    // Other shards may be further; and this process may not be the one that let it in.
    roll_.HearReturning(rank, frame.header.answered_steps());
  }
  const bool fetches = frame.header.codec() == FETCH;
  if (fetches) {
    auto give = [this, rank, returns = roll_.entry(rank).returns,
                 done = std::move(done)](absl::StatusOr<OwnedChunk::Reply> state) mutable {
      if (state.ok()) roll_.GiveState(rank, returns);
      done(std::move(state));
    };
    state_desk_.Fetch(frame.header, std::move(give));
  } else {
    chunk.Exchange(std::move(frame), now, std::move(done));
  }
  EndReturnsIfAlone();
  return fetches;
}

bool Job::Contribute(Frame frame, absl::Time now, OwnedChunk::Done done, Room::Offer offer) {
  const FrameHeader& header = frame.header;
  OwnedChunk& chunk = chunks_.at(header.chunk());
  if (header.step() >= layout_.options().first_step()) has_trained_ = true;
  const uint32_t absent = roll_.Hear(header.rank(), header.step());
  if (takes_back() && chunk.Meet(header)) {
    const std::vector<uint32_t> wanted = state_desk_.TakeWanted(header, now);
    if (!wanted.empty()) {
      done(StateDesk::Ask(header, wanted));
      return false;
    }
  }
  const uint64_t bytes = PayloadPool::Footprint(frame.payload.size());
  if (offer.room != nullptr && offer.room->taken() + bytes > offer.most &&
      IsFurthestBehind(header.step(), header.chunk())) {
    offer.room = nullptr;
  }
  chunk.Exchange(std::move(frame), now, std::move(done), offer);
  if (absent == 0 || round_deadline() == absl::InfiniteDuration()) return false;
  const uint32_t missing = chunk.missing();
  return 0 < missing && missing <= absent;
}

bool Job::IsFurthestBehind(uint64_t step, uint32_t chunk) const {
  return absl::c_none_of(chunks_, [&](const auto& other) {
    return std::make_pair(other.second.open_step(), other.first) < std::make_pair(step, chunk);
  });
}

void Job::GiveRoomBack(const absl::Status& reason) {
  for (auto& [number, chunk] : chunks_) chunk.GiveRoomBack(reason);
}

absl::Duration Job::round_deadline() const { return RoundDeadlineOf(layout_.options()); }

uint32_t Job::min_workers() const { return MinWorkersOf(layout_.options(), world_size_); }

bool Job::LeaveOut(absl::Duration restart_grace, std::set<uint32_t> gone, absl::Time now) {
  Attendance attendance = {.is_absent = std::vector<bool>(world_size_),
                           .absent_since = std::vector<absl::Time>(world_size_),
                           .has_left = std::vector<bool>(world_size_),
                           .first_step = std::vector<uint64_t>(world_size_),
                           .waits_in_vain = state_desk_.RanksInVain(now),
                           .gone = std::move(gone),
                           .restart_grace = restart_grace};
  Fill(roll_.entries(), attendance);
  const std::vector<bool> was_absent = attendance.is_absent;
  std::map<uint32_t, uint32_t> late_in;  // by rank: the first chunk
  for (auto& [number, chunk] : chunks_) {
    const std::vector<uint32_t> late_ranks = chunk.LeaveOut(attendance, now);
    if (late_ranks.empty()) continue;
    for (const uint32_t rank : late_ranks) late_in.try_emplace(rank, number);
    roll_.SetAbsent(late_ranks, now);
    Fill(roll_.entries(), attendance);
  }
  for (const auto& [rank, chunk] : late_in) {
    if (was_absent[rank] || attendance.has_left[rank]) continue;
    log::WriteEvent(log::Level::kWarning,
                    "a rank is late: rounds close without it until it is back",
                    {.job = id_.name,
                     .step = chunks_.at(chunk).open_step(),
                     .chunk = chunk,
                     .worker = rank,
                     .shard = shard_.shard});
  }
  return !late_in.empty();
}

LateRounds Job::late_rounds() const {
  LateRounds rounds;
  for (const auto& [number, chunk] : chunks_) rounds[number] = chunk.late_ranks();
  return rounds;
}

void Job::SetLateRoundsDurable(absl::Time now) {
  for (auto& [number, chunk] : chunks_) chunk.SetLateRanksDurable(now);
}

bool Job::has_begun() const {
  return absl::c_any_of(
      chunks_, [](const auto& chunk) { return chunk.second.progress().rounds_closed > 0; });
}

bool Job::is_absent(uint32_t rank, absl::Time now) const {
  const RollEntry entry = roll_.entry(rank);
  return entry.is_absent || entry.has_left || absl::c_any_of(chunks_, [&](const auto& chunk) {
           return chunk.second.IsOverdue(rank, now);
         });
}

OpenSteps Job::Withdraw(uint32_t rank, uint64_t incarnation) {
  OpenSteps needed;
  for (auto& [number, chunk] : chunks_) needed[number] = chunk.Withdraw(rank, incarnation);
  return needed;
}

void Job::Return(uint32_t rank, uint64_t first_step, bool is_same_process) {
  roll_.Return(rank, first_step, is_same_process);
  if (is_same_process) return;
  for (auto& [number, chunk] : chunks_) chunk.Return(rank);
}

void Job::AskForStates(const std::set<uint32_t>& gone, absl::Time now) {
  std::vector<uint32_t> wanted;
  const auto is_asked = [&](const FrameHeader& header) {
    if (!gone.contains(header.rank())) wanted = state_desk_.TakeWanted(header, now, gone);
    return !wanted.empty();
  };
  for (auto& [number, chunk] : chunks_) {
    std::optional<OwnedChunk::TakenCall> call = chunk.TakeWaitingCall(asked_rank_, is_asked);
    if (!call) continue;
    asked_rank_ = call->header.rank();
    return call->done(StateDesk::Ask(call->header, wanted));
  }
}

std::optional<double> Job::MostErrorSquared(uint32_t rank) const {
  double sum = 0;
  for (const auto& [number, chunk] : chunks_) {
    const std::optional<double> most = chunk.MostErrorSquared(rank);
    if (!most) return std::nullopt;
    sum += *most;
  }
  return sum;
}

bool Job::Leave(uint32_t rank) { return world_size_ - roll_.SetLeft(rank) >= min_workers(); }

void Job::GiveUp(uint32_t rank, uint64_t incarnation) {
  Withdraw(rank, incarnation);
  roll_.GiveUp(rank);
  // Whatever it has had the answer of has gone with it, and the next one gets the others' state.
  for (auto& [number, chunk] : chunks_) chunk.SetReturning(rank, /*has_state=*/false);
}

void Job::EndCallsOf(uint32_t rank) {
  state_desk_.Withdraw(rank, OwnedChunk::WithdrawnError(rank));
  for (auto& [number, chunk] : chunks_) chunk.EndCallsOf(rank);
}

void Job::EndReturnsIfAlone() {
  // Who waits for a state has none to give.
  if (!roll_.HaveLeftBut(state_desk_.WaitingRanks())) return;
  const absl::Status reason = TryAgain(absl::FailedPreconditionError(absl::StrFormat(
      "all other ranks have left job '%s': nobody has its state any more", id_.name)));
  state_desk_.Cancel(reason);
  for (auto& [number, chunk] : chunks_) chunk.EndListeners(reason);
}

absl::StatusOr<ReadErrorResponse> Job::ReadError(const ReadErrorRequest& request) const {
  if (request.rank() >= world_size_ || request.chunk() >= shard_of_chunk_.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d asked for the error of chunk %d; the job has %d ranks, %d chunks",
                        request.rank(), request.chunk(), world_size_, shard_of_chunk_.size()));
  }
  absl::Status owned = CheckOwnership(request.rank(), request.chunk());
  if (!owned.ok()) return owned;
  const absl::StatusOr<BlockVector<float>> error =
      chunks_.at(request.chunk()).ReadError(request.step());
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
  return absl::c_any_of(chunks_, [](const auto& chunk) { return chunk.second.snapshot_due(); });
}

bool Job::waits_with_room() const {
  return absl::c_any_of(chunks_, [](const auto& chunk) { return chunk.second.waits_with_room(); });
}

absl::Status Job::CheckCanBeSaved() const {
  absl::Status first_error;
  for (const auto& [number, chunk] : chunks_) first_error.Update(chunk.CheckError());
  return first_error;
}

JobState Job::Describe() const {
  JobState state;
  state.id = id_;
  state.shard = shard_;
  state.options = layout_.options();
  state.tensors.assign(layout_.tensors().begin(), layout_.tensors().end());
  return state;
}

std::vector<uint32_t> Job::owned_chunks() const {
  std::vector<uint32_t> owned;
  for (const auto& [number, chunk] : chunks_) owned.push_back(number);
  return owned;
}

void Job::SetDurable(const OpenSteps& steps, absl::Time now) {
  for (const auto& [chunk, step] : steps) chunks_.at(chunk).SetDurable(step, now);
}

OpenSteps Job::open_steps() const {
  OpenSteps steps;
  for (const auto& [number, chunk] : chunks_) steps[number] = chunk.open_step();
  return steps;
}

uint64_t Job::open_step() const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const auto& [chunk, step] : open_steps()) least = std::min(least, step);
  return least;
}

void Job::End(const absl::Status& reason) {
  state_desk_.End(reason);
  for (auto& [number, chunk] : chunks_) chunk.End(reason);
}

void Job::FillStatus(absl::Time now, JobStatus& status) const {
  std::vector<OwnedChunk::Progress> chunks;
  for (const auto& [number, chunk] : chunks_) chunks.push_back(chunk.progress());
  status.set_job(id_.name);
  status.set_world_size(world_size_);
  status.set_parameters(layout_.elements());
  status.set_chunks(chunks.size());
  FillTotals(chunks, status);
  std::vector<uint32_t> absent_ranks;
  if (round_deadline() < absl::InfiniteDuration()) absent_ranks = roll_.absent_ranks();
  status.mutable_absent_ranks()->Add(absent_ranks.begin(), absent_ranks.end());
  const std::vector<uint32_t> returning_ranks = roll_.returning_ranks();
  status.mutable_returning_ranks()->Add(returning_ranks.begin(), returning_ranks.end());
  // With too few others, rounds do wait for them.
  const bool do_without = world_size_ - absent_ranks.size() >= min_workers();
  FillWaiting(chunks, do_without ? absent_ranks : std::vector<uint32_t>(), now, status);
  FillHeld(chunks, now, status);
}

void Job::FillMetrics(absl::Time now, JobMetrics& metrics) const {
  for (auto& [number, chunk] : chunks_)
    chunk.AddMetrics(metrics.rounds, metrics.retained, metrics.norms);
  JobStatus& status = metrics.status;
  FillStatus(now, status);
  status.set_payload_bytes_received(metrics.rounds.payload_bytes_received);
  status.set_payload_bytes_sent(metrics.rounds.payload_bytes_sent);
  status.set_uncompressed_bytes_received(metrics.rounds.float32_bytes_received);
  status.set_uncompressed_bytes_sent(metrics.rounds.float32_bytes_sent);
  status.set_error_norm(metrics.norms.error_norm());
  if (metrics.norms.answer_squared) status.set_answer_norm(*metrics.norms.answer_norm());
}

}  // namespace signpost
