// A thread that waits for what a GPU does.

#ifndef SIGNPOST_WORKER_EVENT_WATCH_H_
#define SIGNPOST_WORKER_EVENT_WATCH_H_

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/gpu.h"

namespace signpost {

// Thread-safe. It waits itself, instead of having the GPU call back: callbacks would hold up the
// stream that they are on, and are not called at all when something has failed there.
class EventWatch {
 public:
  using Happened = absl::AnyInvocable<void(absl::Status)>;

  explicit EventWatch(kernels::cuda::Gpu& gpu);
  // Once everything has happened.
  ~EventWatch();

  // Calls `happened` on the thread when the event has happened, or with what the GPU says instead;
  // one after the other, in the order of calls. The event must not be recorded again before.
  void Add(kernels::cuda::Event event, Happened happened);

 private:
  struct Item {
    kernels::cuda::Event event;
    Happened happened;
  };

  void Run();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ends_ || !items_.empty(); }

  kernels::cuda::Gpu& gpu_;
  absl::Mutex mutex_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_EVENT_WATCH_H_
