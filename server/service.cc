#include "server/service.h"

#include <chrono>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "failpoint/failpoint.h"
#include "proto/frame.h"
#include "proto/grpc_status.h"
#include "proto/layout.h"
#include "proto/message.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

// A deadline counts as reached a little early: the caller's clock reaches it before ours does,
// because it travels here as the time that was left.
constexpr absl::Duration kDeadlineSlack = absl::Seconds(1);

absl::Status WhyCancelled(const grpc::CallbackServerContext& context) {
  if (absl::FromChrono(context.deadline()) <= absl::Now() + kDeadlineSlack) {
    return absl::DeadlineExceededError("the worker waited for as long as it was told to");
  }
  return absl::CancelledError("the worker went away");
}

// A Join that may have to wait for the other ranks, and whose worker may go away meanwhile.
// Owned by the call; gRPC calls OnCancel and OnDone only after the handler has returned it.
class JoinReactor final : public grpc::ServerUnaryReactor {
 public:
  JoinReactor(Aggregator& aggregator, const grpc::CallbackServerContext& context,
              const JoinRequest& request, grpc::ByteBuffer& response)
      : aggregator_(aggregator), context_(context) {
    call_ = aggregator_.Join(
        request,
        [this, &response](absl::StatusOr<JoinResponse> result) {
          if (result.ok()) response = SerializeMessage(*result);
          Finish(ToGrpcStatus(result.status()));
        },
        context.peer());
  }

  void OnCancel() override { aggregator_.CancelJoin(call_, WhyCancelled(context_)); }
  void OnDone() override { delete this; }

 private:
  Aggregator& aggregator_;
  const grpc::CallbackServerContext& context_;
  uint64_t call_ = 0;
};

grpc::ByteBuffer Serialize(Aggregator::Reply reply) {
  const AnswerHeader header = OwnedChunk::HeaderOf(reply);
  return SerializeResponse(header, std::move(reply.answer));
}

log::About AboutOf(const FrameHeader& header, uint32_t shard) {
  return {.job = header.job().substr(0, kMaxJobNameBytes),
          .step = header.step(),
          .chunk = header.chunk(),
          .worker = header.rank(),
          .shard = shard};
}

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext& context,
                                    const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* Respond(grpc::CallbackServerContext& context,
                                  const google::protobuf::Message& message,
                                  grpc::ByteBuffer* response) {
  *response = SerializeMessage(message);
  return FinishNow(context, absl::OkStatus());
}

// Of a Join's tensors, with a name and two dimensions each; the rest of it is little.
constexpr uint64_t kMaxJoinBytes = 512 * kMaxTensors;
// All others have a few numbers and a name.
constexpr uint64_t kMaxFieldBytes = 4096;

}  // namespace

template <typename Request>
absl::StatusOr<Request> Service::Take(const grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer* bytes,
                                      uint64_t max_field_bytes) const {
  Request request;
  absl::Status status = ParseMessage(*bytes, max_field_bytes, request);
  const_cast<grpc::ByteBuffer*>(bytes)->Clear();
  if (status.ok()) status = Check(context, request.job());
  if (!status.ok()) return status;
  return request;
}

grpc::ServerUnaryReactor* Service::Join(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) {
  const absl::StatusOr<JoinRequest> join = Take<JoinRequest>(*context, request, kMaxJoinBytes);
  if (!join.ok()) return FinishNow(*context, join.status());
  return new JoinReactor(aggregator_, *context, *join, *response);
}

grpc::ServerUnaryReactor* Service::Exchange(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) {
  exchange_bytes_received_.fetch_add(request->Length(), std::memory_order_relaxed);
  Frame frame;
  absl::Status status = ParseRequest(*request, max_payload_bytes_, frame);
  // A call that ends on its way may come with nothing.
  if (status.ok() && request->Length() == 0) {
    status = absl::InvalidArgumentError("the message is empty");
  }
  if (status.ok()) status = Check(*context, frame.header.job());
  if (!status.ok()) return FinishNow(*context, status);
  // The frame is a copy: while the call waits, the transport need not keep the bytes.
  const_cast<grpc::ByteBuffer*>(request)->Clear();
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  log::About about;
  if (log::format() == log::Format::kJson) about = AboutOf(frame.header, aggregator_.shard());
  auto done = [this, reactor, response,
               about = std::move(about)](absl::StatusOr<Aggregator::Reply> reply) {
    if (about.step) Tell(about, reply);
    if (reply.ok()) *response = Serialize(*std::move(reply));
    exchange_bytes_sent_.fetch_add(response->Length(), std::memory_order_relaxed);
    reactor->Finish(ToGrpcStatus(reply.status()));
    Reach(Failpoint::kAnswerSent);
  };
  aggregator_.Exchange(std::move(frame), std::move(done), context->peer());
  return reactor;
}

grpc::ServerUnaryReactor* Service::Leave(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) {
  const absl::StatusOr<LeaveRequest> leave = Take<LeaveRequest>(*context, request, kMaxFieldBytes);
  if (!leave.ok()) return FinishNow(*context, leave.status());
  *response = SerializeMessage(LeaveResponse());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  aggregator_.Leave(*leave,
                    [reactor](absl::Status status) { reactor->Finish(ToGrpcStatus(status)); });
  return reactor;
}

grpc::ServerUnaryReactor* Service::ReadError(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) {
  const auto question = Take<ReadErrorRequest>(*context, request, kMaxFieldBytes);
  if (!question.ok()) return FinishNow(*context, question.status());
  const absl::StatusOr<ReadErrorResponse> error = aggregator_.ReadError(*question, context->peer());
  if (!error.ok()) return FinishNow(*context, error.status());
  return Respond(*context, *error, response);
}

grpc::ServerUnaryReactor* Service::Status(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) {
  const auto question = Take<StatusRequest>(*context, request, kMaxFieldBytes);
  if (!question.ok()) return FinishNow(*context, question.status());
  return Respond(*context, aggregator_.Status(*question), response);
}

void Service::Tell(const log::About& frame, const absl::StatusOr<Aggregator::Reply>& reply) {
  // What ends as these do is sent again, or is told by its cause.
  const absl::Status& status = reply.status();
  if (absl::IsAborted(status) || absl::IsUnavailable(status) || IsTryAgain(status)) return;
  if (!status.ok()) {
    if (IsTime(News::kFailed)) {
      log::WriteEvent(log::Level::kWarning,
                      absl::StrCat("an exchange has failed: ", status.message()), frame);
    }
    return;
  }
  const AnswerHeader& answer = reply->answer->header;
  // Of the ranks that get the answer, the one at fault.
  if (answer.codec() == SKIP && answer.skipped_by_rank() == frame.worker &&
      IsTime(News::kSkipped)) {
    log::WriteEvent(log::Level::kWarning,
                    "a round is skipped: what this rank would have sent was not finite", frame);
  }
  if (answer.codec() == REPLAY && IsTime(News::kAskedAgain)) {
    log::About wanted = frame;
    wanted.step = answer.step();
    log::WriteEvent(log::Level::kInfo,
                    "a rank is asked for its frames again, from this step on, after a restart",
                    wanted);
  }
}

bool Service::IsTime(News news) {
  const int64_t now = absl::ToUnixSeconds(absl::Now());
  return last_told_[static_cast<size_t>(news)].exchange(now) != now;
}

absl::Status Service::Check(const grpc::CallbackServerContext& context,
                            absl::string_view job) const {
  return authorizer_ == nullptr ? absl::OkStatus()
                                : authorizer_->Check(*context.auth_context(), job);
}

}  // namespace signpost
