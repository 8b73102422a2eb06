#include "server/owned_chunk.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "failpoint/failpoint.h"
#include "kernels/sum.h"
#include "proto/codec.h"
#include "proto/payload_pool.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

absl::Status WrongStepError(const FrameHeader& header, uint64_t open_step, uint64_t oldest_step) {
  // Which happens in jobs with a round deadline only: others' rounds wait for it.
  const bool is_too_late = header.step() < oldest_step;
  const absl::Status error = absl::FailedPreconditionError(absl::StrCat(
      "rank ", header.rank(), " sent step ", header.step(), " of chunk ", header.chunk(),
      ", but step ", open_step, " is expected",
      is_too_late
          ? "; the answers that it has missed are no longer kept. Started again, it gets the "
            "others' state"
          : ""));
  return is_too_late ? TryAgain(error) : error;
}

absl::Status SupersededError(const FrameHeader& header) {
  return absl::AbortedError(absl::StrCat("rank ", header.rank(), " sent its frame for step ",
                                         header.step(), ", chunk ", header.chunk(),
                                         " again, and that call took the place of this one"));
}

absl::Status NoRoomError(const Room::Offer& offer) {
  return TryAgain(absl::ResourceExhaustedError(absl::StrFormat(
      "no memory for another frame that can wait: such frames take %d bytes, of %d that "
      "--max-held-bytes of `signpost aggregator`, %d, leaves them beside what its jobs need; it is "
      "to be sent again",
      offer.room->taken(), offer.most, offer.limit)));
}

// Of rounds that were skipped there could be any number within a limit of bytes, and their rates
// travel in one header.
constexpr size_t kMostAnswers = 16;

// So many bytes of answers may be kept however small a chunk is: half of a number, as of a norm,
// would be that of few rounds.
constexpr uint64_t kSmallAnswers = 64 * 1024;

// Frames of rounds that are skipped are smaller than what a call takes besides.
constexpr size_t kFreeBytes = 64;

// Of the blocks of a one-bit payload: the sum of scale^2 * length.
double SquareOf(const Chunk& chunk, uint32_t block_elements, const Payload& payload) {
  double sum = 0;
  for (const Segment& segment : chunk.segments) {
    const kernels::OneBitView part = OneBitPart(chunk, segment, payload.data());
    for (uint32_t first = 0; first < segment.elements; first += block_elements) {
      const double scale = part.scales[first / block_elements];
      sum += scale * scale * std::min(block_elements, segment.elements - first);
    }
  }
  return sum;
}

// Of an error, for its norm: some tens of microseconds under the chunk's lock.
constexpr size_t kMostSampledBlocks = 32;

bool HasNumbers(Codec codec, const Payload& payload) { return codec != SKIP && payload.size() > 0; }

// The round that restores the errors is the step before the first.
uint64_t FirstOpenStep(const Layout& layout) {
  const uint64_t first_step = layout.options().first_step();
  return first_step == 0 ? 0 : first_step - 1;
}

}  // namespace

absl::Duration RoundDeadlineOf(const JobOptions& options) {
  const uint64_t deadline_us = options.round_deadline_us();
  return deadline_us == 0 ? absl::InfiniteDuration() : absl::Microseconds(deadline_us);
}

uint32_t MinWorkersOf(const JobOptions& options, uint32_t world_size) {
  return options.min_workers() == 0 ? world_size : options.min_workers();
}

OwnedChunk::OwnedChunk(const Layout& layout, uint32_t chunk, uint32_t world_size, Bell* bell)
    : layout_(layout),
      chunk_(chunk),
      world_size_(world_size),
      round_deadline_(RoundDeadlineOf(layout.options())),
      min_workers_(MinWorkersOf(layout.options(), world_size)),
      bell_(bell),
      open_step_(FirstOpenStep(layout)),
      ranks_(world_size),
      undurable_(layout.chunks()[chunk].elements, open_step_) {
  metrics_.straggler_seconds.resize(world_size);
}

void OwnedChunk::Restore(ChunkState state, uint64_t generation, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  // Which older snapshot there is, and so what is durable, is not known here.
  open_step_ = saved_step_ = state.open_step;
  undurable_ = UndurableRounds(layout_.chunks()[chunk_].elements, open_step_);
  error_is_zero_ = state.error.empty();
  error_ = std::move(state.error);
  closed_ = std::move(state.closed);
  late_ranks_ = std::move(state.late_ranks);
  earlier_.emplace(world_size_, generation, now);
}

