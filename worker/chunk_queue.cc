#include "worker/chunk_queue.h"

#include <algorithm>
#include <cstddef>

namespace signpost {

void ChunkQueue::SetReady(uint32_t chunk) {
  states_[chunk] = State::kReady;
  ready_.push_back(chunk);
}

std::optional<uint32_t> ChunkQueue::TakeNext() {
  const size_t end = std::min<size_t>(states_.size(), size_t{first_unanswered_} + window_);
  for (size_t chunk = first_unanswered_; chunk < end; ++chunk) {
    if (states_[chunk] == State::kReady) return Send(static_cast<uint32_t>(chunk));
  }
  while (!ready_.empty() && states_[ready_.front()] != State::kReady) ready_.pop_front();
  if (ready_.empty() || under_way_ >= window_) return std::nullopt;
  return Send(ready_.front());
}

uint32_t ChunkQueue::Send(uint32_t chunk) {
  states_[chunk] = State::kSent;
  ++under_way_;
  return chunk;
}

void ChunkQueue::SetAnswered(uint32_t chunk) {
  states_[chunk] = State::kAnswered;
  --under_way_;
  while (!all_answered() && states_[first_unanswered_] == State::kAnswered) ++first_unanswered_;
}

}  // namespace signpost
