#include "proto/message.h"

#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/grpc_library.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"

namespace signpost {
namespace {

using google::protobuf::Message;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

// gRPC's buffers work only once its library is there, also in a program that makes no call.
const grpc::internal::GrpcLibraryInitializer kGrpcLibrary;

// ExchangeRequest and ExchangeResponse have the same two fields.
constexpr uint32_t DelimitedTag(int field) {
  return GOOGLE_PROTOBUF_WIRE_FORMAT_MAKE_TAG(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}
constexpr uint32_t kHeaderTag = DelimitedTag(ExchangeRequest::kHeaderFieldNumber);
constexpr uint32_t kPayloadTag = DelimitedTag(ExchangeRequest::kPayloadFieldNumber);
static_assert(kHeaderTag == DelimitedTag(ExchangeResponse::kHeaderFieldNumber));
static_assert(kPayloadTag == DelimitedTag(ExchangeResponse::kPayloadFieldNumber));

// Everything in front of the payload's bytes. Like any proto serializer, leaves an empty payload
// out.
std::string Preamble(const Message& header, size_t payload_bytes) {
  std::string preamble;
  google::protobuf::io::StringOutputStream stream(&preamble);
  CodedOutputStream out(&stream);
  out.WriteTag(kHeaderTag);
  out.WriteVarint32(static_cast<uint32_t>(header.ByteSizeLong()));
  header.SerializeToCodedStream(&out);
  if (payload_bytes > 0) {
    out.WriteTag(kPayloadTag);
    out.WriteVarint64(payload_bytes);
  }
  out.Trim();
  return preamble;
}

// The slice holds a copy of `owner` for as long as anything refers to it.
grpc::Slice SharedSlice(const Payload& payload, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  return grpc::Slice(
      const_cast<uint8_t*>(payload.data()), payload.size(),
      [](void* held) { delete static_cast<Owner*>(held); }, new Owner(std::move(owner)));
}

grpc::ByteBuffer Serialize(const Message& header, const Payload& payload,
                           std::shared_ptr<const void> owner) {
  const grpc::Slice preamble(Preamble(header, payload.size()));
  if (payload.size() == 0) return grpc::ByteBuffer(&preamble, 1);
  const grpc::Slice slices[] = {preamble, SharedSlice(payload, std::move(owner))};
  return grpc::ByteBuffer(slices, 2);
}

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Reads one message. Every length is compared with its limit and with the bytes that are there
// before anything is allocated for it.
class MessageReader {
 public:
  MessageReader(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes)
      : size_(bytes.Length()),
        max_payload_bytes_(max_payload_bytes),
        bytes_(bytes),
        reader_(&bytes_),
        in_(&reader_) {}

  absl::Status Read(Message& header, Payload& payload) {
    if (!reader_.status().ok()) return Invalid("there is no message");
    // CodedInputStream counts in ints.
    if (size_ > static_cast<size_t>(std::numeric_limits<int>::max())) {
      return Invalid("the message has ", size_, " bytes; at most ",
                     std::numeric_limits<int>::max());
    }
    while (const uint32_t tag = in_.ReadTag()) {
      if (absl::Status status = ReadField(tag, header, payload); !status.ok()) return status;
    }
    if (!in_.ConsumedEntireMessage()) return Malformed();
    header.DiscardUnknownFields();  // which would wait with the frame
    return absl::OkStatus();
  }

 private:
  absl::Status ReadField(uint32_t tag, Message& header, Payload& payload) {
    if (tag == kHeaderTag) return ReadHeader(header);
    if (tag == kPayloadTag) return ReadPayload(payload);
    return WireFormatLite::SkipField(&in_, tag) ? absl::OkStatus() : Malformed();
  }

  absl::Status ReadHeader(Message& header) {
    size_t size = 0;
    absl::Status status = ReadLength("header", kMaxHeaderBytes - header_bytes_, size);
    if (!status.ok()) return status;
    header_bytes_ += size;
    std::string encoded;
    if (!in_.ReadString(&encoded, static_cast<int>(size))) return Malformed();
    return header.MergeFromString(encoded) ? absl::OkStatus() : Malformed();
  }

  absl::Status ReadPayload(Payload& payload) {
    size_t size = 0;
    if (absl::Status status = ReadLength("payload", max_payload_bytes_, size); !status.ok()) {
      return status;
    }
    payload = Payload(size);
    return in_.ReadRaw(payload.data(), static_cast<int>(size)) ? absl::OkStatus() : Malformed();
  }

  absl::Status ReadLength(const char* field, uint64_t limit, size_t& length) {
    uint64_t value = 0;
    if (!in_.ReadVarint64(&value)) return Malformed();
    if (value > limit) return Invalid("the ", field, " has ", value, " bytes; at most ", limit);
    const uint64_t left = size_ - in_.CurrentPosition();
    if (value > left)
      return Invalid("the ", field, " has ", value, " bytes, but only ", left, " came");
    length = value;
    return absl::OkStatus();
  }

  absl::Status Malformed() const {
    return Invalid("the message of ", size_, " bytes is malformed at byte ", in_.CurrentPosition());
  }

  const size_t size_;
  const uint64_t max_payload_bytes_;
  uint64_t header_bytes_ = 0;  // so far: many small headers can be as much as a large one
  grpc::ByteBuffer bytes_;     // shares the slices
  grpc::ProtoBufferReader reader_;
  CodedInputStream in_;
};

// What the fields of a message may take in memory. Objects and what repeated fields keep for them
// to grow by are counted generously, and a field without a name is kept until it is discarded.
class FieldCounter {
 public:
  FieldCounter(CodedInputStream& in, uint64_t max_bytes) : in_(in), left_(max_bytes) {}

  // INVALID_ARGUMENT when it is too much, or the bytes are no such message.
  absl::Status Count(const google::protobuf::Descriptor& type) {
    while (const uint32_t tag = in_.ReadTag()) {
      if (absl::Status status = CountField(tag, type); !status.ok()) return status;
    }
    return in_.ConsumedEntireMessage() ? absl::OkStatus() : Malformed();
  }

 private:
  static constexpr uint64_t kFieldBytes = 64;
  static constexpr uint64_t kMessageBytes = 128;
  static constexpr uint64_t kElementBytes =
      16;  // of a packed field, each a byte on the wire or more

  absl::Status CountField(uint32_t tag, const google::protobuf::Descriptor& type) {
    const int number = WireFormatLite::GetTagFieldNumber(tag);
    const google::protobuf::FieldDescriptor* const field = type.FindFieldByNumber(number);
    if (absl::Status status = Take(kFieldBytes); !status.ok()) return status;
    const bool is_delimited =
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_START_GROUP) {
      return Malformed();  // no message has any
    }
    if (field == nullptr || !is_delimited) {
      return WireFormatLite::SkipField(&in_, tag) ? absl::OkStatus() : Malformed();
    }
    uint32_t size = 0;
    if (!in_.ReadVarint32(&size)) return Malformed();
    if (field->message_type() != nullptr) return CountMessage(size, *field->message_type());
    absl::Status status = field->is_packable() ? Take(kElementBytes * size) : absl::OkStatus();
    if (status.ok() && !in_.Skip(static_cast<int>(size))) status = Malformed();
    return status;
  }

  absl::Status CountMessage(uint32_t size, const google::protobuf::Descriptor& type) {
    if (absl::Status status = Take(kMessageBytes); !status.ok()) return status;
    const CodedInputStream::Limit outer = in_.PushLimit(static_cast<int>(size));
    absl::Status status = Count(type);
    // Beyond the end of the outer message, or of the bytes.
    if (status.ok() && in_.BytesUntilLimit() != 0) status = Malformed();
    in_.PopLimit(outer);
    return status;
  }

  absl::Status Take(uint64_t bytes) {
    if (bytes > left_) return Invalid("the message has too many fields");
    left_ -= bytes;
    return absl::OkStatus();
  }

  absl::Status Malformed() const {
    return Invalid("the message is malformed at byte ", in_.CurrentPosition());
  }

  CodedInputStream& in_;
  uint64_t left_;
};

template <typename FrameOrAnswer>
absl::Status Parse(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes, FrameOrAnswer& out) {
  FrameOrAnswer parsed;
  absl::Status status = MessageReader(bytes, max_payload_bytes).Read(parsed.header, parsed.payload);
  if (!status.ok()) return status;
  out = std::move(parsed);
  return absl::OkStatus();
}

}  // namespace

grpc::ByteBuffer SerializeRequest(const FrameHeader& header,
                                  std::shared_ptr<const Payload> payload) {
  const Payload& bytes = *payload;
  return Serialize(header, bytes, std::move(payload));
}

grpc::ByteBuffer SerializeResponse(const AnswerHeader& header,
                                   std::shared_ptr<const Answer> answer) {
  const Payload& bytes = answer->payload;
  return Serialize(header, bytes, std::move(answer));
}

absl::Status ParseRequest(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes, Frame& frame) {
  return Parse(bytes, max_payload_bytes, frame);
}

absl::Status ParseResponse(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes,
                           Answer& answer) {
  return Parse(bytes, max_payload_bytes, answer);
}

absl::Status ParseMessage(const grpc::ByteBuffer& bytes, uint64_t max_field_bytes,
                          Message& message) {
  grpc::ByteBuffer shared = bytes;
  {
    grpc::ProtoBufferReader reader(&shared);
    if (!reader.status().ok()) return Invalid("there is no message");
    CodedInputStream in(&reader);
    absl::Status status = FieldCounter(in, max_field_bytes).Count(*message.GetDescriptor());
    if (!status.ok()) return status;
  }
  grpc::ProtoBufferReader reader(&shared);
  if (!message.ParseFromZeroCopyStream(&reader)) return Invalid("the message is malformed");
  message.DiscardUnknownFields();
  return absl::OkStatus();
}

grpc::ByteBuffer SerializeMessage(const Message& message) {
  const grpc::Slice bytes(message.SerializeAsString());
  return grpc::ByteBuffer(&bytes, 1);
}

}  // namespace signpost