void OwnedChunk::Exchange(Frame frame, absl::Time now, Done done, Room::Offer offer) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  metrics_.payload_bytes_received += frame.payload.size();
  if (HasNumbers(frame.header.codec(), frame.payload)) {
    metrics_.float32_bytes_received += uint64_t{4} * layout_.chunks()[chunk_].elements;
  }
  Contribute(std::move(frame), now, std::move(done), offer, ended);
}

bool OwnedChunk::waits_with_room() const {
  absl::MutexLock lock(&mutex_);
  return open_ && open_->room.bytes() > 0 && !open_->round.complete();
}

absl::Status OwnedChunk::CheckError() const {
  absl::MutexLock lock(&mutex_);
  return spoilt_;
}

absl::StatusOr<BlockVector<float>> OwnedChunk::ReadError(uint64_t step) const {
  absl::MutexLock lock(&mutex_);
  if (!spoilt_.ok()) return spoilt_;
  if (step > open_step_) {
    return absl::AbortedError(absl::StrCat("chunk ", chunk_, " is at step ", open_step_,
                                           " here, as after a restart; its error before step ",
                                           step, " is not known before the frames since"));
  }
  if (step < open_step_) {
    return absl::FailedPreconditionError(absl::StrCat("the error of chunk ", chunk_,
                                                      " before step ", step,
                                                      " is gone: it is at step ", open_step_));
  }
  return error_is_zero_ ? BlockVector<float>() : error_;
}

void OwnedChunk::End(const absl::Status& reason) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  EndRounds(reason, ended);
}

void OwnedChunk::Contribute(Frame frame, absl::Time now, Done done, const Room::Offer& offer,
                            EndedCalls& ended) {
  const FrameHeader header = frame.header;
  if (IsWithdrawn(header)) return Finish(std::move(done), WithdrawnError(header.rank()), ended);
  const bool listens = header.codec() == LISTEN;
  // Who comes back knows of no process yet. Later it listens again as others send frames again.
  if (listens && header.generation() == 0) return Listen(header, now, std::move(done), ended);
  if (earlier_) {
    absl::Status status = earlier_->Check(header, open_step_);
    if (!status.ok()) return Finish(std::move(done), std::move(status), ended);
    earlier_->Hear(header);
  }
  if (!listens) Hear(frame);
  if (earlier_ && earlier_->MustReplay(header, open_step_)) {
    ++metrics_.replays_asked;
    return Finish(std::move(done), AskForReplay(std::min(header.step(), open_step_)), ended);
  }
  if (listens) {
    if (header.step() == open_step_) LearnLateRanks(header, now);
    Listen(header, now, std::move(done), ended);
    return CloseIfComplete(now, ended);
  }
  if (header.step() < open_step_ && header.step() >= oldest_answer()) {
    return Finish(std::move(done), Recall(header), ended);
  }
  absl::Status status = Add(header, std::move(frame), now, offer);
  if (!status.ok()) return Finish(std::move(done), std::move(status), ended);

  // A resend keeps the arrival time of the frame, which has waited since then.
  WaitingCall& call = open_->calls[header.rank()];
  if (call.done) {
    Finish(std::move(call.done), SupersededError(header), ended);
  } else {
    call.since = now;
  }
  call.done = std::move(done);
  call.next_fetch = header.next_fetch();
  if (!open_->round.complete()) Reach(Failpoint::kFrameContributed);
  CloseIfComplete(now, ended);
}

void OwnedChunk::Hear(const Frame& frame) {
  Rank& rank = ranks_[frame.header.rank()];
  rank.Hear(frame.header.step());
  rank.most_error_squared = MostErrorOf(frame);
}

