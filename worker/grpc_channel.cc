#include "worker/grpc_channel.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "log/log.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/grpc_status.h"
#include "proto/layout.h"
#include "proto/message.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "trace/recorder.h"
#include "trace/span.h"
#include "worker/presence.h"

namespace signpost {
namespace {

constexpr char kExchangeMethod[] = "/signpost.AggregatorService/Exchange";

// The largest payload an answer can have: a state of the largest chunk that a layout may have.
constexpr uint64_t kMaxPayloadBytes = uint64_t{4} * kMaxStateNumbers * kMaxChunkElements;
constexpr int kMaxMessageBytes = kMaxPayloadBytes + kMaxHeaderBytes;

// What gRPC makes of it; limits of the aggregator itself have other words.
constexpr char kResetForMemory[] = "Received RST_STREAM with error code 11";
// What answers there is no gRPC: a metrics port, perhaps. gRPC would try again for ever.
constexpr absl::string_view kHttp1Answered = "Trying to connect an http1.x server";

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(50);
constexpr absl::Duration kFullBackoff = absl::Milliseconds(100);
constexpr absl::Duration kFullMessageInterval = absl::Minutes(1);
constexpr absl::Duration kReasonTimeout = absl::Milliseconds(100);
constexpr absl::Duration kFirstReconnectBackoff = absl::Milliseconds(100);  // the least gRPC takes

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

std::shared_ptr<grpc::Channel> Connect(const std::string& target, const FailureTimeout& failure,
                                       const ClientSecurity* security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY,
                   0);  // gRPC 1.51 honours http_proxy even for 127.0.0.1
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(failure.keepalive_time()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(failure.keepalive_timeout()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, Milliseconds(kFirstReconnectBackoff));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, Milliseconds(failure.longest_backoff()));
  // Despite its name, how long a connection may take.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, Milliseconds(failure.connect_timeout()));
  // A pod that is started again has its name, and another address. gRPC would ask for that at most
  // every 30 s, which is half of an exchange's patience.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS,
                   Milliseconds(failure.longest_backoff()));
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // What nobody uses here costs processor time in every call.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  return OpenChannel(
      target,
      security == nullptr ? grpc::InsecureChannelCredentials() : security->CredentialsFor(target),
      arguments);
}

bool IsHttp1(const grpc::Status& status) {
  return absl::StrContains(status.error_message(), kHttp1Answered);
}

// The connection was lost, or the server is shutting down: it cancels calls that come meanwhile. Or
// its gRPC had no memory, and let go of calls that had done nothing (HTTP/2's ENHANCE_YOUR_CALM).
// Or, with time left, this process has stood still while gRPC's clock, and the server's, went on.
bool MayPass(const grpc::Status& status) {
  return (status.error_code() == grpc::StatusCode::UNAVAILABLE && !IsHttp1(status)) ||
         status.error_code() == grpc::StatusCode::CANCELLED ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
         (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
          status.error_message() == kResetForMemory);
}

// The aggregator has no memory for another frame now.
bool IsFull(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
         IsTryAgain(FromGrpcStatus(status));
}

class GrpcChannel final : public Channel {
 public:
  GrpcChannel(const std::string& target, const FailureTimeout& failure_timeout,
              OnConnection on_connection, std::shared_ptr<const ClientSecurity> security,
              uint32_t connections)
      : target_(target),
        security_(std::move(security)),
        on_connection_(std::move(on_connection)),
        longest_backoff_(failure_timeout.longest_backoff()) {
    CountWhileRunning();
    for (uint32_t i = 0; i < connections; ++i) {
      connections_.emplace_back(Connect(target, failure_timeout, security_.get()));
    }
    stub_ = AggregatorService::NewStub(connections_[0].channel);
    presence_.emplace(connections_[0].channel, failure_timeout.connect_timeout());
  }

  ~GrpcChannel() override {
    absl::MutexLock lock(&mutex_);
    for (Call* call : calls_) call->Cancel();
    mutex_.Await(absl::Condition(this, &GrpcChannel::HasNoCalls));
  }

