#include "server/earlier_process.h"

#include "absl/strings/str_cat.h"
#include "proto/try_again.h"
#include "server/undurable_rounds.h"

namespace signpost {
namespace {

absl::Status TooManyAnswersError(const FrameHeader& header, uint64_t open_step) {
  return absl::DataLossError(
      absl::StrCat("rank ", header.rank(), " says that it has had ", header.answered_steps(),
                   " answers of chunk ", header.chunk(), ", which is at step ", open_step,
                   " here: more rounds than an aggregator closes before they are durable. Unless "
                   "the rank errs, this aggregator's state is an older copy: start the job again "
                   "from its newest checkpoint"));
}

absl::Status OtherAnswerError(const FrameHeader& header, uint64_t step) {
  return TryAgain(absl::DataLossError(absl::StrCat(
      "rank ", header.rank(),
      " was away for too long after this aggregator was started again: it "
      "has had an answer of step ",
      step, ", chunk ", header.chunk(),
      ", which has closed otherwise since, and its parameters are not those of the others. They go "
      "on without it. Started again, it gets the others' state")));
}

}  // namespace

absl::Status EarlierProcess::Check(const FrameHeader& header, uint64_t open_step) const {
  if (header.answered_steps() > open_step + kMostKeptRounds) {
    return TooManyAnswersError(header, open_step);
  }
  // What a rank has had that comes back now was answered by an earlier process, to it or to whoever
  // gave it its state.
  const bool comes_back = header.generation() == generation_ && !agrees_[header.rank()];
  if (comes_back && decided_ && header.answered_steps() > *decided_) {
    return OtherAnswerError(header, *decided_);
  }
  return absl::OkStatus();
}

void EarlierProcess::Hear(const FrameHeader& header) {
  // An older copy, sent to the process before, does not tell where its rank is now.
  if (header.generation() != generation_) return;
  answered_steps_ = std::max(answered_steps_, header.answered_steps());
  is_back_[header.rank()] = agrees_[header.rank()] = true;
}

bool EarlierProcess::AllAreBack(const std::vector<bool>& has_left) const {
  for (uint32_t rank = 0; rank < is_back_.size(); ++rank) {
    if (!is_back_[rank] && !has_left[rank]) return false;
  }
  return true;
}

}  // namespace signpost
