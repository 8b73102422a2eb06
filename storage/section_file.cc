#include "storage/section_file.h"

#include <cstdint>
#include <cstring>

#include "absl/strings/str_format.h"
#include "proto/payload.h"

namespace signpost {
namespace {

uint32_t Crc32c(absl::string_view bytes) {
  return signpost::Crc32c({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

// What comes before them in a section.
std::string FrameOf(absl::string_view bytes) {
  const uint64_t length = bytes.size();
  const uint32_t crc = Crc32c(bytes);
  std::string frame(SectionStream::kFrameBytes, '\0');
  std::memcpy(frame.data(), &length, sizeof length);
  std::memcpy(frame.data() + sizeof length, &crc, sizeof crc);
  return frame;
}

}  // namespace

absl::string_view BytesOf(absl::Span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

absl::string_view BytesOf(absl::Span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void SectionWriter::Add(absl::string_view bytes) {
  parts_.push_back(owned_.emplace_back(FrameOf(bytes)));
  parts_.push_back(bytes);
}

void SectionWriter::Add(const google::protobuf::MessageLite& message) {
  Add(absl::string_view(owned_.emplace_back(message.SerializeAsString())));
}

absl::Status SectionStream::Add(absl::string_view bytes) {
  if (absl::Status status = AppendBytes(FrameOf(bytes)); !status.ok()) return status;
  return AppendBytes(bytes);
}

absl::Status SectionStream::Add(const google::protobuf::MessageLite& message) {
  return Add(absl::string_view(message.SerializeAsString()));
}

absl::Status SectionStream::AppendBytes(absl::string_view bytes) {
  bytes_ += bytes.size();
  return append_(bytes);
}

absl::Status SectionReader::Next(absl::string_view& bytes) {
  uint64_t length;
  uint32_t crc;
  if (rest_.size() < sizeof length + sizeof crc) {
    return absl::DataLossError(absl::StrFormat("it ends before section %d", section_));
  }
  std::memcpy(&length, rest_.data(), sizeof length);
  std::memcpy(&crc, rest_.data() + sizeof length, sizeof crc);
  rest_.remove_prefix(sizeof length + sizeof crc);
  if (length > rest_.size()) {
    return absl::DataLossError(absl::StrFormat("section %d ends too early", section_));
  }
  bytes = rest_.substr(0, length);
  rest_.remove_prefix(length);
  if (Crc32c(bytes) != crc) {
    return absl::DataLossError(absl::StrFormat("the CRC-32C of section %d is wrong", section_));
  }
  ++section_;
  return absl::OkStatus();
}

absl::Status SectionReader::Next(google::protobuf::MessageLite& message) {
  absl::string_view bytes;
  if (absl::Status status = Next(bytes); !status.ok()) return status;
  if (message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("section %d does not parse", section_ - 1));
}

}  // namespace signpost