absl::Status OwnedChunk::Add(const FrameHeader& header, Frame frame, absl::Time now,
                             const Room::Offer& offer) {
  if (header.step() != open_step_) return WrongStepError(header, open_step_, oldest_answer());
  if (!end_.ok()) return end_;
  const bool is_first = !open_;
  if (is_first) {
    open_.emplace(world_size_, header, now);
    const auto late_ranks = late_ranks_.find(open_step_);
    if (late_ranks != late_ranks_.end()) LeaveOutAsBefore(late_ranks->second, now);
  }
  LearnLateRanks(header, now);
  if (open_->round.IsLate(header.rank())) return absl::OkStatus();  // it gets the answer

  const bool is_new = !open_->round.Has(header.rank());
  const uint64_t payload_bytes = frame.payload.size();
  uint64_t taken = 0;
  if (is_new && payload_bytes > kFreeBytes && offer.room != nullptr) {
    taken = PayloadPool::Footprint(payload_bytes);
    if (!open_->room.Take(*offer.room, taken, offer.most)) {
      open_->last_refused = now;
      if (is_first) open_.reset();
      return NoRoomError(offer);
    }
  }
  open_->largest_payload = std::max(open_->largest_payload, payload_bytes);
  if (absl::Status status = open_->round.Contribute(std::move(frame)); !status.ok()) {
    open_->room.Give(taken);
    return status;
  }
  if (is_new) {
    open_->newest_arrival = std::max(open_->newest_arrival, now);
    open_->arrivals.Add(header.rank(), now);
    open_->trace.AddFrame(header, payload_bytes);
  }
  return absl::OkStatus();
}

std::optional<double> OwnedChunk::MostErrorOf(const Frame& frame) const {
  const double gamma = layout_.options().gamma();
  const bool is_apart = frame.header.loss_unit() != 0;
  switch (frame.header.codec()) {
    case ONE_BIT:
      if (is_apart) return std::nullopt;
      return (1 + 1 / (gamma * gamma)) *
             SquareOf(layout_.chunks()[chunk_], layout_.options().block_elements(), frame.payload);
    case FLOAT32:  // loses nothing, if it counts
      if (frame.header.step() != open_step_ || late_ranks_.contains(open_step_)) {
        return std::nullopt;
      }
      if (is_apart) return ranks_[frame.header.rank()].most_error_squared;
      return 0;
    default:
      return std::nullopt;
  }
}

std::optional<double> OwnedChunk::MostErrorSquared(uint32_t rank) const {
  absl::MutexLock lock(&mutex_);
  return ranks_[rank].most_error_squared;
}

bool OwnedChunk::IsOverdue(uint32_t rank, absl::Time now) const {
  absl::MutexLock lock(&mutex_);
  return open_ && !Restores() && open_->IsPast(round_deadline_, now) && !open_->round.Has(rank) &&
         !open_->round.IsLate(rank);
}

void OwnedChunk::SetReturning(uint32_t rank, bool has_state) {
  absl::MutexLock lock(&mutex_);
  if (earlier_) earlier_->SetReturning(rank, has_state);
}

bool OwnedChunk::Meet(const FrameHeader& header) {
  absl::MutexLock lock(&mutex_);
  if (!earlier_) return true;
  if (IsWithdrawn(header) || !earlier_->Check(header, open_step_).ok()) return false;
  earlier_->Hear(header);
  return !earlier_->MustReplay(header, open_step_) && header.answered_steps() <= open_step_;
}

std::optional<uint64_t> OwnedChunk::GenerationOfState(const FrameHeader& header) const {
  absl::MutexLock lock(&mutex_);
  if (!earlier_) return 0;
  if (IsWithdrawn(header)) return std::nullopt;
  if (!earlier_->HasStateOfThisProcess(header.rank(), header.step(), open_step_)) {
    return std::nullopt;
  }
  return earlier_->generation();
}

void OwnedChunk::Return(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_[rank].heard = open_step_;
}

absl::Status OwnedChunk::WithdrawnError(uint32_t rank) {
  return TryAgain(
      absl::FailedPreconditionError(absl::StrCat("rank ", rank, " has left, or is another's")));
}

absl::Status OwnedChunk::CheckSender(const FrameHeader& header) const {
  absl::MutexLock lock(&mutex_);
  return IsWithdrawn(header) ? WithdrawnError(header.rank()) : absl::OkStatus();
}

uint64_t OwnedChunk::Withdraw(uint32_t rank, uint64_t incarnation) {
  absl::MutexLock lock(&mutex_);
  ranks_[rank].withdrawn = incarnation;
  if (!open_ || !open_->round.Has(rank)) return open_step_;
  if (IsDecided()) return open_step_ + 1;
  open_->round.Drop(rank);
  open_->arrivals.Remove(rank);
  ForgetIfEmpty();
  return open_step_;
}

void OwnedChunk::ForgetIfEmpty() {
  const bool is_waited_for =
      absl::c_any_of(open_->calls, [](const WaitingCall& call) { return call.done != nullptr; });
  if (open_->round.contributed() == 0 && !is_waited_for) open_.reset();
}

