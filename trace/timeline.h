// The recordings of all processes of a job, on one clock and with what belongs together found.

#ifndef SIGNPOST_TRACE_TIMELINE_H_
#define SIGNPOST_TRACE_TIMELINE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "trace/event.h"
#include "trace/recording.h"

namespace signpost::trace {

// Which event of which process.
struct EventId {
  size_t process = 0;
  size_t event = 0;

  bool operator==(const EventId&) const = default;
};

// From a worker's frame to the round that it is part of: from the begin of an exchange to a frame's
// event. Or from an answer's event to the end of an exchange.
struct Arrow {
  EventId from;
  EventId to;
};

// Processes whose steady clock is the same.
struct HostClock {
  std::string host;
  std::string clock;
  // How far its clock was ahead of the first host's.
  int64_t offset = 0;
  // How far that may be wrong. None: no messages in both directions told, and the offset is what
  // the system's clocks had said.
  std::optional<int64_t> bound = std::nullopt;
  bool is_contradictory = false;  // Clocks::Offset
};

struct Process {
  std::string name;  // "rank 3"
  size_t host = 0;   // in hosts
  uint64_t pid = 0;
  uint64_t dropped = 0;       // events that it recorded and that are not here
  std::vector<Event> events;  // in the order of their ends
  // How often it had no room for the name of a job or codec; events have none then.
  uint64_t refused_labels = 0;
};

// Times are nanoseconds since the first event of all.
struct Timeline {
  std::vector<HostClock> hosts;
  std::vector<Process> processes;  // ranks first, then aggregators, in order
  std::vector<std::string> labels = {""};
  std::vector<Arrow> arrows;
  std::vector<std::string> left_out;  // recordings that could not be read, and why

  const Event& At(EventId id) const { return processes[id.process].events[id.event]; }
  absl::string_view Label(uint16_t label) const { return labels[label]; }
};

Timeline Join(std::vector<Recording> recordings);

// Finds the arrows of a timeline that has none. Where a frame has been sent several times, its
// arrival belongs to the exchange that was under way then. Frames that no exchange, or no round, is
// recorded of have none, and neither have such answers, nor those to exchanges that had failed.
void FindArrows(Timeline& timeline);

// What a round, its frames and answers and all exchanges for it have in common.
struct RoundKey {
  uint16_t job = 0;
  uint32_t chunk = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;

  bool operator==(const RoundKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const RoundKey& key) {
    return H::combine(std::move(h), key.job, key.chunk, key.epoch, key.step);
  }
};
RoundKey KeyOf(const Event& event);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_TIMELINE_H_
