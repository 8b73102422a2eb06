#include "worker/helper_threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "hwy/cache_control.h"

namespace signpost {
namespace {

// A thread that sleeps takes tens of microseconds to wake up, and the next task, or the end of this
// one, is seldom further away. So long a thread looks out for it first.
constexpr auto kWatch = std::chrono::microseconds(20);

template <class Condition>
void WatchFor(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kWatch;
  while (!condition() && std::chrono::steady_clock::now() < end) hwy::Pause();
}

}  // namespace

std::shared_ptr<HelperThreads> HelperThreads::AtLeast(size_t count) {
  static absl::Mutex mutex(absl::kConstInit);
  static std::weak_ptr<HelperThreads>& all = *new std::weak_ptr<HelperThreads>;
  absl::MutexLock lock(&mutex);
  std::shared_ptr<HelperThreads> helpers = all.lock();
  if (helpers == nullptr) all = helpers = std::shared_ptr<HelperThreads>(new HelperThreads);
  helpers->Grow(count);
  return helpers;
}

void HelperThreads::Grow(size_t count) {
  try {
    while (threads_.size() < count) {
      threads_.emplace_back([this] { Help(); });
      pthread_setname_np(threads_.back().native_handle(), "signpost-crew");
    }
  } catch (const std::system_error&) {
    // As many as there are do the same.
  }
}

HelperThreads::~HelperThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void HelperThreads::Share(size_t items, absl::FunctionRef<void(size_t i)> work) {
  if (items == 0) return;
  Task task = {.items = items, .work = work, .unfinished = items};
  {
    absl::MutexLock lock(&mutex_);
    tasks_.push_back(&task);
    ++shared_;
    TakeItems(task);
  }
  WatchFor([&task] { return task.IsDone(); });
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&task, &Task::IsDone));
  }
  if (task.exception) std::rethrow_exception(task.exception);
}

void HelperThreads::TakeItems(Task& task) {
  while (task.next < task.items) {
    const size_t i = task.next++;
    if (task.next == task.items) tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
    mutex_.Unlock();
    std::exception_ptr exception;
    try {
      task.work(i);
    } catch (...) {
      exception = std::current_exception();
    }
    mutex_.Lock();
    if (exception && !task.exception) task.exception = std::move(exception);
    --task.unfinished;  // from 0 on the task may be gone, once the mutex is free
  }
}

void HelperThreads::Help() {
  while (true) {
    uint64_t shared;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &HelperThreads::HasTaskOrStops));
      if (stops_) return;
      TakeItems(*tasks_.front());
      shared = shared_;
    }
    WatchFor([this, shared] { return shared_ != shared; });
  }
}

}  // namespace signpost
