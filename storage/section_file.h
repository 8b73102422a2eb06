// Files in sections that each have a checksum: what snapshots and checkpoints are made of.
//
//   file    = first line, which names format and version; then section*
//   section = length (uint64) crc32c (uint32, of the bytes) bytes        little-endian

#ifndef SIGNPOST_STORAGE_SECTION_FILE_H_
#define SIGNPOST_STORAGE_SECTION_FILE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/message_lite.h"

namespace signpost {

// Numbers as the bytes of a section, where they lie.
absl::string_view BytesOf(absl::Span<const float> values);
absl::string_view BytesOf(absl::Span<const uint8_t> bytes);

// Gathers a file's parts, for Replace. Bytes stay where they are, and must outlive it; messages
// live in here.
class SectionWriter {
 public:
  // "signpost snapshot 1\n"; must outlive the writer.
  explicit SectionWriter(absl::string_view first_line) : parts_({first_line}) {}
  SectionWriter(const SectionWriter&) = delete;

  void Add(absl::string_view bytes);
  void Add(const google::protobuf::MessageLite& message);

  absl::Span<const absl::string_view> parts() const { return parts_; }

 private:
  std::deque<std::string> owned_;  // whose elements stay where they are
  std::vector<absl::string_view> parts_;
};

// Appends a file's sections, one after the other, for Disk::Write. Returns the first error of
// `append`, which must outlive it.
class SectionStream {
 public:
  using Append = absl::FunctionRef<absl::Status(absl::string_view bytes)>;

  // How many bytes of a section come before its own.
  static constexpr size_t kFrameBytes = sizeof(uint64_t) + sizeof(uint32_t);

  explicit SectionStream(Append append) : append_(append) {}

  absl::Status Begin(absl::string_view first_line) { return AppendBytes(first_line); }
  absl::Status Add(absl::string_view bytes);
  absl::Status Add(const google::protobuf::MessageLite& message);

  uint64_t bytes() const { return bytes_; }  // of the file, so far

 private:
  absl::Status AppendBytes(absl::string_view bytes);

  const Append append_;
  uint64_t bytes_ = 0;
};

// Takes a file's sections one after the other. DATA_LOSS, with the section's number, counted from
// 0, when the file ends too early, a checksum is wrong or a message does not parse.
class SectionReader {
 public:
  // What follows the first line; must outlive the reader and what it returns.
  explicit SectionReader(absl::string_view rest) : rest_(rest) {}

  absl::Status Next(absl::string_view& bytes);
  absl::Status Next(google::protobuf::MessageLite& message);

  bool at_end() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
  int section_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_SECTION_FILE_H_
