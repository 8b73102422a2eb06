// How often a process that keeps dying is started again.

#ifndef SIGNPOST_CLI_RESTART_LIMIT_H_
#define SIGNPOST_CLI_RESTART_LIMIT_H_

#include <cstdint>
#include <deque>

#include "absl/time/time.h"

namespace signpost::cli {

// At most `most` restarts within kWindow, any number in all. Pure: time is an argument.
class RestartLimit {
 public:
  static constexpr size_t kMost = 10;
  static constexpr absl::Duration kWindow = absl::Minutes(1);

  explicit RestartLimit(size_t most = kMost) : most_(most) {}

  // Counts a restart at `now`, which is no earlier than the last one, and returns true, or returns
  // false.
  bool Restart(absl::Time now);

  uint32_t restarts() const { return restarts_; }

 private:
  size_t most_;
  std::deque<absl::Time> recent_;
  uint32_t restarts_ = 0;
};

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_RESTART_LIMIT_H_
