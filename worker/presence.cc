#include "worker/presence.h"

#include <utility>

#include "proto/steady_time.h"

namespace signpost {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);

// Whatever it says of the question, the aggregator has been told who asks.
bool IsAnswer(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:  // as while it shuts down
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return false;
    default:
      return true;
  }
}

}  // namespace

Presence::Presence(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout)
    : channel_(std::move(channel)),
      stub_(AggregatorService::NewStub(channel_)),
      timeout_(timeout) {}

Presence::~Presence() {
  End();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &Presence::HasEnded));
}

void Presence::Begin(const JoinRequest& request, uint64_t epoch) {
  absl::MutexLock lock(&mutex_);
  // An error before step 0 is the least that there is to ask for.
  request_.set_job(request.job());
  request_.set_epoch(epoch);
  request_.set_rank(request.rank());
  request_.set_incarnation(request.incarnation());
  is_known_ = true;
  if (!is_under_way_ && !is_over_) SetAlarm();
}

void Presence::AfterQuestion() {
  absl::MutexLock lock(&mutex_);
  is_known_ = false;
}

void Presence::End() {
  absl::MutexLock lock(&mutex_);
  is_over_ = true;
  if (alarm_ != nullptr) alarm_->Cancel();
  if (call_ != nullptr) call_->context.TryCancel();
}

void Presence::SetAlarm() {
  is_under_way_ = true;
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(ToSystemClock(SteadyNow() + kLookInterval), [this](bool) { Look(); });
}

void Presence::Look() {
  Call* call;
  {
    absl::MutexLock lock(&mutex_);
    if (is_over_) {
      is_under_way_ = false;
      return;
    }
    const bool is_there = channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
    if (is_there && is_known_) return SetAlarm();
    is_known_ = true;
    call_ = std::make_unique<Call>();
    call = call_.get();
    call->request = request_;
    call->context.set_deadline(ToSystemClock(SteadyNow() + timeout_));
    call->context.set_wait_for_ready(true);
  }
  stub_->async()->ReadError(&call->context, &call->request, &call->response,
                            [this](grpc::Status status) { OnAnswer(status); });
}

// A context holds on to its channel, and the last of those must not go on gRPC's thread: see
// GrpcChannel. So it is let go before the destructor may go on.
void Presence::OnAnswer(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  call_.reset();
  if (!IsAnswer(status)) is_known_ = false;
  if (!is_over_) return SetAlarm();
  is_under_way_ = false;
}

}  // namespace signpost
