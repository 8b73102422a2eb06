// All that a node's worker does for the processes that attach to it.

#ifndef SIGNPOST_NODE_NODE_H_
#define SIGNPOST_NODE_NODE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "node/job.h"
#include "proto/node.pb.h"

namespace signpost::node {

// Its jobs, by name: one for each optimizer of a training program. Thread-safe.
class Node {
 public:
  static constexpr size_t kMostJobs = 64;  // at a time

  explicit Node(const NodeOptions& options) : options_(options) {}
  ~Node() { Stop(); }

  struct Process {
    std::shared_ptr<Job> job;  // which may be over before its streams have ended
    uint64_t number;           // there
  };

  // As Job::Enter, of the job that the process names. INVALID_ARGUMENT for a process that is not of
  // this node, or has no job; RESOURCE_EXHAUSTED beyond kMostJobs; UNAVAILABLE after Stop.
  absl::StatusOr<Process> Enter(const Attach& request) ABSL_LOCKS_EXCLUDED(mutex_);

  // Leaves all jobs, as Job::Stop. Blocks. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status Check(const Attach& request) const;
  absl::StatusOr<std::shared_ptr<Job>> JobOf(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const NodeOptions options_;
  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_NODE_H_
