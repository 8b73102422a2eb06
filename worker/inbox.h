// What others tell a worker of its chunks, in the order in which they do.

#ifndef SIGNPOST_WORKER_INBOX_H_
#define SIGNPOST_WORKER_INBOX_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/clock.h"

namespace signpost {

// Thread-safe.
template <class What>
class Inbox {
 public:
  struct Item {
    uint32_t chunk;
    What what;
  };

  // `on_put` is called after each Put, on its thread and with no lock held; null: nothing is.
  explicit Inbox(std::function<void()> on_put = nullptr) : on_put_(std::move(on_put)) {}

  void Put(uint32_t chunk, What what) {
    {
      absl::MutexLock lock(&mutex_);
      items_.push_back({chunk, std::move(what)});
    }
    if (on_put_) on_put_();
  }

  // Blocks for at most `timeout`.
  std::optional<Item> Take(Clock& clock, absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    if (!clock.Await(mutex_, absl::Condition(this, &Inbox::HasItem), timeout)) {
      return std::nullopt;
    }
    return TakeFirst();
  }

  // What is there already.
  std::optional<Item> TakeIfAny() {
    absl::MutexLock lock(&mutex_);
    if (!HasItem()) return std::nullopt;
    return TakeFirst();
  }

 private:
  Item TakeFirst() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }
  bool HasItem() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !items_.empty(); }

  const std::function<void()> on_put_;
  absl::Mutex mutex_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_INBOX_H_
