#include "server/owned_chunk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

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

OwnedChunk::OwnedChunk(const Layout& layout, uint32_t chunk, uint32_t world_size)
    : layout_(layout), chunk_(chunk), world_size_(world_size) {}

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
  if (last_answer_ != nullptr && header.step() + 1 == open_step_) {
    ended.push_back({std::move(done), Recall(header)});
    return ended;
  }
  absl::Status status = header.step() == open_step_ ? end_ : WrongStepError(header, open_step_);
  if (status.ok()) {
    if (!open_) open_.emplace(world_size_);
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
  return open_->round.complete() ? CloseRound(now) : std::move(ended);
}

// Only the first frame of the last rank completes a round, and nobody waits for that rank yet: so
// no call was superseded on the way here.
OwnedChunk::EndedCalls OwnedChunk::CloseRound(absl::Time now) {
  error_.resize(layout_.chunks()[chunk_].elements);
  absl::StatusOr<Answer> answer = open_->round.Close(layout_, absl::MakeSpan(error_));
  if (!answer.ok()) return EndRound(answer.status());

  last_contributions_ = open_->round.Contributions();
  last_answer_ = std::make_shared<const Answer>(*std::move(answer));
  ++open_step_;
  if (last_answer_->header.codec() == SKIP) ++rounds_skipped_;

  EndedCalls ended;
  for (WaitingCall& call : open_->calls) {
    const absl::Duration waited = std::max(now - call.since, absl::ZeroDuration());
    ended.push_back({std::move(call.done), Reply{last_answer_, waited}});
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
  return Reply{last_answer_, absl::ZeroDuration()};
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
