#include "trace/recording.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace signpost::trace {
namespace {

// Of a steady clock, and of the system's: what is computed of such times does not overflow.
constexpr int64_t kLatest = int64_t{1} << 59;
constexpr int64_t kMostWallOffset = int64_t{1} << 61;

template <size_t kBytes>
std::string TextOf(const char (&text)[kBytes]) {
  return std::string(text, strnlen(text, kBytes));
}

RecordingSlot SlotOf(absl::string_view bytes, uint32_t index) {
  RecordingSlot slot;
  std::memcpy(&slot, bytes.data() + RecordingBytes(index), sizeof slot);
  return slot;
}

// None of what is not written in full, or does not belong into this slot any more.
std::optional<Event> EventOf(const RecordingSlot& slot, uint64_t index, uint32_t events,
                             size_t labels) {
  const uint64_t kind = slot.kind_and_labels & 0xffff;
  Event event;
  event.job = static_cast<uint16_t>(slot.kind_and_labels >> 16);
  event.codec = static_cast<uint16_t>(slot.kind_and_labels >> 32);
  const bool is_whole = slot.number > 0 && (slot.number - 1) % events == index &&
                        kind < uint64_t{kKinds} && event.job < labels && event.codec < labels &&
                        slot.begin >= 0 && slot.begin <= slot.end && slot.end <= kLatest;
  if (!is_whole) return std::nullopt;
  event.kind = static_cast<Kind>(kind);
  event.begin = slot.begin;
  event.end = slot.end;
  event.epoch = slot.epoch;
  event.step = slot.step;
  event.chunk = static_cast<uint32_t>(slot.chunk_and_rank >> 32);
  event.rank = static_cast<uint32_t>(slot.chunk_and_rank);
  event.bytes = slot.bytes;
  return event;
}

absl::StatusOr<std::string> BytesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  }
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

}  // namespace

absl::StatusOr<Recording> ParseRecording(absl::string_view bytes, absl::string_view name) {
  return ParseRecording(bytes, name, bytes);
}

absl::StatusOr<Recording> ParseRecording(absl::string_view bytes, absl::string_view name,
                                         absl::string_view later) {
  const auto is_none = [name](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is no trace of a process: ", why));
  };
  RecordingHeader header;
  if (bytes.size() < sizeof header) return is_none("it is too short");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, kRecordingMagic, sizeof kRecordingMagic) != 0) {
    return is_none("it does not begin as one of this version");
  }
  if (header.events == 0 || header.events > kMostEvents ||
      bytes.size() != RecordingBytes(header.events)) {
    return is_none(absl::StrCat("it has ", bytes.size(), " bytes and says ", header.events,
                                " events; has all of it been copied?"));
  }
  if (later.size() != bytes.size()) return is_none("its size changes as it is read");
  if (header.wall_offset < 0 || header.wall_offset > kMostWallOffset) {
    return is_none("its clock is none");
  }
  Recording recording = {.process = TextOf(header.process),
                         .host = TextOf(header.host),
                         .clock = TextOf(header.clock),
                         .pid = header.pid,
                         .wall_offset = header.wall_offset,
                         .refused_labels = header.refused_labels};
  for (uint32_t label = 1; label < std::min(header.labels, kMostLabels); ++label) {
    recording.labels.push_back(TextOf(header.label[label]));
  }
  std::vector<std::pair<uint64_t, Event>> numbered;
  for (uint32_t index = 0; index < header.events; ++index) {
    const RecordingSlot slot = SlotOf(bytes, index);
    if (SlotOf(later, index).number != slot.number) continue;
    const std::optional<Event> event = EventOf(slot, index, header.events, recording.labels.size());
    if (event) numbered.emplace_back(slot.number, *event);
  }
  std::sort(numbered.begin(), numbered.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [number, event] : numbered) recording.events.push_back(event);
  // Of a file that is being written to, slots may be newer than the header.
  const uint64_t recorded =
      numbered.empty() ? header.tickets : std::max(header.tickets, numbered.back().first);
  recording.dropped = recorded - numbered.size();
  return recording;
}

absl::StatusOr<Recording> ReadRecording(const std::string& path) {
  const absl::StatusOr<std::string> bytes = BytesOf(path);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<std::string> later = BytesOf(path);
  if (!later.ok()) return later.status();
  return ParseRecording(*bytes, path, *later);
}

bool IsRecording(const std::string& path) {
  if (absl::EndsWith(path, kRecordingSuffix)) return true;
  char magic[sizeof kRecordingMagic] = {};
  std::ifstream(path, std::ios::binary).read(magic, sizeof magic);
  return std::memcmp(magic, kRecordingMagic, sizeof magic) == 0;
}

}  // namespace signpost::trace
