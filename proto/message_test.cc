#include "proto/message.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::google::protobuf::util::MessageDifferencer;
using ::testing::HasSubstr;

constexpr uint64_t kNoLimit = UINT64_MAX;

FrameHeader SomeHeader() {
  FrameHeader header;
  header.set_job("job");
  header.set_epoch(0x0123456789ABCDEF);
  header.set_rank(3);
  header.set_step(1200);
  header.set_chunk(17);
  header.set_codec(ONE_BIT);
  header.set_payload_crc32c(0x89ABCDEF);
  header.set_error_scale(0.5f);
  return header;
}

AnswerHeader SomeAnswerHeader() {
  AnswerHeader header;
  header.set_step(1200);
  header.set_chunk(17);
  header.set_codec(SKIP);
  header.set_payload_crc32c(7);
  header.set_skipped_by_rank(2);
  header.set_waited_us(1000000);
  return header;
}

Payload AsPayload(absl::string_view bytes) {
  Payload payload(bytes.size());
  if (!bytes.empty()) std::memcpy(payload.data(), bytes.data(), bytes.size());
  return payload;
}

std::string AsString(const Payload& payload) {
  return std::string(reinterpret_cast<const char*>(payload.data()), payload.size());
}

std::string AsString(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

// In slices of `slice_bytes`.
grpc::ByteBuffer AsBuffer(const std::string& bytes, size_t slice_bytes = SIZE_MAX) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += slices.back().size()) {
    slices.emplace_back(bytes.substr(begin, slice_bytes));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// One field as the wire has it, its length on it however wrong.
std::string Field(uint8_t tag, absl::string_view bytes) {
  EXPECT_LT(bytes.size(), 128u);
  return absl::StrCat(std::string(1, tag), std::string(1, bytes.size()), bytes);
}

std::string SomeRequest(absl::string_view payload) {
  return AsString(SerializeRequest(SomeHeader(), std::make_shared<Payload>(AsPayload(payload))));
}

std::string RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

void ExpectRefused(const std::string& bytes, absl::string_view message,
                   uint64_t max_payload_bytes = kNoLimit) {
  Frame frame;
  frame.header.set_job("untouched");
  frame.payload = AsPayload("untouched");
  const absl::Status status = ParseRequest(AsBuffer(bytes), max_payload_bytes, frame);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
  EXPECT_EQ(frame.header.job(), "untouched");
  EXPECT_EQ(AsString(frame.payload), "untouched");
}

Frame ExpectParses(const grpc::ByteBuffer& bytes, uint64_t max_payload_bytes = kNoLimit) {
  Frame frame;
  EXPECT_EQ(ParseRequest(bytes, max_payload_bytes, frame), absl::OkStatus());
  return frame;
}

// --- There and back.

TEST(Message, ARequestComesBackAsItWas) {
  for (const size_t size : {0, 1, 127, 128, 16383, 16384, 300000}) {
    const std::string payload = RandomBytes(size, /*seed=*/1);
    const Frame frame = ExpectParses(AsBuffer(SomeRequest(payload)));
    EXPECT_TRUE(MessageDifferencer::Equals(frame.header, SomeHeader()));
    EXPECT_EQ(AsString(frame.payload), payload) << size;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(frame.payload.data()) % 64, 0u);
  }
}

TEST(Message, AResponseComesBackAsItWas) {
  const auto sent = std::make_shared<Answer>();
  sent->payload = AsPayload("payload");
  Answer answer;
  ASSERT_EQ(ParseResponse(SerializeResponse(SomeAnswerHeader(), sent), kNoLimit, answer),
            absl::OkStatus());
  EXPECT_TRUE(MessageDifferencer::Equals(answer.header, SomeAnswerHeader()));
  EXPECT_EQ(AsString(answer.payload), "payload");
}

