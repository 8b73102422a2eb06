// libFuzzer target: recordings, and all that is made of them.
//
//   input = kind (uint8: 0 as it is, 1 as follows, 2 a merged trace) bytes
//
// With 1 the bytes are those of a header before its texts, and of slots behind it: what is between
// them is made here, and so are the magic and the number of slots.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/string_view.h"
#include "fuzzing/seeds.h"
#include "nlohmann/json.hpp"
#include "trace/chrome_trace.h"
#include "trace/recording.h"
#include "trace/summary.h"
#include "trace/timeline.h"

namespace signpost::trace {
namespace {

constexpr size_t kNumbersBytes = offsetof(RecordingHeader, process);

std::string RecordingOf(absl::string_view bytes) {
  RecordingHeader header = {};
  std::memcpy(&header, bytes.data(), std::min(bytes.size(), kNumbersBytes));
  bytes.remove_prefix(std::min(bytes.size(), kNumbersBytes));
  std::memcpy(header.magic, kRecordingMagic, sizeof kRecordingMagic);
  std::memcpy(header.process, "rank 1", 6);
  for (uint32_t i = 1; i < kMostLabels; ++i) header.label[i][0] = static_cast<char>(i);
  header.events = static_cast<uint32_t>(bytes.size() / sizeof(RecordingSlot));
  bytes.remove_suffix(bytes.size() % sizeof(RecordingSlot));
  std::string recording(reinterpret_cast<const char*>(&header), sizeof header);
  recording.append(bytes.data(), bytes.size());
  return recording;
}

void UseTimeline(const Timeline& timeline) {
  for (const Arrow& arrow : timeline.arrows) {
    ABSL_RAW_CHECK(KeyOf(timeline.At(arrow.from)) == KeyOf(timeline.At(arrow.to)),
                   "arrows join what belongs together");
  }
  std::ostringstream written;
  WriteChromeTrace(timeline, written);
  ABSL_RAW_CHECK(nlohmann::json::accept(written.str()), "traces are JSON");
  Format(Summarise(timeline), /*with_steps=*/true);
}

void Try(absl::string_view bytes) {
  absl::StatusOr<Recording> recording = ParseRecording(bytes, "input");
  if (!recording.ok()) return;
  ABSL_RAW_CHECK(bytes.size() == RecordingBytes((bytes.size() - RecordingBytes(0)) / 64),
                 "files have whole slots");
  Recording other = *recording;
  other.process = "aggregator 0/1";
  other.clock += "'";  // another host
  UseTimeline(Join({*std::move(recording), std::move(other)}));
}

void TryTrace(absl::string_view bytes) {
  std::istringstream from{std::string(bytes)};
  const absl::StatusOr<Timeline> timeline = ReadChromeTrace(from, "input");
  if (timeline.ok()) UseTimeline(*timeline);
}

std::string SeedOf(const std::vector<RecordingSlot>& slots) {
  RecordingHeader header = {};
  header.labels = 3;
  header.tickets = slots.size();
  header.wall_offset = int64_t{1} << 60;
  std::string seed = "\1";
  seed.append(reinterpret_cast<const char*>(&header), kNumbersBytes);
  seed.append(reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof slots[0]);
  return seed;
}

std::vector<RecordingSlot> Slots() {
  std::vector<RecordingSlot> slots;
  for (uint64_t kind = 0; kind < uint64_t{kKinds}; ++kind) {
    RecordingSlot slot = {.number = kind + 1, .begin = 100, .end = 200, .epoch = 1, .step = 2};
    slot.chunk_and_rank = uint64_t{3} << 32 | 1;
    slot.kind_and_labels = kind | uint64_t{1} << 16 | uint64_t{2} << 32;
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace
}  // namespace signpost::trace

std::vector<std::string> signpost::fuzzing::Seeds() {
  using namespace signpost::trace;
  const std::string slots = SeedOf(Slots());
  const absl::StatusOr<Recording> recording = ParseRecording(RecordingOf(slots.substr(1)), "seed");
  ABSL_RAW_CHECK(recording.ok() && recording->events.size() == size_t{kKinds}, "seeds are good");
  std::ostringstream trace;
  WriteChromeTrace(Join({*recording}), trace);
  return {std::string(1, '\0') + RecordingOf(slots.substr(1)), slots, "\2" + trace.str()};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      signpost::trace::Try(bytes);
      break;
    case 1:
      signpost::trace::Try(signpost::trace::RecordingOf(bytes));
      break;
    default:
      signpost::trace::TryTrace(bytes);
  }
  return 0;
}
