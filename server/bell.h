// Wakes a thread that has something to write down.

#ifndef SIGNPOST_SERVER_BELL_H_
#define SIGNPOST_SERVER_BELL_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace signpost {

// Thread-safe. May be rung with any lock held.
class Bell {
 public:
  void Ring() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    rung_ = true;
  }

  // Blocks until it has been rung since the last call, or for `timeout`.
  void Await(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&rung_), timeout);
    rung_ = false;
  }

 private:
  absl::Mutex mutex_;
  bool rung_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_BELL_H_
