// A worker's connection while it sends nothing. gRPC makes one that was lost again with the next
// call only, and an aggregator knows which processes live by their connections, and whose those are
// by what has come over them.

#ifndef SIGNPOST_WORKER_PRESENCE_H_
#define SIGNPOST_WORKER_PRESENCE_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/grpcpp.h"
#include "proto/aggregator.grpc.pb.h"

namespace signpost {

// Looks at a channel's connection once a second, from gRPC's threads. When it has been lost, or
// others may have made it, a call says whose it is, and makes it if need be; that is tried again
// until the aggregator has answered, however. Thread-safe.
class Presence {
 public:
  // Such a call may take `timeout`.
  Presence(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout);
  // Returns when nothing is under way.
  ~Presence();

  // The connection is that of who has joined the job so. Before the first Join nothing happens.
  void Begin(const JoinRequest& request, uint64_t epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  // A call has ended that does not say whose the connection is, and may have made it.
  void AfterQuestion() ABSL_LOCKS_EXCLUDED(mutex_);
  // Who has joined has left: nothing happens any more.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Call {
    grpc::ClientContext context;
    ReadErrorRequest request;
    ReadErrorResponse response;
  };

  void SetAlarm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Look() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAnswer(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasEnded() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !is_under_way_; }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<AggregatorService::Stub> stub_;
  const absl::Duration timeout_;

  absl::Mutex mutex_;
  ReadErrorRequest request_ ABSL_GUARDED_BY(mutex_);  // of who has joined
  bool is_known_ ABSL_GUARDED_BY(mutex_) = true;      // whose the connection is, if it is there
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_under_way_ ABSL_GUARDED_BY(mutex_) = false;  // an alarm or a call
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_PRESENCE_H_
