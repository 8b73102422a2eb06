#include "node/service.h"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace signpost::node {
namespace {

// A process's requests: the next one is read when the one before has been answered, if it is to be.
// Owned by the call.
class Stream final : public grpc::ServerBidiReactor<Request, Reply> {
 public:
  Stream(Node& node, ProcessWatch& process_watch) : node_(node), process_watch_(process_watch) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End();
    {
      absl::MutexLock lock(&mutex_);
      if (has_ended_) return;
      is_answering_ = true;
    }
    if (!process_) {
      const absl::StatusOr<Node::Process> process = node_.Enter(request_.attach());
      if (!process.ok()) {
        Reply reply;
        reply.set_code(static_cast<int>(process.status().code()));
        reply.set_message(std::string(process.status().message()));
        return StartWrite(&(reply_ = std::move(reply)));
      }
      const Attach& attach = request_.attach();
      watched_ = process_watch_.Add(static_cast<pid_t>(attach.pid()), attach.pid_namespace(),
                                    [process = *process] { process.job->Gone(process.number); });
      absl::MutexLock lock(&mutex_);
      process_ = *process;
    }
    // It is answered even if the process is gone, and this object waits for that.
    const Node::Process process = *process_;
    if (request_.has_gradients_ready()) {
      process.job->HearOfGradients(process.number, request_.gradients_ready());
      return OnAnswered(/*ok=*/true);
    }
    process.job->Call(process.number, request_, [this](Reply reply) {
      reply_ = std::move(reply);
      StartWrite(&reply_);
    });
  }

  void OnWriteDone(bool ok) override { OnAnswered(ok); }

  void OnCancel() override { End(); }
  void OnDone() override {
    process_watch_.Remove(watched_);
    delete this;
  }

 private:
  // Or it needs no answer.
  void OnAnswered(bool ok) {
    bool finish;
    {
      absl::MutexLock lock(&mutex_);
      is_answering_ = false;
      finish = has_ended_;
    }
    if (finish) {
      if (process_) process_->job->Gone(process_->number);  // it may have ended before it was there
      return Finish(grpc::Status::OK);
    }
    if (!ok) return End();
    StartRead(&request_);
  }

  // Whatever the order in which gRPC says so: the process is gone, or done.
  void End() {
    std::optional<Node::Process> process;
    bool finish;
    {
      absl::MutexLock lock(&mutex_);
      if (std::exchange(has_ended_, true)) return;
      process = process_;
      finish = !is_answering_;
    }
    if (process) process->job->Gone(process->number);
    if (finish) Finish(grpc::Status::OK);
  }

  Node& node_;
  ProcessWatch& process_watch_;
  uint64_t watched_ = 0;
  Request request_;
  Reply reply_;
  absl::Mutex mutex_;
  bool is_answering_ ABSL_GUARDED_BY(mutex_) = false;  // a request, until the reply is written
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  // Written under the lock, and read without by what reads requests.
  std::optional<Node::Process> process_;
};

}  // namespace

grpc::ServerBidiReactor<Request, Reply>* Service::Serve(grpc::CallbackServerContext* context) {
  return new Stream(node_, process_watch_);
}

}  // namespace signpost::node
