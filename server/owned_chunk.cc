#include "server/owned_chunk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "failpoint/failpoint.h"

namespace signpost {
namespace {

absl::Status WrongStepError(const FrameHeader& header, uint64_t open_step) {
  return absl::FailedPreconditionError(absl::StrCat("rank ", header.rank(), " sent step ",
                                                    header.step(), " of chunk ", header.chunk(),
                                                    ", but step ", open_step, " is expected"));
}

absl::Status SupersededError(const FrameHeader& header) {
  return absl::AbortedError(absl::StrCat("rank ", header.rank(), " sent its frame for step ",
                                         header.step(), ", chunk ", header.chunk(),
                                         " again, and that call took the place of this one"));
}

}  // namespace

OwnedChunk::OwnedChunk(const Layout& layout, uint32_t chunk, uint32_t world_size,
                       SnapshotBell* bell)
    : layout_(layout), chunk_(chunk), world_size_(world_size), bell_(bell) {}

void OwnedChunk::Restore(ChunkState state, uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  // Which older snapshot there is, and so what is durable, is not known here.
  open_step_ = first_kept_step_ = state.open_step;
  error_is_zero_ = state.error.empty();
  error_ = std::move(state.error);
  last_answer_ = std::move(state.last_answer);
  last_contributions_ = std::move(state.last_contributions);
  generation_ = generation;
}

void OwnedChunk::Exchange(Frame frame, absl::Time now, Done done) {
  EndedCalls ended;
  {
    absl::MutexLock lock(&mutex_);
    payload_bytes_received_ += frame.payload.size();
    ended = Contribute(std::move(frame), now, std::move(done));
    CountSent(ended);
  }
  for (EndedCall& call : ended) call.done(std::move(call.result));
}

void OwnedChunk::End(const absl::Status& reason) {
  EndedCalls ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = EndRound(reason);
  }
  for (EndedCall& call : ended) call.done(std::move(call.result));
}

OwnedChunk::EndedCalls OwnedChunk::Contribute(Frame frame, absl::Time now, Done done) {
  EndedCalls ended;
  const FrameHeader header = frame.header;
  const uint64_t payload_bytes = frame.payload.size();
  if (generation_ != 0 && (header.generation() < generation_ || header.step() > open_step_)) {
    ended.push_back({std::move(done), AskForReplay(std::min(header.step(), open_step_))});
    return ended;
  }
  if (last_answer_ != nullptr && header.step() + 1 == open_step_) {
    ended.push_back({std::move(done), Recall(header)});
    return ended;
  }
  absl::Status status = header.step() == open_step_ ? end_ : WrongStepError(header, open_step_);
  if (status.ok()) {
    if (!open_) open_.emplace(world_size_);
    open_->largest_payload = std::max(open_->largest_payload, payload_bytes);
    status = open_->round.Contribute(std::move(frame));
  }
  if (!status.ok()) {
    ended.push_back({std::move(done), status});
    return ended;
  }
  // A resend keeps the arrival time of the frame, which has waited since then.
  WaitingCall& call = open_->calls[header.rank()];
  if (call.done) {
    ended.push_back({std::move(call.done), SupersededError(header)});
  } else {
    call.since = now;
  }
  call.done = std::move(done);
  if (!open_->round.complete()) {
    Reach(Failpoint::kFrameContributed);
    return ended;
  }
  if (!MayClose()) {
    RequestSnapshot();
    return ended;
  }
  for (EndedCall& closed : CloseRound(now)) ended.push_back(std::move(closed));
  return ended;
}

bool OwnedChunk::MayClose() const {
  if (bell_ == nullptr) return true;
  uint64_t kept = open_->largest_payload;
  uint64_t largest = open_->largest_payload;
  for (const uint64_t bytes : kept_bytes_) {
    kept += bytes;
    largest = std::max(largest, bytes);
  }
  const uint64_t half_of_fp32 = uint64_t{2} * layout_.chunks()[chunk_].elements;
  return kept <= std::max(half_of_fp32, 4 * largest);
}

void OwnedChunk::RequestSnapshot() {
  snapshot_due_ = true;
  bell_->Ring();
}

void OwnedChunk::KeptFrame(uint64_t payload_bytes) {
  if (bell_ == nullptr) return;
  kept_bytes_.push_back(payload_bytes);
  unsaved_bytes_ += payload_bytes;
  if (4 * unsaved_bytes_ >= uint64_t{3} * layout_.chunks()[chunk_].elements) RequestSnapshot();
}