  std::string target() const override { return target_; }

  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    absl::Status told;  // by check_may_wait
    const absl::StatusOr<JoinResponse> response =
        TryUntil<JoinResponse>(deadline, [&](bool wait, JoinResponse& joined) {
          return TryJoin(request, deadline, wait, check_may_wait, told, joined);
        });
    if (!told.ok()) return told;
    if (response.ok()) presence_->Begin(request, response->epoch());
    return response;
  }

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    auto* call = new Call(*this, header, std::move(payload), deadline, std::move(done));
    {
      absl::MutexLock lock(&mutex_);
      BeginWaiting();
      calls_.insert(call);
    }
    call->Try();
  }

  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    const absl::Status status =
        Unary<LeaveResponse>(&AggregatorService::Stub::Leave, request, deadline).status();
    if (status.ok()) presence_->End();
    return status;
  }

  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override {
    return Unary<ReadErrorResponse>(&AggregatorService::Stub::ReadError, request, deadline);
  }

  absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                        absl::Time deadline) override {
    StatusResponse response;
    const grpc::Status status =
        Try(&AggregatorService::Stub::Status, request, deadline, /*wait=*/true, response);
    presence_->AfterQuestion();
    if (status.ok()) return response;
    return Explain(WithReason(status), connections_[0]);
  }

 private:
  // Its own, which is made by the first call on it.
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    grpc::GenericStub stub;

    explicit Connection(std::shared_ptr<grpc::Channel> made)
        : channel(std::move(made)), stub(channel) {}
    bool IsThere() const {
      return channel->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
    }
  };

  // One exchange through all its tries. Owns itself: deleted once it has called `done`.
  class Call {
   public:
    Call(GrpcChannel& channel, const FrameHeader& header, std::shared_ptr<const Payload> payload,
         absl::Time deadline, ExchangeDone done)
        : channel_(channel),
          request_(SerializeRequest(header, std::move(payload))),
          deadline_(deadline),
          about_{.step = header.step(), .chunk = header.chunk()},
          done_(std::move(done)) {
      if (!trace::IsOn()) return;
      retry_.epoch = header.epoch();
      retry_.step = header.step();
      retry_.chunk = header.chunk();
      retry_.rank = header.rank();
      retry_.job = trace::LabelOf(header.job());
    }

    void Try() {
      {
        absl::MutexLock lock(&mutex_);
        if (!cancelled_) {
          context_ = std::make_unique<grpc::ClientContext>();  // gRPC allows one try per context
          context_->set_deadline(ToSystemClock(deadline_));
          context_->set_wait_for_ready(true);
        }
      }
      if (context_ == nullptr) return Finish(absl::CancelledError("the channel was closed"));
      connection_ = &channel_.NextConnection();
      connection_->stub.UnaryCall(context_.get(), kExchangeMethod, {}, &request_, &response_,
                                  [this](grpc::Status status) { OnReply(status); });
    }

    void Cancel() {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      if (context_ != nullptr) context_->TryCancel();
      if (backoff_alarm_ != nullptr) backoff_alarm_->Cancel();
    }

   private:
    void OnReply(const grpc::Status& status) {
      if (!status.ok()) {
        // ABORTED: an earlier try of this call, given up when its connection was lost, arrived
        // after this one and took its place.
        const bool may_pass =
            MayPass(status) || IsFull(status) || status.error_code() == grpc::StatusCode::ABORTED;
        if (IsFull(status)) {
          backoff_ = std::min(backoff_, kFullBackoff);
          channel_.SetFull(status, about_);
        }
        const bool again = may_pass && SteadyNow() + backoff_ < deadline_;
        if (status.error_code() == grpc::StatusCode::UNAVAILABLE) channel_.SetLost(status, about_);
        if (again || WasCancelled()) return TryLater();
        return Finish(channel_.Explain(status, *connection_));
      }
      channel_.SetFound(about_);
      Answer answer;
      absl::Status parsed = ParseResponse(response_, kMaxPayloadBytes, answer);
      response_.Clear();  // the transport's memory
      if (!parsed.ok()) return Finish(parsed);
      Finish(std::move(answer));
    }

    bool WasCancelled() {
      absl::MutexLock lock(&mutex_);
      return cancelled_;
    }

    void TryLater() {
      const absl::Time when = SteadyNow() + backoff_;
      backoff_ = std::min(2 * backoff_, channel_.longest_backoff_);
      bool cancelled;
      {
        absl::MutexLock lock(&mutex_);
        cancelled = cancelled_;
        context_.reset();
        if (!cancelled) {
          trace::RecordMoment(retry_);
          backoff_alarm_ = std::make_unique<grpc::Alarm>();
          backoff_alarm_->Set(ToSystemClock(when), [this](bool) { Try(); });
        }
      }
      if (cancelled) Finish(absl::CancelledError("the channel was closed"));
    }

    // A context holds on to its grpc::Channel, and the last of those must not go on gRPC's callback
    // thread, which would then join itself and read a freed queue (gRPC 1.51,
    // CallbackAlternativeCQ). So it is let go before the destructor of GrpcChannel may go on.
    void Finish(absl::StatusOr<Answer> result) {
      done_(std::move(result));
      {
        absl::MutexLock lock(&mutex_);
        context_.reset();
      }
      channel_.Forget(this);
      delete this;
    }

    GrpcChannel& channel_;
    const grpc::ByteBuffer request_;
    const absl::Time deadline_;
    const log::About about_;
    ExchangeDone done_;
    trace::Event retry_ = {.kind = trace::Kind::kRetry};
    grpc::ByteBuffer response_;
    Connection* connection_ = nullptr;  // of this try
    absl::Duration backoff_ = kFirstBackoff;

    absl::Mutex mutex_;
    bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
    std::unique_ptr<grpc::ClientContext> context_;  // replaced under the lock, between tries only
    std::unique_ptr<grpc::Alarm> backoff_alarm_ ABSL_GUARDED_BY(mutex_);
  };

  Connection& NextConnection() { return connections_[next_connection_++ % connections_.size()]; }

  bool HasNoCalls() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }

  // A call got no answer, and one did; `about` is what is known of that one. What hangs is found to
  // be lost a failure timeout late, so it is also told since when it was waited for.
  void SetLost(const grpc::Status& why, const log::About& about = {}) {
    {
      absl::MutexLock lock(&mutex_);
      if (lost_since_ != absl::InfiniteFuture()) return;
      lost_since_ = SteadyNow();
      lost_span_.emplace(trace::Event{.kind = trace::Kind::kLost});
    }
    Tell(absl::StrFormat("waiting for aggregator %s, which does not answer (%s)", target_,
                         why.error_message()),
         about);
  }

  void SetFound(const log::About& about = {}) {
    const absl::Time now = SteadyNow();
    absl::Time lost_since, waiting_since;
    {
      absl::MutexLock lock(&mutex_);
      waiting_since = std::exchange(waiting_since_, now);
      if (lost_since_ == absl::InfiniteFuture()) return;
      lost_since = std::exchange(lost_since_, absl::InfiniteFuture());
      lost_span_.reset();
    }
    Tell(absl::StrFormat("aggregator %s answers again, %.2f s after a call to it failed and %.2f s "
                         "after the wait for it began",
                         target_, absl::ToDoubleSeconds(now - lost_since),
                         absl::ToDoubleSeconds(now - waiting_since)),
         about);
  }

  // A call begins. While others are under way, the wait is that since the last answer.
  void BeginWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (calls_.empty() && lost_since_ == absl::InfiniteFuture()) waiting_since_ = SteadyNow();
  }

  void SetFull(const grpc::Status& why, const log::About& about) {
    const absl::Time now = SteadyNow();
    {
      absl::MutexLock lock(&mutex_);
      if (now < next_full_message_) return;
      next_full_message_ = now + kFullMessageInterval;
    }
    Tell(absl::StrFormat("waiting for memory of aggregator %s (%s)", target_, why.error_message()),
         about);
  }

  void Tell(const std::string& what, log::About about) const {
    about.aggregator = target_;
    const log::Scope scope(std::move(about));
    if (on_connection_) on_connection_(what);
  }

  void Forget(Call* call) {
    absl::MutexLock lock(&mutex_);
    calls_.erase(call);
  }

  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> Unary(Method method, const Request& request, absl::Time deadline) {
    return TryUntil<Response>(deadline, [&](bool wait, Response& response) {
      return Try(method, request, deadline, wait, response);
    });
  }

  // Tries until the deadline. The first try does not wait for a connection, so that it is known why
  // there is none. Those that follow do: gRPC makes progress with a connection while a call waits.
  template <typename Response>
  absl::StatusOr<Response> TryUntil(
      absl::Time deadline,
      absl::FunctionRef<grpc::Status(bool wait, Response& response)> try_once) {
    {
      absl::MutexLock lock(&mutex_);
      BeginWaiting();
    }
    bool wait = false;
    for (absl::Duration backoff = kFirstBackoff;;
         backoff = std::min(2 * backoff, longest_backoff_)) {
      Response response;
      grpc::Status status = try_once(wait, response);
      if (status.ok()) {
        SetFound();
        return response;
      }
      if (status.error_code() == grpc::StatusCode::UNAVAILABLE) SetLost(status);
      if (!MayPass(status) || SteadyNow() + backoff >= deadline) {
        return Explain(WithReason(status), connections_[0]);
      }
      if (wait) absl::SleepFor(backoff);
      wait = true;
    }
  }

  template <typename Response, typename Method, typename Request>
  grpc::Status Try(Method method, const Request& request, absl::Time deadline, bool wait,
                   Response& response) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemClock(deadline));
    context.set_wait_for_ready(wait);  // for a connection
    return (stub_.get()->*method)(&context, request, &response);
  }

  // As Try. Ends with what no other try follows, once `told` is an error.
  grpc::Status TryJoin(const JoinRequest& request, absl::Time deadline, bool wait,
                       CheckMayWait check_may_wait, absl::Status& told, JoinResponse& response) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemClock(deadline));
    context.set_wait_for_ready(wait);
    grpc::Status result;
    absl::Notification done;
    stub_->async()->Join(&context, &request, &response, [&](grpc::Status status) {
      result = std::move(status);
      done.Notify();
    });
    while (!done.WaitForNotificationWithTimeout(kQuestionInterval)) {
      if (told = check_may_wait(); told.ok()) continue;
      context.TryCancel();
      done.WaitForNotification();
      return grpc::Status(grpc::StatusCode::ABORTED, "not to be waited for");
    }
    return result;
  }

  // What was waited for until the deadline has a reason, which is told to who does not wait.
  grpc::Status WithReason(const grpc::Status& status) {
    const bool is_late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    if (!is_late || connections_[0].IsThere()) return status;
    StatusResponse response;
    StatusRequest request;
    if (security_ != nullptr) request.set_job(security_->JobToAskAbout());
    const grpc::Status now = Try(&AggregatorService::Stub::Status, request,
                                 SteadyNow() + kReasonTimeout, /*wait=*/false, response);
    presence_->AfterQuestion();
    return now.error_code() == grpc::StatusCode::UNAVAILABLE ? now : status;
  }

  // The caller wants to know when there was no connection, and why.
  absl::Status Explain(const grpc::Status& status, const Connection& connection) const {
    const bool is_late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    const bool is_unavailable = status.error_code() == grpc::StatusCode::UNAVAILABLE;
    if (IsHttp1(status)) {
      return absl::InvalidArgumentError(absl::StrCat(
          target_,
          " answers in HTTP/1, which no aggregator does where it listens for workers; is that "
          "another port of it, such as its --metrics-listen?"));
    }
    if ((is_late || is_unavailable) && !connection.IsThere()) {
      return absl::UnavailableError(absl::StrFormat(
          "no connection to %s in the time given%s; is an aggregator running there%s?", target_,
          is_late ? "" : absl::StrCat(" (", status.error_message(), ")"),
          security_ != nullptr && security_->is_tls()
              ? ", with mTLS and a certificate that the root in the TLS directory vouches for"
              : ", one without mTLS, as this process is"));
    }
    if (is_late) return absl::DeadlineExceededError("no answer in the time given");
    // CANCELLED is for what is ended here.
    if (status.error_code() == grpc::StatusCode::CANCELLED) {
      return absl::UnavailableError(
          absl::StrCat(target_, " has cancelled the call, as it does while it shuts down"));
    }
    return FromGrpcStatus(status);
  }

  const std::string target_;
  const std::shared_ptr<const ClientSecurity> security_;  // or null; outlives connections_
  const OnConnection on_connection_;
  const absl::Duration longest_backoff_;  // of an exchange's tries
  std::vector<Connection> connections_;
  std::atomic<uint64_t> next_connection_ = 0;
  std::unique_ptr<AggregatorService::Stub> stub_;  // of the first
  std::optional<Presence> presence_;               // likewise

  absl::Mutex mutex_;
  std::set<Call*> calls_ ABSL_GUARDED_BY(mutex_);
  absl::Time lost_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // that: it is not
  absl::Time waiting_since_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time next_full_message_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::optional<trace::Span> lost_span_ ABSL_GUARDED_BY(mutex_);  // since then
};

}  // namespace

std::unique_ptr<Channel> ConnectToAggregator(const std::string& target,
                                             const FailureTimeout& failure_timeout,
                                             OnConnection on_connection,
                                             std::shared_ptr<const ClientSecurity> security,
                                             uint32_t connections) {
  return std::make_unique<GrpcChannel>(target, failure_timeout, std::move(on_connection),
                                       std::move(security), connections);
}

}  // namespace signpost