TEST(Message, AResponsesHeaderIsTheArgumentNotTheAnswersOwn) {
  const auto sent = std::make_shared<Answer>();
  sent->header.set_waited_us(1);
  AnswerHeader header;
  header.set_waited_us(2);
  Answer answer;
  ASSERT_EQ(ParseResponse(SerializeResponse(header, sent), kNoLimit, answer), absl::OkStatus());
  EXPECT_EQ(answer.header.waited_us(), 2u);
}

TEST(Message, BytesFromTheGeneratedClassParse) {
  ExchangeRequest request;
  *request.mutable_header() = SomeHeader();
  request.set_payload(RandomBytes(1000, /*seed=*/2));
  const Frame frame = ExpectParses(AsBuffer(request.SerializeAsString()));
  EXPECT_TRUE(MessageDifferencer::Equals(frame.header, request.header()));
  EXPECT_EQ(AsString(frame.payload), request.payload());
}

TEST(Message, BytesAreThoseOfTheGeneratedClass) {
  for (const size_t size : {0, 1, 127, 128, 1000}) {
    ExchangeRequest request;
    *request.mutable_header() = SomeHeader();
    request.set_payload(RandomBytes(size, /*seed=*/3));
    EXPECT_EQ(SomeRequest(request.payload()), request.SerializeAsString());

    ExchangeResponse response;
    *response.mutable_header() = SomeAnswerHeader();
    response.set_payload(request.payload());
    const auto answer = std::make_shared<Answer>();
    answer->payload = AsPayload(response.payload());
    EXPECT_EQ(AsString(SerializeResponse(SomeAnswerHeader(), answer)),
              response.SerializeAsString());
  }
}

TEST(Message, AHeaderOfDefaultsIsStillAField) {
  ExchangeRequest request;
  request.mutable_header();
  EXPECT_EQ(AsString(SerializeRequest(FrameHeader(), std::make_shared<Payload>())),
            request.SerializeAsString());
}

// --- Ownership.