OwnedChunk::EndedCalls OwnedChunk::CloseRound(absl::Time now) {
  error_.resize(layout_.chunks()[chunk_].elements);
  absl::StatusOr<Answer> answer = open_->round.Close(layout_, absl::MakeSpan(error_));
  if (!answer.ok()) {
    spoilt_ = answer.status();
    return EndRound(spoilt_);
  }

  const Codec codec = answer->header.codec();
  error_was_zero_ = error_is_zero_;
  // fp32 loses nothing.
  error_is_zero_ = codec == FLOAT32 || (codec == SKIP && error_is_zero_);
  if (codec == SKIP) ++rounds_skipped_;
  ++open_step_;
  KeptFrame(open_->largest_payload);
  last_contributions_ = open_->round.Contributions();
  last_answer_ = std::make_shared<const Answer>(*std::move(answer));

  Reach(Failpoint::kRoundClosed);
  EndedCalls ended;
  for (WaitingCall& call : open_->calls) {
    const absl::Duration waited = std::max(now - call.since, absl::ZeroDuration());
    ended.push_back({std::move(call.done), ReplyWith(last_answer_, waited)});
  }
  open_.reset();
  return ended;
}

OwnedChunk::EndedCalls OwnedChunk::EndRound(const absl::Status& reason) {
  end_.Update(reason);
  EndedCalls ended;
  if (!open_) return ended;
  for (WaitingCall& call : open_->calls) {
    if (call.done) ended.push_back({std::move(call.done), end_});
  }
  open_.reset();
  return ended;
}

absl::StatusOr<OwnedChunk::Reply> OwnedChunk::Recall(const FrameHeader& header) const {
  if (ContributionOf(header) != last_contributions_[header.rank()]) return OtherBytesError(header);
  return ReplyWith(last_answer_, absl::ZeroDuration());
}

// Without durability a restart loses the job anyway, and there is nothing to keep frames for.
OwnedChunk::Reply OwnedChunk::ReplyWith(std::shared_ptr<const Answer> answer,
                                        absl::Duration waited) const {
  return {std::move(answer), waited, bell_ == nullptr ? open_step_ : durable_step_};
}

AnswerHeader OwnedChunk::HeaderOf(const Reply& reply) {
  AnswerHeader header = reply.answer->header;
  header.set_waited_us(absl::ToInt64Microseconds(reply.waited));
  header.set_durable_step(reply.durable_step);
  return header;
}

OwnedChunk::Reply OwnedChunk::AskForReplay(uint64_t step) const {
  Reach(Failpoint::kReplayAsked);
  Answer answer;
  answer.header.set_step(step);
  answer.header.set_chunk(chunk_);
  answer.header.set_codec(REPLAY);
  answer.header.set_generation(generation_);
  return ReplyWith(std::make_shared<const Answer>(std::move(answer)), absl::ZeroDuration());
}

bool OwnedChunk::snapshot_due() const {
  absl::MutexLock lock(&mutex_);
  return snapshot_due_;
}

absl::StatusOr<ChunkState> OwnedChunk::Save(bool with_answer) {
  absl::MutexLock lock(&mutex_);
  if (!spoilt_.ok()) return spoilt_;
  snapshot_due_ = false;
  unsaved_bytes_ = 0;
  ChunkState state;
  state.chunk = chunk_;
  const bool is_held = open_ && open_->round.complete();
  if (error_was_zero_ && !with_answer && !is_held) {
    state.open_step = open_step_ - 1;
    return state;
  }
  state.open_step = open_step_;
  if (!error_is_zero_) state.error = error_;
  state.last_answer = last_answer_;
  state.last_contributions = last_contributions_;
  return state;
}

void OwnedChunk::SetDurable(uint64_t step, absl::Time now) {
  EndedCalls ended;
  {
    absl::MutexLock lock(&mutex_);
    durable_step_ = std::max(durable_step_, step);
    for (; first_kept_step_ < step && !kept_bytes_.empty(); ++first_kept_step_) {
      kept_bytes_.pop_front();
    }
    if (open_ && open_->round.complete()) {
      if (MayClose()) {
        ended = CloseRound(now);
      } else {
        RequestSnapshot();  // only the one before the newest counts
      }
    }
    CountSent(ended);
  }
  for (EndedCall& call : ended) call.done(std::move(call.result));
}

void OwnedChunk::CountSent(const EndedCalls& ended) {
  for (const EndedCall& call : ended) {
    if (call.result.ok()) payload_bytes_sent_ += call.result->answer->payload.size();
  }
}

OwnedChunk::Progress OwnedChunk::progress() const {
  absl::MutexLock lock(&mutex_);
  Progress progress;
  progress.open_step = open_step_;
  progress.durable_step = durable_step_;
  progress.payload_bytes_received = payload_bytes_received_;
  progress.payload_bytes_sent = payload_bytes_sent_;
  progress.rounds_closed = open_step_;
  progress.rounds_skipped = rounds_skipped_;
  if (!open_) return progress;
  progress.missing_ranks = open_->round.MissingRanks();
  for (const WaitingCall& call : open_->calls) {
    if (call.done) progress.waiting_since = std::min(progress.waiting_since, call.since);
  }
  return progress;
}

}  // namespace signpost
