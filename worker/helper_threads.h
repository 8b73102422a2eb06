// Threads that help whoever asks them, all of a process's.

#ifndef SIGNPOST_WORKER_HELPER_THREADS_H_
#define SIGNPOST_WORKER_HELPER_THREADS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace signpost {

// Thread-safe.
class HelperThreads {
 public:
  // The process's helpers, at least `count` of them, or as many as the system has. They end when
  // nobody has them any more.
  static std::shared_ptr<HelperThreads> AtLeast(size_t count);
  ~HelperThreads();

  // Calls work(i) for each i below `items`, here and on helpers that have nothing else to do, and
  // returns when all are done; with an exception when one of them ended with it.
  void Share(size_t items, absl::FunctionRef<void(size_t i)> work);

 private:
  // What somebody shares out: items from `next` on are not taken yet.
  struct Task {
    const size_t items;
    const absl::FunctionRef<void(size_t i)> work;
    size_t next = 0;
    std::atomic<size_t> unfinished;
    std::exception_ptr exception;  // the first

    bool IsDone() const { return unfinished == 0; }
  };

  HelperThreads() = default;
  void Grow(size_t count);
  void Help();
  // Takes the task's items until all are taken.
  void TakeItems(Task& task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasTaskOrStops() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !tasks_.empty() || stops_;
  }

  absl::Mutex mutex_;
  std::deque<Task*> tasks_ ABSL_GUARDED_BY(mutex_);  // those with items that are not taken
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> shared_ = 0;  // tasks so far; looked at before a thread goes to sleep
  std::vector<std::thread> threads_;  // only AtLeast, one call at a time, and the destructor
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HELPER_THREADS_H_
