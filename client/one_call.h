// How an object that is not thread-safe refuses a second thread instead of crashing.

#ifndef SIGNPOST_CLIENT_ONE_CALL_H_
#define SIGNPOST_CLIENT_ONE_CALL_H_

#include <atomic>
#include <mutex>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace signpost {

// Lets one call at a time into an object. Thread-safe.
class OneCall {
 public:
  // Returns body(), or FAILED_PRECONDITION, which names both calls, while another thread is in one.
  // `name` must be a literal.
  template <class Body>
  auto Run(const char* name, Body body) -> decltype(body()) {
    const std::unique_lock<std::mutex> turn(mutex_, std::try_to_lock);
    if (!turn.owns_lock()) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " was called while another thread is in ", running_.load(),
                       "; call it when that has returned"));
    }
    running_ = name;
    return body();
  }

  // Runs body() unless another call is under way. Returns whether it did.
  template <class Body>
  bool Try(Body body) {
    const std::unique_lock<std::mutex> turn(mutex_, std::try_to_lock);
    if (turn.owns_lock()) body();
    return turn.owns_lock();
  }

  // Runs body() when no other call is under way, for what cannot fail.
  template <class Body>
  auto Wait(Body body) -> decltype(body()) {
    const std::lock_guard<std::mutex> turn(mutex_);
    running_ = "another call";
    return body();
  }

 private:
  std::mutex mutex_;
  std::atomic<const char*> running_ = "";
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_ONE_CALL_H_
