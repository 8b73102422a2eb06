// Time, as far as a worker waits for it. Tests put their own in its place.

#ifndef SIGNPOST_WORKER_CLOCK_H_
#define SIGNPOST_WORKER_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/steady_time.h"

namespace signpost {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  virtual absl::Time Now() { return SteadyNow(); }

  // Blocks until the condition holds, and returns true, or for `timeout`. Holds `mutex` when it is
  // called, when it returns, and when it looks at the condition.
  virtual bool Await(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout)
      ABSL_SHARED_LOCKS_REQUIRED(mutex) {
    return mutex.AwaitWithTimeout(condition, timeout);
  }

  // This machine's. Never destroyed.
  static Clock& Real() {
    static Clock& clock = *new Clock;
    return clock;
  }
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CLOCK_H_