void OwnedChunk::EndCallsOf(uint32_t rank) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  if (open_ && open_->calls[rank].done) {
    Finish(std::move(open_->calls[rank].done), WithdrawnError(rank), ended);
    ForgetIfEmpty();
  }
  if (const auto listener = listeners_.find(rank); listener != listeners_.end()) {
    Finish(std::move(listener->second.done), WithdrawnError(rank), ended);
    listeners_.erase(listener);
  }
}

bool OwnedChunk::IsDecided() const {
  if (open_->round.complete() || !open_->round.late_ranks().empty()) return true;
  // Or may have been, by an earlier process.
  return earlier_ && earlier_->MayHaveClosed(open_step_);
}

std::optional<OwnedChunk::TakenCall> OwnedChunk::TakeWaitingCall(
    uint32_t after, absl::FunctionRef<bool(const FrameHeader& header)> is_one) {
  absl::MutexLock lock(&mutex_);
  for (uint32_t i = 1; i <= world_size_ && open_; ++i) {
    const uint32_t rank = (after + i) % world_size_;
    WaitingCall& call = open_->calls[rank];
    if (!call.done) continue;
    TakenCall taken;
    taken.header.set_rank(rank);
    taken.header.set_step(open_step_);
    taken.header.set_chunk(chunk_);
    taken.header.set_next_fetch(call.next_fetch);
    if (!is_one(taken.header)) continue;
    taken.done = std::move(call.done);
    return taken;
  }
  return std::nullopt;
}

void OwnedChunk::Listen(const FrameHeader& header, absl::Time now, Done done, EndedCalls& ended) {
  ranks_[header.rank()].Hear(header.step());
  if (header.step() < oldest_answer()) {
    return Finish(std::move(done), WrongStepError(header, open_step_, oldest_answer()), ended);
  }
  if (header.step() < open_step_) {
    return Finish(std::move(done), ReplyToListener(header.step() - oldest_answer()), ended);
  }
  if (!end_.ok()) return Finish(std::move(done), end_, ended);
  Listener& waiting = listeners_[header.rank()];
  if (waiting.done) Finish(std::move(waiting.done), SupersededError(header), ended);
  waiting = {std::move(done), header.step(), now};
}

OwnedChunk::Reply OwnedChunk::ReplyToListener(size_t closed) const {
  Reply reply = ReplyWith(closed_[closed].answer, absl::ZeroDuration());
  reply.later_rates.push_back(closed_[closed].rates);
  if (earlier_) reply.generation = earlier_->generation();
  return reply;
}

void OwnedChunk::AnswerListeners(EndedCalls& ended) {
  for (auto listener = listeners_.begin(); listener != listeners_.end();) {
    if (listener->second.step >= open_step_) {
      ++listener;
      continue;
    }
    Finish(std::move(listener->second.done), ReplyToListener(closed_.size() - 1), ended);
    listener = listeners_.erase(listener);
  }
}

void OwnedChunk::LearnLateRanks(const FrameHeader& header, absl::Time now) {
  if (!earlier_ || header.late_ranks().empty()) return;
  // What is written down goes first: it is the same, or another fault has come to this one.
  const bool rounds_wait_for_all = round_deadline_ == absl::InfiniteDuration();
  if (rounds_wait_for_all || late_ranks_.count(open_step_)) return;
  std::vector<uint32_t>& ranks = late_ranks_[open_step_];
  ranks.assign(header.late_ranks().begin(), header.late_ranks().end());
  if (open_) LeaveOutAsBefore(ranks, now);
}

void OwnedChunk::LeaveOutAsBefore(const std::vector<uint32_t>& ranks, absl::Time now) {
  open_->round.LeaveOut(ranks);
  for (const uint32_t rank : ranks) {
    open_->arrivals.Remove(rank);
    open_->arrivals.Add(rank, now, FrameArrivals::Away::kForGood);
  }
}

std::vector<uint32_t> OwnedChunk::LeaveOut(const Attendance& attendance, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  // Who has left needs no answers.
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    if (attendance.has_left[rank]) ranks_[rank].heard = std::numeric_limits<uint64_t>::max();
  }
  if (!open_) return {};
  if (MayLeaveOut(attendance, now)) LeaveOutMissing(attendance, now);
  if (open_->is_late_durable) return {};
  return open_->round.late_ranks();
}

