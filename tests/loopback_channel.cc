#include "tests/loopback_channel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace signpost::testing {
namespace {

// Exchanges under way. Shared with the aggregator's callbacks, which may come after the channel is
// gone.
class Calls {
 public:
  uint64_t Add(absl::Time deadline, Channel::ExchangeDone done) {
    absl::MutexLock lock(&mutex_);
    calls_.emplace(++last_id_, Call{deadline, std::move(done)});
    return last_id_;
  }

  // Ends the call, unless it has ended.
  void Finish(uint64_t id, absl::StatusOr<Answer> result) {
    Channel::ExchangeDone done;
    {
      absl::MutexLock lock(&mutex_);
      auto found = calls_.find(id);
      if (found == calls_.end()) return;
      done = std::move(found->second.done);
      calls_.erase(found);
    }
    done(std::move(result));
  }

  // Ends calls as their deadlines pass, until Close.
  void ExpireUntilClosed() {
    while (true) {
      std::vector<uint64_t> expired;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.AwaitWithDeadline(absl::Condition(&closed_), NextDeadline());
        if (closed_) return;
        for (const auto& [id, call] : calls_) {
          if (call.deadline <= absl::Now()) expired.push_back(id);
        }
      }
      for (uint64_t id : expired) {
        Finish(id, absl::DeadlineExceededError("no answer in the time given"));
      }
    }
  }

  void Close() {
    std::vector<uint64_t> open;
    {
      absl::MutexLock lock(&mutex_);
      closed_ = true;
      for (const auto& [id, call] : calls_) open.push_back(id);
    }
    for (uint64_t id : open) Finish(id, absl::CancelledError("the channel was closed"));
  }

 private:
  struct Call {
    absl::Time deadline;
    Channel::ExchangeDone done;
  };

  // Looked at again after 10 ms at the latest: a call that was added meanwhile may end sooner.
  absl::Time NextDeadline() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    absl::Time next = absl::Now() + absl::Milliseconds(10);
    for (const auto& [id, call] : calls_) next = std::min(next, call.deadline);
    return next;
  }

  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Call> calls_ ABSL_GUARDED_BY(mutex_);
};

Answer AnswerOf(const Aggregator::Reply& reply) {
  Answer answer{OwnedChunk::HeaderOf(reply), Payload(reply.answer->payload.size())};
  std::memcpy(answer.payload.data(), reply.answer->payload.data(), answer.payload.size());
  return answer;
}

class LoopbackChannel final : public Channel {
 public:
  explicit LoopbackChannel(Aggregator& aggregator)
      : aggregator_(aggregator),
        calls_(std::make_shared<Calls>()),
        expiry_([calls = calls_] { calls->ExpireUntilClosed(); }) {}

  ~LoopbackChannel() override {
    calls_->Close();
    expiry_.join();
  }

  std::string target() const override { return "loopback"; }

  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    struct Result {
      absl::Mutex mutex;
      bool done = false;
      absl::StatusOr<JoinResponse> response;
    };
    auto result = std::make_shared<Result>();
    aggregator_.Join(request, [result](absl::StatusOr<JoinResponse> response) {
      absl::MutexLock lock(&result->mutex);
      result->response = std::move(response);
      result->done = true;
    });
    for (absl::Time now = absl::Now(); now < deadline; now = absl::Now()) {
      {
        absl::MutexLock lock(&result->mutex);
        const absl::Duration longest = std::min(deadline - now, kQuestionInterval);
        if (result->mutex.AwaitWithTimeout(absl::Condition(&result->done), longest)) {
          return result->response;
        }
      }
      if (absl::Status told = check_may_wait(); !told.ok()) return told;
    }
    return absl::DeadlineExceededError("no answer in the time given");
  }

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    Frame frame{header, Payload(payload->size())};
    std::memcpy(frame.payload.data(), payload->data(), payload->size());
    const uint64_t id = calls_->Add(deadline, std::move(done));
    aggregator_.Exchange(std::move(frame),
                         [calls = calls_, id](absl::StatusOr<Aggregator::Reply> reply) {
                           if (!reply.ok()) return calls->Finish(id, reply.status());
                           calls->Finish(id, AnswerOf(*reply));
                         });
  }

  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    auto left = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> future = left->get_future();
    aggregator_.Leave(request, [left](absl::Status status) { left->set_value(status); });
    if (future.wait_until(absl::ToChronoTime(deadline)) == std::future_status::ready) {
      return future.get();
    }
    return absl::DeadlineExceededError("no answer in the time given");
  }

  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override {
    return aggregator_.ReadError(request);
  }

  absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                        absl::Time deadline) override {
    return aggregator_.Status(request);
  }

 private:
  Aggregator& aggregator_;
  const std::shared_ptr<Calls> calls_;
  std::thread expiry_;
};

}  // namespace

std::unique_ptr<Channel> LoopbackTo(Aggregator& aggregator) {
  return std::make_unique<LoopbackChannel>(aggregator);
}

}  // namespace signpost::testing
