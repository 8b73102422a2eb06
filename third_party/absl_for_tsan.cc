// Shows ThreadSanitizer what the system's libraries hide from it. They are built without it, so
// it sees no locking in them, and takes everything that an absl::Mutex guards for a race.
//
// This file defines the functions of Abseil's that order threads once more, around the library's
// own, and tells what they order. Linked into a test its definitions come first, for other
// libraries too: gRPC's locks are Abseil's. gRPC also passes work between threads through atomics
// of its own, which cannot be shown, so races with a gRPC function on the stack are left out.
//
// Without ThreadSanitizer it is empty.

#ifdef __SANITIZE_THREAD__

#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include "absl/base/config.h"
#include "absl/base/internal/raw_logging.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

extern "C" {

const char* __tsan_default_suppressions() { return "race:grpc::\nrace:libgrpc\n"; }

void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

// The library's function of this mangled name; a member function takes `this` as its first
// argument.
template <typename Function>
Function* LibraryFunction(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) ABSL_RAW_LOG(FATAL, "this version of Abseil has no %s", name);
  return reinterpret_cast<Function*>(function);
}

// The library may evaluate other threads' conditions while it holds the mutex within.
class IgnoreReads {
 public:
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

}  // namespace

void Mutex::Lock() {
  static const auto lock = LibraryFunction<void(Mutex*)>("_ZN4absl7debian35Mutex4LockEv");
  lock(this);
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  static const auto try_lock = LibraryFunction<bool(Mutex*)>("_ZN4absl7debian35Mutex7TryLockEv");
  const bool locked = try_lock(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::Unlock() {
  static const auto unlock = LibraryFunction<void(Mutex*)>("_ZN4absl7debian35Mutex6UnlockEv");
  __tsan_release(this);
  const IgnoreReads ignore;
  unlock(this);
}

void Mutex::Await(const Condition& condition) {
  static const auto await = LibraryFunction<void(Mutex*, const Condition&)>(
      "_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE");
  __tsan_release(this);
  {
    const IgnoreReads ignore;
    await(this, condition);
  }
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto await = LibraryFunction<bool(Mutex*, const Condition&, Duration)>(
      "_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  __tsan_release(this);
  bool is_true = false;
  {
    const IgnoreReads ignore;
    is_true = await(this, condition, timeout);
  }
  __tsan_acquire(this);
  return is_true;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto await = LibraryFunction<bool(Mutex*, const Condition&, Time)>(
      "_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  __tsan_release(this);
  bool is_true = false;
  {
    const IgnoreReads ignore;
    is_true = await(this, condition, deadline);
  }
  __tsan_acquire(this);
  return is_true;
}

void Notification::Notify() {
  static const auto notify =
      LibraryFunction<void(Notification*)>("_ZN4absl7debian312Notification6NotifyEv");
  __tsan_release(this);
  notify(this);
}

void Notification::WaitForNotification() const {
  static const auto wait = LibraryFunction<void(const Notification*)>(
      "_ZNK4absl7debian312Notification19WaitForNotificationEv");
  wait(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

ABSL_NAMESPACE_END
}  // namespace absl

#endif  // __SANITIZE_THREAD__