void OwnedChunk::LeaveOutMissing(const Attendance& attendance, absl::Time now) {
  // Those that an earlier process left out, if this is such a round, stay out: nobody has had the
  // answer without them, but their frames may be gone.
  std::vector<uint32_t> ranks = open_->round.MissingRanks();
  const auto away = [&](uint32_t rank) {
    if (attendance.has_left[rank]) return FrameArrivals::Away::kForGood;
    // Whom another chunk has closed without since this round began was waited for as all others.
    const bool was_absent =
        attendance.is_absent[rank] && attendance.absent_since[rank] <= open_->since;
    const bool is_away = was_absent || attendance.first_step[rank] > open_step_;
    return is_away ? FrameArrivals::Away::kAbsent : FrameArrivals::Away::kNot;
  };
  // Who is away is waited for only when nobody else is.
  FrameArrivals::Away least = away(ranks.front());
  for (const uint32_t rank : ranks) least = std::min(least, away(rank));
  // When all that are missing are away the round ends with the last frame, which it waited for.
  if (least == FrameArrivals::Away::kNot || open_->IsPast(round_deadline_, now) ||
      now >= open_->newest_arrival + round_deadline_ / 2) {
    for (const uint32_t rank : ranks) {
      if (away(rank) == least) open_->trace.AddMissing(rank);
    }
  }
  for (const uint32_t rank : ranks) open_->arrivals.Add(rank, now, away(rank));
  if (earlier_) earlier_->SetDecided(open_step_);
  absl::c_copy(open_->round.late_ranks(), std::back_inserter(ranks));
  absl::c_sort(ranks);
  open_->round.LeaveOut(std::move(ranks));
  late_ranks_[open_step_] = open_->round.late_ranks();
  open_->is_late_durable = false;
  open_->completed = now;
  open_->trace.SetComplete();
}

bool OwnedChunk::MayLeaveOut(const Attendance& attendance, absl::Time now) const {
  if (open_->round.complete() || open_->round.contributed() == 0) return false;
  if (!HasEnough(attendance, now)) return false;
  if (Restores()) return false;
  if (earlier_) {
    // It closed before the crash, without late_ranks_ and no others.
    if (earlier_->HasClosed(open_step_)) return false;
    // Any rank could have had its answer.
    const bool is_early = now < earlier_->restored() + attendance.restart_grace;
    if (is_early && !earlier_->AllAreBack(attendance.has_left)) return false;
  }
  if (open_->IsPast(round_deadline_, now)) return true;
  const std::vector<uint32_t> missing = open_->round.MissingRanks();
  return std::all_of(missing.begin(), missing.end(), [&](uint32_t rank) {
    return attendance.is_absent[rank] || attendance.has_left[rank];
  });
}

bool OwnedChunk::HasEnough(const Attendance& attendance, absl::Time now) const {
  // Those that came back for later rounds only do not make a round wait that they are needed for;
  // nor those that can't come to it: at a freeze of the variance nobody has a state to give. But
  // others that are there may be slow, and come.
  uint32_t counted = open_->round.contributed(), in_vain = 0;
  bool others_may_come = false;
  for (const uint32_t rank : open_->round.MissingRanks()) {
    if (attendance.first_step[rank] > open_step_) {
      ++counted;
    } else if (!attendance.gone.contains(rank) &&
               (attendance.waits_in_vain.contains(rank) || ListensInVain(rank, now))) {
      ++in_vain;
    } else if (!attendance.is_absent[rank] && !attendance.has_left[rank]) {
      others_may_come = true;
    }
  }
  if (counted >= min_workers_) return true;
  if (others_may_come && !open_->IsPast(round_deadline_ + kInVain, now)) return false;
  return counted + in_vain >= min_workers_;
}

// It waits for the round's answer, and may need states first that are given when this has closed.
bool OwnedChunk::ListensInVain(uint32_t rank, absl::Time now) const {
  const auto listener = listeners_.find(rank);
  return listener != listeners_.end() && listener->second.step >= open_step_ &&
         now >= listener->second.since + kInVain;
}

uint32_t OwnedChunk::missing() const {
  absl::MutexLock lock(&mutex_);
  return open_ ? open_->round.missing() : 0;
}

LateRanks OwnedChunk::late_ranks() const {
  absl::MutexLock lock(&mutex_);
  return late_ranks_;
}

