// When processes end, as the kernel says it: also while children that they have forked hold their
// connections open.

#ifndef SIGNPOST_NODE_PROCESS_WATCH_H_
#define SIGNPOST_NODE_PROCESS_WATCH_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace signpost::node {

// Tells apart which processes count processes alike; 0 if that is not known.
uint64_t PidNamespace();

// Thread-safe. Holds a descriptor for each process.
class ProcessWatch {
 public:
  using Ended = absl::AnyInvocable<void()>;

  ProcessWatch();
  ~ProcessWatch();  // What is being told has been told then.

  // Calls `ended` once, when the process of that number in that PidNamespace has ended: from a
  // thread of its own, or at once if there is none. Never, if the namespace is not this process's,
  // or the system cannot watch. Returns what Remove wants.
  uint64_t Add(pid_t pid, uint64_t pid_namespace, Ended ended) ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on nothing begins to tell of it. Also of what is removed, or was never watched.
  void Remove(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Process {
    int pidfd;
    Ended ended;
  };

  void Run();
  Ended Take(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

  const int wake_;
  const int epoll_;
  absl::Mutex mutex_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Process> processes_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_PROCESS_WATCH_H_
