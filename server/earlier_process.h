// What ranks tell a restarted chunk of the processes before it: which rounds those may have closed
// already, with answers that some rank has had.

#ifndef SIGNPOST_SERVER_EARLIER_PROCESS_H_
#define SIGNPOST_SERVER_EARLIER_PROCESS_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/frame.h"

namespace signpost {

// Not thread-safe.
class EarlierProcess {
 public:
  // This process is of that generation, and has begun at `restored`.
  EarlierProcess(uint32_t world_size, uint64_t generation, absl::Time restored)
      : generation_(generation), restored_(restored), is_back_(world_size), agrees_(world_size) {}

  uint64_t generation() const { return generation_; }
  absl::Time restored() const { return restored_; }

  // Whether the answers that the frame's rank has had can be, and are those that were given.
  // INVALID_ARGUMENT when there are more than could be lost, DATA_LOSS when this process has closed
  // one of those rounds otherwise.
  absl::Status Check(const FrameHeader& header, uint64_t open_step) const;
  // The frame has passed Check.
  void Hear(const FrameHeader& header);
  // Whether the rank's state before `step` has come of rounds that this process has closed too, and
  // with the same answers.
  bool HasStateOfThisProcess(uint32_t rank, uint64_t step, uint64_t open_step) const {
    return step <= open_step && (agrees_[rank] || !decided_ || step <= *decided_);
  }
  // The frame's sender does not know of the restart, or is further than this process.
  bool MustReplay(const FrameHeader& header, uint64_t open_step) const {
    return header.generation() < generation_ || header.step() > open_step;
  }

  // Some rank has had the answer of the step's round.
  bool HasClosed(uint64_t step) const { return step < answered_steps_; }
  // Or could have: not all ranks are back.
  bool MayHaveClosed(uint64_t step) const {
    return HasClosed(step) || absl::c_linear_search(is_back_, false);
  }
  // All ranks that have not left know of the restart.
  bool AllAreBack(const std::vector<bool>& has_left) const;

  // This process has decided without whom the step's round closes; the first one counts.
  void SetDecided(uint64_t step) {
    if (!decided_) decided_ = step;
  }
  // Another process has taken the rank, and gets its state from the others: it has had no answers
  // of its own. What it has already may be from ranks that had them of an earlier process.
  void SetReturning(uint32_t rank, bool has_state) {
    is_back_[rank] = true;
    if (!has_state) agrees_[rank] = true;
  }

 private:
  const uint64_t generation_;
  const absl::Time restored_;
  uint64_t answered_steps_ = 0;      // the most that any rank has had the answers of
  std::vector<bool> is_back_;        // by rank: it knows of the restart
  std::vector<bool> agrees_;         // by rank: all answers in what it has are this process's too
  std::optional<uint64_t> decided_;  // the first step
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_EARLIER_PROCESS_H_