void OwnedChunk::SetLateRanksDurable(absl::Time now) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  if (open_) open_->is_late_durable = true;
  CloseIfComplete(now, ended);
}

void OwnedChunk::CloseIfComplete(absl::Time now, EndedCalls& ended) {
  if (!open_ || !open_->round.complete()) return;
  if (!open_->completed) open_->completed = now;
  open_->trace.SetComplete();
  if (!open_->is_late_durable) return;
  if (bell_ == nullptr || undurable_.HasRoomFor(open_->largest_payload)) {
    return CloseRound(now, ended);
  }
  RequestSnapshot();  // of two that it takes
}

void OwnedChunk::RequestSnapshot() {
  snapshot_due_ = true;
  bell_->Ring();
}

void OwnedChunk::CloseRound(absl::Time now, EndedCalls& ended) {
  open_->trace.BeginAverage();
  // Its memory is not taken before there is an error.
  if (open_->round.CanLose()) error_.resize(layout_.chunks()[chunk_].elements);
  // Real time, whatever the clock of those who call: it is told, and decides nothing.
  const auto begin = std::chrono::steady_clock::now();
  absl::StatusOr<Answer> answer = open_->round.Close(layout_, absl::MakeSpan(error_));
  if (!answer.ok()) {
    spoilt_ = answer.status();
    return EndRounds(spoilt_, ended);
  }
  CountRound(*answer, now, absl::FromChrono(std::chrono::steady_clock::now() - begin));
  open_->trace.EndAverage();

  const Codec codec = answer->header.codec();
  error_was_zero_ = error_is_zero_;
  // fp32 loses nothing, and takes the error along where it is not apart.
  const bool stays = codec == SKIP || (codec == FLOAT32 && open_->round.is_apart());
  error_is_zero_ = stays ? error_is_zero_
                         : codec == FLOAT32 || (codec == RESTORE && open_->largest_payload == 0);
  ++open_step_;
  if (bell_ != nullptr) {
    undurable_.Add(open_->largest_payload);
    if (undurable_.WantSnapshot()) RequestSnapshot();
  }
  if (!open_->round.late_ranks().empty()) ++rounds_closed_late_;
  if (bell_ == nullptr) late_ranks_.clear();  // nothing to be replayed
  closed_.push_back({std::make_shared<const Answer>(*std::move(answer)),
                     open_->round.Contributions(), open_->round.rates()});
  if (bell_ != nullptr && SomebodySeemsGone()) RequestSnapshot();
  ForgetAnswers();

  Reach(Failpoint::kRoundClosed);
  const absl::Time completed = open_->completed.value_or(now);  // not what it was held for the disk
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    WaitingCall& call = open_->calls[rank];
    if (!call.done) continue;
    const absl::Duration waited = std::max(completed - call.since, absl::ZeroDuration());
    Finish(std::move(call.done), ReplyWith(closed_.back().answer, waited), ended);
    open_->trace.AddAnswer(rank, closed_.back().answer->payload.size());
  }
  open_->trace.Close();
  AnswerListeners(ended);
  open_.reset();
}

// The second: one that is late now and then must not cost a snapshot each time.
bool OwnedChunk::SomebodySeemsGone() const {
  const auto was_late = [this](uint32_t rank, size_t rounds_ago) {
    if (rounds_ago >= closed_.size()) return false;
    const ClosedRound& round = closed_[closed_.size() - 1 - rounds_ago];
    return absl::c_linear_search(round.answer->header.late_ranks(), rank);
  };
  return absl::c_any_of(closed_.back().answer->header.late_ranks(),
                        [&](uint32_t rank) { return was_late(rank, 1) && !was_late(rank, 2); });
}

// Those that all ranks have, and those that are too old to be kept.
void OwnedChunk::ForgetAnswers() {
  uint64_t oldest_needed = open_step_ - 1;
  for (const Rank& rank : ranks_) {
    oldest_needed = std::min(oldest_needed, rank.heard.value_or(0));
  }
  const uint64_t elements = layout_.chunks()[chunk_].elements;
  uint64_t bytes = 0;
  uint64_t largest = 0;
  for (const ClosedRound& round : closed_) {
    bytes += round.answer->payload.size();
    largest = std::max<uint64_t>(largest, round.answer->payload.size());
  }
  const uint64_t most_bytes = std::max(kSmallAnswers, MostKeptBytes(elements, largest));
  while (closed_.size() > 1 &&
         (oldest_answer() < oldest_needed || bytes > most_bytes || closed_.size() > kMostAnswers)) {
    bytes -= closed_.front().answer->payload.size();
    closed_.pop_front();
  }
}

