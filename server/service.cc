#include "server/service.h"

#include <chrono>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "failpoint/failpoint.h"
#include "proto/frame.h"
#include "proto/grpc_status.h"
#include "proto/message.h"

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
              const JoinRequest& request, JoinResponse& response)
      : aggregator_(aggregator), context_(context) {
    call_ = aggregator_.Join(request, [this, &response](absl::StatusOr<JoinResponse> result) {
      if (result.ok()) response = *std::move(result);
      Finish(ToGrpcStatus(result.status()));
    });
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

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext& context,
                                    const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* Service::Join(grpc::CallbackServerContext* context,
                                        const JoinRequest* request, JoinResponse* response) {
  if (absl::Status status = Check(*context, request->job()); !status.ok()) {
    return FinishNow(*context, status);
  }
  return new JoinReactor(aggregator_, *context, *request, *response);
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
  aggregator_.Exchange(
      std::move(frame), [this, reactor, response](absl::StatusOr<Aggregator::Reply> reply) {
        if (reply.ok()) *response = Serialize(*std::move(reply));
        exchange_bytes_sent_.fetch_add(response->Length(), std::memory_order_relaxed);
        reactor->Finish(ToGrpcStatus(reply.status()));
        Reach(Failpoint::kAnswerSent);
      });
  return reactor;
}

grpc::ServerUnaryReactor* Service::Leave(grpc::CallbackServerContext* context,
                                         const LeaveRequest* request, LeaveResponse* response) {
  if (absl::Status status = Check(*context, request->job()); !status.ok()) {
    return FinishNow(*context, status);
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  aggregator_.Leave(*request,
                    [reactor](absl::Status status) { reactor->Finish(ToGrpcStatus(status)); });
  return reactor;
}

grpc::ServerUnaryReactor* Service::ReadError(grpc::CallbackServerContext* context,
                                             const ReadErrorRequest* request,
                                             ReadErrorResponse* response) {
  if (absl::Status status = Check(*context, request->job()); !status.ok()) {
    return FinishNow(*context, status);
  }
  absl::StatusOr<ReadErrorResponse> result = aggregator_.ReadError(*request);
  if (result.ok()) *response = *std::move(result);
  return FinishNow(*context, result.status());
}

grpc::ServerUnaryReactor* Service::Status(grpc::CallbackServerContext* context,
                                          const StatusRequest* request, StatusResponse* response) {
  const absl::Status status = Check(*context, request->job());
  if (status.ok()) *response = aggregator_.Status(*request);
  return FinishNow(*context, status);
}

absl::Status Service::Check(const grpc::CallbackServerContext& context,
                            absl::string_view job) const {
  return authorizer_ == nullptr ? absl::OkStatus()
                                : authorizer_->Check(*context.auth_context(), job);
}

}  // namespace signpost
