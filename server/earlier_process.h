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
      : generation_(generation), restored_(restored), is_back_(world_size), left_out_(world_size) {}

  uint64_t generation() const { return generation_; }
  absl::Time restored() const { return restored_; }

  // Whether the answers that the frame's rank has had can be, and are those that were given.
  // INVALID_ARGUMENT when there are more than could be lost, DATA_LOSS when this process has closed
  // one of those rounds without the rank.
  absl::Status Check(const FrameHeader& header, uint64_t open_step) const;
  // The frame has passed Check.
  void Hear(const FrameHeader& header);
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

  // This process has decided to close the step's round without the rank; the first one counts.
  void SetLeftOut(uint32_t rank, uint64_t step) {
    if (!left_out_[rank]) left_out_[rank] = step;
  }
  // Another process has taken the rank, and gets its state from the others: it has had no answers
  // of its own.
  void SetReturning(uint32_t rank) {
    is_back_[rank] = true;
    left_out_[rank].reset();
  }

 private:
  const uint64_t generation_;
  const absl::Time restored_;
  uint64_t answered_steps_ = 0;                    // the most that any rank has had the answers of
  std::vector<bool> is_back_;                      // by rank: it knows of the restart
  std::vector<std::optional<uint64_t>> left_out_;  // by rank: the first step
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_EARLIER_PROCESS_H_