void OwnedChunk::GiveRoomBack(const absl::Status& reason) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  if (!open_ || open_->room.bytes() == 0 || IsDecided()) return;
  EndOpenRound(reason, ended);
}

void OwnedChunk::EndListeners(const absl::Status& reason) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  EndListeners(reason, ended);
}

void OwnedChunk::EndListeners(const absl::Status& reason, EndedCalls& ended) {
  for (auto& [rank, listener] : listeners_) Finish(std::move(listener.done), reason, ended);
  listeners_.clear();
}

void OwnedChunk::EndOpenRound(const absl::Status& reason, EndedCalls& ended) {
  for (WaitingCall& call : open_->calls) {
    if (call.done) Finish(std::move(call.done), reason, ended);
  }
  open_.reset();
}

void OwnedChunk::EndRounds(const absl::Status& reason, EndedCalls& ended) {
  end_.Update(reason);
  EndListeners(end_, ended);
  if (open_) EndOpenRound(end_, ended);
}

absl::StatusOr<OwnedChunk::Reply> OwnedChunk::Recall(const FrameHeader& header) const {
  const size_t index = header.step() - oldest_answer();
  const ClosedRound& round = closed_[index];
  const bool is_late = absl::c_linear_search(round.answer->header.late_ranks(), header.rank());
  if (!is_late && ContributionOf(header) != round.contributions[header.rank()]) {
    return OtherBytesError(header);
  }
  Reply reply = ReplyWith(round.answer, absl::ZeroDuration());
  for (size_t later = index + 1; later < closed_.size(); ++later) {
    reply.later_rates.push_back(closed_[later].rates);
    reply.later_rates.back().clear_scales();  // who takes part has its own
  }
  return reply;
}

// Without durability a restart loses the job anyway, and there is nothing to keep frames for.
OwnedChunk::Reply OwnedChunk::ReplyWith(std::shared_ptr<const Answer> answer,
                                        absl::Duration waited) const {
  return {std::move(answer), waited, bell_ == nullptr ? open_step_ : undurable_.durable_step(),
          open_step_};
}

AnswerHeader OwnedChunk::HeaderOf(const Reply& reply) {
  AnswerHeader header = reply.answer->header;
  header.set_waited_us(absl::ToInt64Microseconds(reply.waited));
  header.set_durable_step(reply.durable_step);
  header.set_open_step(reply.open_step);
  header.set_generation(reply.generation);
  for (const StepRates& rates : reply.later_rates) *header.add_later_rates() = rates;
  return header;
}

OwnedChunk::Reply OwnedChunk::AskForReplay(uint64_t step) const {
  Reach(Failpoint::kReplayAsked);
  Answer answer;
  answer.header.set_step(step);
  answer.header.set_chunk(chunk_);
  answer.header.set_codec(REPLAY);
  Reply reply = ReplyWith(std::make_shared<const Answer>(std::move(answer)), absl::ZeroDuration());
  reply.generation = earlier_->generation();
  return reply;
}

bool OwnedChunk::snapshot_due() const {
  absl::MutexLock lock(&mutex_);
  return snapshot_due_;
}

absl::Status OwnedChunk::Save(bool with_answer, ChunkState& state) {
  absl::MutexLock lock(&mutex_);
  if (!spoilt_.ok()) return spoilt_;
  snapshot_due_ = false;
  undurable_.SetSaved();
  state.chunk = chunk_;
  state.closed.clear();
  const bool is_held = open_ && open_->round.complete();
  const bool all_have_earlier_answers =
      closed_.size() == 1 && closed_.back().answer->header.late_ranks().empty();
  // Never to a step before that of an earlier snapshot: workers may have been told that it is
  // durable.
  if (error_was_zero_ && all_have_earlier_answers && !with_answer && !is_held &&
      open_step_ > saved_step_) {
    state.open_step = saved_step_ = open_step_ - 1;
    state.error.clear();
    return absl::OkStatus();
  }
  saved_step_ = open_step_;
  state.open_step = open_step_;
  // Not by assignment, which an allocator of our own makes a loop over the elements.
  state.error.resize(error_is_zero_ ? 0 : error_.size());
  std::copy_n(error_.begin(), state.error.size(), state.error.begin());
  state.closed = closed_;
  return absl::OkStatus();
}

