// The gRPC adapter: translates between aggregator.proto's calls and an Aggregator, and decides
// nothing.

#ifndef SIGNPOST_SERVER_SERVICE_H_
#define SIGNPOST_SERVER_SERVICE_H_

#include <cstdint>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "proto/aggregator.grpc.pb.h"
#include "security/authorizer.h"
#include "server/aggregator.h"

namespace signpost {

// Exchange goes around the proto parser (proto/message.h); the bytes on the wire are plain proto.
using ServiceBase =
    AggregatorService::WithRawCallbackMethod_Exchange<AggregatorService::WithCallbackMethod_Join<
        AggregatorService::WithCallbackMethod_Leave<AggregatorService::WithCallbackMethod_ReadError<
            AggregatorService::WithCallbackMethod_Status<AggregatorService::Service>>>>>;

// Thread-safe. A call that waits holds a few kilobytes and no thread. All calls must have ended
// (Aggregator::Drain, then grpc::Server::Shutdown) before the destructor.
class Service final : public ServiceBase {
 public:
  // `aggregator` and `authorizer` must outlive the service. Payloads of more than
  // `max_payload_bytes` are refused before memory is taken for them. Without an authorizer everyone
  // may call everything.
  Service(Aggregator& aggregator, uint64_t max_payload_bytes, Authorizer* authorizer)
      : aggregator_(aggregator), max_payload_bytes_(max_payload_bytes), authorizer_(authorizer) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context, const JoinRequest* request,
                                 JoinResponse* response) override;
  grpc::ServerUnaryReactor* Exchange(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context, const LeaveRequest* request,
                                  LeaveResponse* response) override;
  grpc::ServerUnaryReactor* ReadError(grpc::CallbackServerContext* context,
                                      const ReadErrorRequest* request,
                                      ReadErrorResponse* response) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context,
                                   const StatusRequest* request, StatusResponse* response) override;

 private:
  // Whether the caller has a part in the job.
  absl::Status Check(const grpc::CallbackServerContext& context, absl::string_view job) const;

  Aggregator& aggregator_;
  const uint64_t max_payload_bytes_;
  Authorizer* const authorizer_;  // or null
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVICE_H_
