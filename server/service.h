// The gRPC adapter: translates between aggregator.proto's calls and an Aggregator, and decides
// nothing.

#ifndef SIGNPOST_SERVER_SERVICE_H_
#define SIGNPOST_SERVER_SERVICE_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "log/log.h"
#include "proto/aggregator.grpc.pb.h"
#include "security/authorizer.h"
#include "server/aggregator.h"

namespace signpost {

// Messages are parsed here (proto/message.h), not by gRPC; the bytes on the wire are plain proto.
using ServiceBase = AggregatorService::WithRawCallbackMethod_Exchange<
    AggregatorService::WithRawCallbackMethod_Join<AggregatorService::WithRawCallbackMethod_Leave<
        AggregatorService::WithRawCallbackMethod_ReadError<
            AggregatorService::WithRawCallbackMethod_Status<AggregatorService::Service>>>>>;

// Thread-safe. A call that waits holds a few kilobytes and no thread. All calls must have ended
// (Aggregator::Drain, then grpc::Server::Shutdown) before the destructor.
class Service final : public ServiceBase {
 public:
  // `aggregator` and `authorizer` must outlive the service. Payloads of more than
  // `max_payload_bytes` are refused before memory is taken for them. Without an authorizer everyone
  // may call everything.
  Service(Aggregator& aggregator, uint64_t max_payload_bytes, Authorizer* authorizer)
      : aggregator_(aggregator), max_payload_bytes_(max_payload_bytes), authorizer_(authorizer) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Exchange(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ReadError(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;

  // Of the messages of Exchange, headers included, since the beginning.
  uint64_t exchange_bytes_received() const { return exchange_bytes_received_; }
  uint64_t exchange_bytes_sent() const { return exchange_bytes_sent_; }

 private:
  // Of which there is one line in each second at most: frames come by the thousand.
  enum class News { kFailed, kSkipped, kAskedAgain };
  // Says what became of a frame, if that is worth a line. In JSON only.
  void Tell(const log::About& frame, const absl::StatusOr<Aggregator::Reply>& reply);
  bool IsTime(News news);

  // The request, of a caller that has a part in its job; the transport need not keep the bytes.
  template <typename Request>
  absl::StatusOr<Request> Take(const grpc::CallbackServerContext& context,
                               const grpc::ByteBuffer* bytes, uint64_t max_field_bytes) const;
  // Whether the caller has a part in the job.
  absl::Status Check(const grpc::CallbackServerContext& context, absl::string_view job) const;

  Aggregator& aggregator_;
  const uint64_t max_payload_bytes_;
  Authorizer* const authorizer_;  // or null
  std::atomic<uint64_t> exchange_bytes_received_ = 0;
  std::atomic<uint64_t> exchange_bytes_sent_ = 0;
  std::array<std::atomic<int64_t>, 3> last_told_ = {};  // by News, in Unix seconds
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVICE_H_