void OwnedChunk::SetDurable(uint64_t step, absl::Time now) {
  EndedCalls ended;
  absl::MutexLock lock(&mutex_);
  undurable_.SetDurable(step);
  late_ranks_.erase(late_ranks_.begin(), late_ranks_.lower_bound(step));
  CloseIfComplete(now, ended);
}

void OwnedChunk::Finish(Done done, absl::StatusOr<Reply> result, EndedCalls& ended) {
  if (result.ok()) {
    const auto& [header, payload] = *result->answer;
    metrics_.payload_bytes_sent += payload.size();
    if (HasNumbers(header.codec(), payload)) {
      metrics_.float32_bytes_sent += uint64_t{4} * layout_.chunks()[chunk_].elements;
    }
  }
  ended.Add(std::move(done), std::move(result));
}

uint64_t OwnedChunk::open_step() const {
  absl::MutexLock lock(&mutex_);
  return open_step_;
}

OwnedChunk::Progress OwnedChunk::progress() const {
  absl::MutexLock lock(&mutex_);
  Progress progress;
  progress.open_step = open_step_;
  progress.durable_step = undurable_.durable_step();
  progress.rounds_closed = open_step_ - FirstOpenStep(layout_);
  progress.rounds_skipped = metrics_.rounds_skipped;
  progress.rounds_closed_late = rounds_closed_late_;
  if (!open_) return progress;
  progress.missing_ranks = open_->round.MissingRanks();
  if (open_->completed) progress.held_since = *open_->completed;
  for (const WaitingCall& call : open_->calls) {
    if (call.done) progress.waiting_since = std::min(progress.waiting_since, call.since);
  }
  return progress;
}

void OwnedChunk::CountRound(const Answer& answer, absl::Time now, absl::Duration averaging) {
  metrics_.gathering.Add(open_->arrivals.gathering());
  open_->arrivals.AddShares(metrics_.straggler_seconds);
  metrics_.holding.Add(now - open_->completed.value_or(now));
  metrics_.averaging.Add(averaging);
  if (open_->round.error_scale() != 1) ++metrics_.errors_rescaled;
  if (answer.header.codec() == SKIP) {
    ++metrics_.rounds_skipped;
  } else if (earlier_ && earlier_->HasClosed(open_step_)) {
    ++metrics_.rounds_replayed;
  } else if (!open_->round.late_ranks().empty()) {
    ++metrics_.rounds_partial;
  } else {
    ++metrics_.rounds_full;
  }
}

double OwnedChunk::SampleErrorSquared() const {
  if (error_is_zero_) return 0;
  const uint32_t block_elements = layout_.options().block_elements();
  const size_t blocks = (error_.size() + block_elements - 1) / block_elements;
  const size_t stride = (blocks + kMostSampledBlocks - 1) / kMostSampledBlocks;
  double sum = 0;
  size_t sampled = 0;
  for (size_t block = open_step_ % stride; block < blocks; block += stride) {
    const size_t first = block * block_elements;
    const size_t length = std::min<size_t>(block_elements, error_.size() - first);
    sum += kernels::SumOfSquares({error_.data() + first, length});
    sampled += length;
  }
  return sampled == 0 ? 0 : sum * error_.size() / sampled;
}

void OwnedChunk::AddMetrics(RoundMetrics& rounds, RetainedBytes& retained,
                            NormMetrics& norms) const {
  absl::MutexLock lock(&mutex_);
  rounds.Merge(metrics_);
  if (open_) retained.open_frames += open_->round.payload_bytes();
  for (const ClosedRound& round : closed_) retained.answers += round.answer->payload.size();
  retained.error += error_.size() * sizeof(float);
  retained.undurable += undurable_.bytes();

  norms.error_squared += SampleErrorSquared();
  const Answer* const newest = closed_.empty() ? nullptr : closed_.back().answer.get();
  if (newest == nullptr || newest->header.codec() != ONE_BIT) {
    norms.answer_squared.reset();
  } else if (norms.answer_squared) {
    *norms.answer_squared +=
        SquareOf(layout_.chunks()[chunk_], layout_.options().block_elements(), newest->payload);
  }
}

}  // namespace signpost
