// Time that stands still while this process does: stopped, frozen (`docker pause`), or on a machine
// that is moved.

#ifndef SIGNPOST_PROTO_RUNNING_TIME_H_
#define SIGNPOST_PROTO_RUNNING_TIME_H_

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"

namespace signpost {

// A steady clock goes on while a process stands still, and nothing says so afterwards. But then
// nobody has ticked: without a tick for kMostCounted, no more time passes until the next one, and
// what lies between does not count. On a machine that is so busy that a tick comes late, time is
// lost likewise.
//
// It never goes back. Thread-safe, with ticks from one thread.
class RunningTime {
 public:
  using SteadyClock = absl::Duration (*)();  // the time since some moment

  static constexpr absl::Duration kTickInterval = absl::Milliseconds(500);  // wanted
  static constexpr absl::Duration kMostCounted = absl::Seconds(1);

  // As `clock`, until the first tick.
  explicit constexpr RunningTime(SteadyClock clock) : clock_(clock) {}

  absl::Duration Now() const {
    // In this order, as Tick stores them the other way round: with a new limit goes what it counts
    // from, and a time that was read later.
    const int64_t limit = limit_ns_.load();
    const int64_t stood_still = stood_still_ns_.load();
    const int64_t now = absl::ToInt64Nanoseconds(clock_()) - stood_still;
    return absl::Nanoseconds(now < limit ? now : limit);
  }

  void Tick() {
    const int64_t steady = absl::ToInt64Nanoseconds(clock_());
    const int64_t beyond = steady - stood_still_ns_ - limit_ns_;
    if (beyond > 0) stood_still_ns_ += beyond;
    limit_ns_ = steady - stood_still_ns_ + absl::ToInt64Nanoseconds(kMostCounted);
  }

  // There are no more ticks: time passes as before the first one.
  void EndTicks() { limit_ns_ = kNoLimit; }

 private:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  const SteadyClock clock_;
  std::atomic<int64_t> stood_still_ns_ = 0;   // that does not count
  std::atomic<int64_t> limit_ns_ = kNoLimit;  // of what counts
};

}  // namespace signpost

#endif  // SIGNPOST_PROTO_RUNNING_TIME_H_
