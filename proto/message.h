// Messages to and from gRPC's buffers. On the wire they are plain proto (aggregator.proto), so any
// generated client can talk to an aggregator; here it is known how much memory a message takes
// before it is taken, and an exchange's payload goes around the proto parser: out as a slice of the
// buffer that the kernels filled, in by one copy to aligned memory.

#ifndef SIGNPOST_PROTO_MESSAGE_H_
#define SIGNPOST_PROTO_MESSAGE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/payload.h"

namespace signpost {

// The buffer shares ownership of `payload`, or `answer`, until the transport has let go of it,
// which can be after the call has ended, and from any thread. Neither may be null. An answer's
// header is an argument of its own because each rank gets another `waited_us`.
grpc::ByteBuffer SerializeRequest(const FrameHeader& header,
                                  std::shared_ptr<const Payload> payload);
grpc::ByteBuffer SerializeResponse(const AnswerHeader& header,
                                   std::shared_ptr<const Answer> answer);

// More than a header can need: most are the rates and schedules of 16 steps, of kMaxGroups each, or
// kMaxTensorScales scales.
inline constexpr uint64_t kMaxHeaderBytes = 256 * 1024;

// INVALID_ARGUMENT when the bytes are not the message, or hold a payload of more than
// `max_payload_bytes` or headers of more than kMaxHeaderBytes in all: that is known before memory
// is taken. Otherwise as any proto parser does: unknown fields are skipped, fields may come in any
// order, a missing one is empty, of a repeated payload the last one counts and repeated headers are
// merged. On error the outputs are untouched. What the fields say is for CheckFrame and CheckAnswer
// to judge.
absl::Status ParseRequest(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes, Frame& frame);
absl::Status ParseResponse(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes,
                           Answer& answer);

// Any other message. A field takes many times the two bytes that it has on the wire at least:
// INVALID_ARGUMENT, and no memory is taken, when all of them, those of its messages included, may
// take more than `max_field_bytes`, what strings hold apart; or when the bytes are not the message.
// Fields that it does not have are skipped.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, uint64_t max_field_bytes,
                          google::protobuf::Message& message);
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_MESSAGE_H_