TEST(Message, TheBufferUsesThePayloadInPlaceAndKeepsItAlive) {
  auto payload = std::make_shared<Payload>(AsPayload(RandomBytes(1000, /*seed=*/4)));
  const uint8_t* const bytes = payload->data();
  const std::weak_ptr<Payload> watch = payload;
  {
    const grpc::ByteBuffer buffer = SerializeRequest(SomeHeader(), std::move(payload));
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(slices[1].begin(), bytes);
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

TEST(Message, ASliceThatOutlivesItsBufferKeepsTheAnswerAlive) {
  auto answer = std::make_shared<Answer>();
  answer->payload = AsPayload("payload");
  const std::weak_ptr<Answer> watch = answer;
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(SerializeResponse(SomeAnswerHeader(), std::move(answer)).Dump(&slices).ok());
  EXPECT_FALSE(watch.expired());
  slices.clear();
  EXPECT_TRUE(watch.expired());
}

// --- What arrives.

TEST(Message, FragmentsOfAnySizeParse) {
  const std::string payload = RandomBytes(300, /*seed=*/5);
  const std::string bytes = SomeRequest(payload);
  for (const size_t slice_bytes : {1, 2, 3, 7, 64, 299}) {
    const Frame frame = ExpectParses(AsBuffer(bytes, slice_bytes));
    EXPECT_TRUE(MessageDifferencer::Equals(frame.header, SomeHeader())) << slice_bytes;
    EXPECT_EQ(AsString(frame.payload), payload) << slice_bytes;
  }
}

TEST(Message, ParsingLeavesTheBufferAsItWas) {
  const grpc::ByteBuffer buffer = AsBuffer(SomeRequest("payload"), /*slice_bytes=*/1);
  ExpectParses(buffer);
  EXPECT_EQ(AsString(ExpectParses(buffer).payload), "payload");
}

TEST(Message, ThePayloadMayComeBeforeTheHeader) {
  const Frame frame = ExpectParses(
      AsBuffer(Field(0x12, "payload") + Field(0x0A, SomeHeader().SerializeAsString())));
  EXPECT_TRUE(MessageDifferencer::Equals(frame.header, SomeHeader()));
  EXPECT_EQ(AsString(frame.payload), "payload");
}

TEST(Message, UnknownFieldsAreSkippedWhereverTheyAre) {
  const std::string unknown = std::string("\x18\x96\x01", 3) +           // 3: varint
                              std::string("\x21\1\2\3\4\5\6\7\10", 9) +  // 4: fixed64
                              Field(0x2A, "bytes") +                     // 5: bytes
                              std::string("\x33\x08\x01\x34", 4) +       // 6: group
                              std::string("\x3D\1\2\3\4", 5) +           // 7: fixed32
                              std::string("\x08\x01", 2) +
                              std::string("\x10\x02", 2);  // 1, 2: varint
  const std::string header = Field(0x0A, SomeHeader().SerializeAsString());
  const Frame frame =
      ExpectParses(AsBuffer(unknown + header + unknown + Field(0x12, "payload") + unknown));
  EXPECT_TRUE(MessageDifferencer::Equals(frame.header, SomeHeader()));
  EXPECT_EQ(AsString(frame.payload), "payload");
}

TEST(Message, UnknownFieldsOfTheHeaderAreDropped) {
  const Frame frame =
      ExpectParses(AsBuffer(Field(0x0A, SomeHeader().SerializeAsString() + "\x78\x01")));
  EXPECT_EQ(frame.header.SerializeAsString(), SomeHeader().SerializeAsString());
}

TEST(Message, OfRepeatedFieldsHeadersMergeAndTheLastPayloadCounts) {
  FrameHeader first, second;
  first.set_rank(1);
  first.set_step(5);
  second.set_rank(2);
  const Frame frame = ExpectParses(
      AsBuffer(Field(0x0A, first.SerializeAsString()) + Field(0x12, "a longer payload") +
               Field(0x0A, second.SerializeAsString()) + Field(0x12, "payload")));
  EXPECT_EQ(frame.header.rank(), 2u);
  EXPECT_EQ(frame.header.step(), 5u);
  EXPECT_EQ(AsString(frame.payload), "payload");
}

TEST(Message, MissingFieldsAreEmpty) {
  const grpc::ByteBuffer empty = AsBuffer("");
  ASSERT_TRUE(empty.Valid());
  const Frame frame = ExpectParses(empty);
  EXPECT_EQ(frame.header.ByteSizeLong(), 0u);
  EXPECT_EQ(frame.payload.size(), 0u);
}

// --- What is refused.

TEST(Message, TruncatedAtAnyLengthParsesAsTheGeneratedClassDoes) {
  const std::string whole = SomeRequest("payload");
  int refused = 0;
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::string bytes = whole.substr(0, length);
    Frame frame;
    const bool parsed = ParseRequest(AsBuffer(bytes), kNoLimit, frame).ok();
    EXPECT_EQ(parsed, ExchangeRequest().ParseFromString(bytes)) << length;
    refused += !parsed;
  }
  // All but the empty message and the one that ends behind the header.
  EXPECT_EQ(refused, static_cast<int>(whole.size()) - 2);
}

TEST(Message, ABufferWithoutAMessageIsRefused) {
  Frame frame;
  EXPECT_EQ(ParseRequest(grpc::ByteBuffer(), kNoLimit, frame),
            absl::InvalidArgumentError("there is no message"));
}

TEST(Message, APayloadAtItsLimitParsesAndOneAboveIsRefused) {
  const std::string bytes = SomeRequest("payload");
  EXPECT_EQ(AsString(ExpectParses(AsBuffer(bytes), /*max_payload_bytes=*/7).payload), "payload");
  ExpectRefused(bytes, "the payload has 7 bytes; at most 6", /*max_payload_bytes=*/6);
}

TEST(Message, APayloadLengthThatDidNotComeIsRefusedBeforeMemoryIsTaken) {
  // Allocating any of these would fail or be noticed.
  ExpectRefused(std::string("\x12\xFF\xFF\xFF\xFF\x07", 6),
                "the payload has 2147483647 bytes, but only 0");
  ExpectRefused(std::string("\x12\xFF\xFF\xFF\xFF\x0F", 6),
                "the payload has 4294967295 bytes, but only 0");
  ExpectRefused(std::string("\x12\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F", 10),
                "the payload has 9223372036854775807 bytes, but only 0");
  ExpectRefused(std::string("\x12\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", 11),
                "the payload has 18446744073709551615 bytes, but only 0");
}

TEST(Message, AHeaderAtItsLimitParsesAndOneAboveIsRefused) {
  FrameHeader header;
  header.set_job(std::string(kMaxHeaderBytes - 4, 'x'));  // and tag and length, 4 bytes
  ASSERT_EQ(header.ByteSizeLong(), kMaxHeaderBytes);
  ExchangeRequest request;
  *request.mutable_header() = header;
  EXPECT_EQ(ExpectParses(AsBuffer(request.SerializeAsString())).header.job(), header.job());
  request.mutable_header()->mutable_job()->push_back('x');
  ExpectRefused(request.SerializeAsString(), "the header has 262145 bytes; at most 262144");
}

TEST(Message, ManyHeadersMayBeAsLongAsOne) {
  FrameHeader header;
  header.set_job(std::string(kMaxHeaderBytes / 4 - 4, 'x'));
  ExchangeRequest request;
  *request.mutable_header() = header;
  const std::string quarter = request.SerializeAsString();
  const std::string all = quarter + quarter + quarter + quarter;
  EXPECT_EQ(ExpectParses(AsBuffer(all)).header.job(), header.job());
  header.set_job("x");
  *request.mutable_header() = header;
  ExpectRefused(all + request.SerializeAsString(), "the header has 3 bytes; at most 0");
}

TEST(Message, ALengthThatIsNoVarintIsRefused) {
  ExpectRefused("\x12\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", "malformed");
}

TEST(Message, AHeaderThatIsNoHeaderIsRefused) {
  ExpectRefused(Field(0x0A, "\x0A\x7F"), "malformed");      // job: 127 bytes, none came
  ExpectRefused(Field(0x0A, "\x0A\x01\xFF"), "malformed");  // job: not UTF-8
}

TEST(Message, AnEndOfNoGroupIsRefused) { ExpectRefused("\x14", "malformed"); }

TEST(Message, ATagOfFieldZeroIsRefused) {
  ExpectRefused(std::string("\x00", 1), "malformed");
  ExpectRefused(std::string("\x02\x00", 2), "malformed");
}

TEST(Message, GroupsNestedWithoutEndAreRefused) {
  ExpectRefused(std::string(100000, '\x33'), "malformed");
}

TEST(Message, AMalformedResponseLeavesTheAnswerUntouched) {
  Answer answer;
  answer.header.set_step(9);
  EXPECT_EQ(ParseResponse(AsBuffer(Field(0x12, "payload").substr(0, 5)), kNoLimit, answer).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(answer.header.step(), 9u);
}

// --- Other messages.

JoinRequest SomeJoin() {
  JoinRequest join;
  join.set_job("job");
  join.set_world_size(3);
  join.mutable_options()->set_block_elements(4096);
  join.mutable_options()->mutable_custom_codec()->set_name("topk");
  for (const char* name : {"weight", "bias"}) {
    Tensor& tensor = *join.add_tensors();
    tensor.set_name(name);
    tensor.add_shape(300);
    tensor.add_shape(1);
  }
  return join;
}

std::string Repeated(absl::string_view bytes, size_t times) {
  std::string repeated;
  for (size_t i = 0; i < times; ++i) absl::StrAppend(&repeated, bytes);
  return repeated;
}

// A field of any length.
std::string Delimited(int field, const std::string& bytes) {
  std::string size;
  for (size_t left = bytes.size();; left /= 128) {
    size.push_back(static_cast<char>(left < 128 ? left : 128 + left % 128));
    if (left < 128) break;
  }
  return absl::StrCat(std::string(1, static_cast<char>(8 * field + 2)), size, bytes);
}

constexpr int kTensors = JoinRequest::kTensorsFieldNumber;
constexpr char kUnknown[] = "\x78\x01";  // field 15, a varint

TEST(Message, AnyMessageComesBackAsItWas) {
  const JoinRequest join = SomeJoin();
  for (const size_t slice_bytes : {size_t{1}, size_t{7}, SIZE_MAX}) {
    JoinRequest parsed;
    EXPECT_EQ(
        ParseMessage(AsBuffer(AsString(SerializeMessage(join)), slice_bytes), 1 << 20, parsed),
        absl::OkStatus());
    EXPECT_TRUE(MessageDifferencer::Equals(parsed, join));
  }
  JoinRequest parsed;
  EXPECT_EQ(ParseMessage(AsBuffer(join.SerializeAsString() + kUnknown), 1 << 20, parsed),
            absl::OkStatus());
  EXPECT_TRUE(MessageDifferencer::Equals(parsed, join)) << "nobody keeps what nobody reads";
  LeaveResponse nothing;
  EXPECT_EQ(ParseMessage(SerializeMessage(nothing), 0, nothing), absl::OkStatus());
}

TEST(Message, AnyMessageIsRefusedBeforeItsFieldsTakeMoreMemoryThanTheyMay) {
  const std::string many[] = {
      Repeated(Delimited(kTensors, ""), 2000),
      Repeated(kUnknown, 2000),
      Repeated(Delimited(14, ""), 2000),
      Delimited(kTensors, Repeated(kUnknown, 2000)),
      Delimited(kTensors,
                Repeated(std::string("\x10\x00", 2), 2000)),  // its shape, a number at a time
      Delimited(kTensors, Delimited(Tensor::kShapeFieldNumber, std::string(2000, '\1'))),
      Repeated(Delimited(JoinRequest::kOptionsFieldNumber, ""), 2000),
      Delimited(JoinRequest::kOptionsFieldNumber, Repeated(kUnknown, 2000)),
  };
  for (const std::string& bytes : many) {
    SCOPED_TRACE(&bytes - many);
    JoinRequest parsed;
    ASSERT_TRUE(parsed.ParseFromString(bytes));
    const size_t taken = parsed.SpaceUsedLong();
    JoinRequest untouched;
    const absl::Status status =
        ParseMessage(AsBuffer(bytes), taken - sizeof(JoinRequest), untouched);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "the message has too many fields");
    EXPECT_EQ(ParseMessage(AsBuffer(bytes), 2000 * 512, untouched), absl::OkStatus());
  }
}

TEST(Message, AnyMessageIsMalformedWhereProtoSaysSo) {
  std::mt19937 random(3);
  const std::string good = SomeJoin().SerializeAsString();
  size_t refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good.substr(0, random() % (good.size() + 1));
    if (!bytes.empty() && i % 2 == 0) bytes[random() % bytes.size()] = static_cast<char>(random());
    JoinRequest parsed, by_proto;
    const bool is_parsed = ParseMessage(AsBuffer(bytes), 1 << 20, parsed).ok();
    const bool is_good = by_proto.ParseFromString(bytes);
    refused += !is_parsed;
    if (!is_parsed) continue;  // of what is good, groups, which no message has
    EXPECT_TRUE(is_good);
    by_proto.DiscardUnknownFields();
    EXPECT_EQ(parsed.SerializeAsString(), by_proto.SerializeAsString());
  }
  EXPECT_GT(refused, 5000u);
  JoinRequest parsed;
  EXPECT_THAT(ParseMessage(AsBuffer("\x7b\x7c"), 1 << 20, parsed).message(),  // a group
              HasSubstr("the message is malformed at byte 1"));
}

}  // namespace
}  // namespace signpost
