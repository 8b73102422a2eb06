// WIRE.md's worked example, read from the document itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/message.h"

namespace signpost {
namespace {

std::string Document() {
  std::ifstream file("proto/WIRE.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The lines of the document's one block that is fenced by "```" + kind.
std::vector<std::string> Fenced(absl::string_view kind) {
  const std::string document = Document();
  const std::string opening = absl::StrCat("\n```", kind, "\n");
  const size_t begin = document.find(opening);
  if (begin == std::string::npos) return {};
  const size_t first = begin + opening.size();
  const std::string inside = document.substr(first, document.find("\n```", first) - first);
  return absl::StrSplit(inside, '\n');
}

// Hexadecimal bytes up to each line's '#'.
std::string FencedBytes(absl::string_view kind) {
  std::string bytes;
  for (const std::string& line : Fenced(kind)) {
    std::istringstream digits(line.substr(0, line.find('#')));
    for (std::string byte; digits >> byte;) {
      bytes.push_back(static_cast<char>(std::stoi(byte, nullptr, 16)));
    }
  }
  return bytes;
}

std::vector<std::vector<float>> FencedFloats() {
  std::vector<std::vector<float>> blocks;
  for (const std::string& line : Fenced("floats")) {
    std::vector<float>& block = blocks.emplace_back();
    for (const absl::string_view number : absl::StrSplit(line, ' ')) {
      EXPECT_TRUE(absl::SimpleAtof(number, &block.emplace_back())) << line;
    }
  }
  return blocks;
}

FrameHeader FencedHeader() {
  std::string text;
  for (const std::string& line : Fenced("header")) absl::StrAppend(&text, line, "\n");
  FrameHeader header;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &header));
  return header;
}

std::string AsString(const Payload& payload) {
  return std::string(reinterpret_cast<const char*>(payload.data()), payload.size());
}

Payload AsPayload(const std::string& bytes) {
  Payload payload(bytes.size());
  std::memcpy(payload.data(), bytes.data(), bytes.size());
  return payload;
}

grpc::ByteBuffer AsBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string AsString(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

Layout ExampleLayout() {
  std::vector<Tensor> tensors(2);
  tensors[0].set_name("w");
  tensors[0].add_shape(3);
  tensors[0].add_shape(4);
  tensors[1].set_name("b");
  tensors[1].add_shape(3);
  JobOptions options;
  options.set_block_elements(8);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  return *Layout::Create(tensors, options);
}

// The formulas of int8 and int4, with Q = `most` and so many codes in a byte.
std::string Quantized(float most, size_t codes_per_byte) {
  std::string scales, codes;
  for (const std::vector<float>& block : FencedFloats()) {
    float largest = 0;
    for (const float u : block) largest = std::max(largest, std::abs(u));
    const float scale = largest / most, inverse = most / largest;
    scales.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
    std::string bytes(8 / codes_per_byte, 0);  // all of these blocks have at most 8 elements
    for (size_t i = 0; i < block.size(); ++i) {
      const int code = static_cast<int>(std::nearbyint(block[i] * inverse));
      const int bits = codes_per_byte == 1 ? code & 0xff : (code & 0xf) << i % 2 * 4;
      bytes[i / codes_per_byte] = static_cast<char>(bytes[i / codes_per_byte] | bits);
    }
    codes.append(bytes);
  }
  return scales + codes;
}

TEST(WireDocument, Int8AndInt4PayloadsAreWhatTheirFormulasMakeOfItsFloats) {
  EXPECT_EQ(FencedBytes("hex int8"), Quantized(/*most=*/127, /*codes_per_byte=*/1));
  EXPECT_EQ(FencedBytes("hex int4"), Quantized(/*most=*/7, /*codes_per_byte=*/2));
}

TEST(WireDocument, Int8AndInt4PayloadsAreWhatCodecsMakeOfItsFloats) {
  const Layout layout = ExampleLayout();
  const Chunk& chunk = layout.chunks()[0];
  std::vector<float> values;
  for (const std::vector<float>& block : FencedFloats()) {
    values.insert(values.end(), block.begin(), block.end());
  }
  for (const Codec codec : {INT8, INT4}) {
    Payload payload(layout.PayloadBytes(codec, 0));
    for (const Segment& segment : chunk.segments) {
      std::vector<float> error(segment.elements);
      NumberCodecOf(codec, layout)
          .Compress({.block_elements = 8}, chunk, segment,
                    absl::MakeSpan(values).subspan(segment.chunk_offset, segment.elements),
                    absl::MakeSpan(error), payload.data());
    }
    EXPECT_EQ(AsString(payload), FencedBytes(codec == INT8 ? "hex int8" : "hex int4"));
  }
}

TEST(WireDocument, PayloadIsWhatItsFormulasMakeOfItsFloats) {
  std::string scales, bits;
  for (const std::vector<float>& block : FencedFloats()) {
    float sum = 0;  // exact for these values, so its order does not matter
    uint8_t byte = 0;
    for (size_t i = 0; i < block.size(); ++i) {
      sum += block[i] * block[i];
      if (std::signbit(block[i])) byte |= 1 << i;
    }
    const float scale = 1.35f * std::sqrt(sum / static_cast<float>(block.size()));
    scales.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
    bits.push_back(static_cast<char>(byte));
  }
  EXPECT_EQ(FencedBytes("hex payload"), scales + bits);
}

TEST(WireDocument, RequestParsesIntoTheStatedHeaderAndPayload) {
  Frame frame;
  ASSERT_TRUE(
      ParseRequest(AsBuffer(FencedBytes("hex request")), /*max_payload_bytes=*/15, frame).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(frame.header, FencedHeader()))
      << frame.header.DebugString();
  EXPECT_EQ(AsString(frame.payload), FencedBytes("hex payload"));
}

TEST(WireDocument, StatedHeaderAndPayloadSerializeIntoTheRequest) {
  const auto payload = std::make_shared<Payload>(AsPayload(FencedBytes("hex payload")));
  EXPECT_EQ(AsString(SerializeRequest(FencedHeader(), payload)), FencedBytes("hex request"));
}

TEST(WireDocument, FramePassesItsCheck) {
  const Payload payload = AsPayload(FencedBytes("hex payload"));
  EXPECT_EQ(CheckFrame(FencedHeader(), payload.span(), /*world_size=*/2, ExampleLayout()),
            absl::OkStatus());
}

TEST(WireDocument, StatesTheLayoutsFingerprint) {
  const std::string fingerprint = absl::StrCat("`", absl::Hex(ExampleLayout().Fingerprint()), "`");
  EXPECT_NE(Document().find(fingerprint), std::string::npos) << fingerprint;
}

TEST(WireDocument, StatesTheCodecsNumbers) {
  EXPECT_NE(Document().find(absl::StrCat("| FLOAT32 | ", FLOAT32, " |")), std::string::npos);
  EXPECT_NE(Document().find(absl::StrCat("| BFLOAT16 | ", BFLOAT16, " |")), std::string::npos);
  EXPECT_NE(Document().find(absl::StrCat("| ONE_BIT | ", ONE_BIT, " |")), std::string::npos);
  EXPECT_NE(Document().find(absl::StrCat("| SKIP | ", SKIP, " |")), std::string::npos);
}

}  // namespace
}  // namespace signpost
