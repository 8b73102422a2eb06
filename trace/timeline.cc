#include "trace/timeline.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "trace/clocks.h"

namespace signpost::trace {
namespace {

// A rank's part of a round.
using FrameKey = std::pair<RoundKey, uint32_t>;
using EventsOfFrame = absl::flat_hash_map<FrameKey, std::vector<EventId>>;

FrameKey FrameKeyOf(const Event& event) { return {KeyOf(event), event.rank}; }

// "rank 10" after "rank 9", and aggregators last.
auto OrderOf(const Recording& recording) {
  const size_t space = recording.process.find(' ');
  uint32_t number = 0;
  if (space != std::string::npos) {
    const std::string digits = recording.process.substr(space + 1);
    if (!absl::SimpleAtoi(digits.substr(0, digits.find('/')), &number)) number = 0;
  }
  return std::tuple(absl::StartsWith(recording.process, "aggregator"),
                    recording.process.substr(0, space), number, recording.wall_offset,
                    recording.pid);
}

size_t HostOf(const Recording& recording, std::vector<HostClock>& hosts) {
  for (size_t host = 0; host < hosts.size(); ++host) {
    if (hosts[host].clock == recording.clock) return host;
  }
  hosts.push_back({recording.host, recording.clock, recording.wall_offset});
  return hosts.size() - 1;
}

Process ProcessOf(Recording recording, Timeline& timeline) {
  std::vector<uint16_t> label_of(recording.labels.size());
  for (size_t label = 1; label < recording.labels.size(); ++label) {
    const std::string& text = recording.labels[label];
    auto found = std::find(timeline.labels.begin() + 1, timeline.labels.end(), text);
    const bool has_room = timeline.labels.size() <= std::numeric_limits<uint16_t>::max();
    if (found == timeline.labels.end() && !has_room) continue;
    if (found == timeline.labels.end()) {
      timeline.labels.push_back(text);
      found = timeline.labels.end() - 1;
    }
    label_of[label] = static_cast<uint16_t>(found - timeline.labels.begin());
  }
  for (Event& event : recording.events) {
    event.job = label_of[event.job];
    event.codec = label_of[event.codec];
  }
  return {std::move(recording.process),
          HostOf(recording, timeline.hosts),
          recording.pid,
          recording.dropped,
          std::move(recording.events),
          recording.refused_labels};
}

EventsOfFrame EventsOf(const Timeline& timeline, Kind kind) {
  EventsOfFrame events;
  for (size_t process = 0; process < timeline.processes.size(); ++process) {
    const std::vector<Event>& all = timeline.processes[process].events;
    for (size_t event = 0; event < all.size(); ++event) {
      if (all[event].kind == kind) events[FrameKeyOf(all[event])].push_back({process, event});
    }
  }
  return events;
}

// The exchanges that an answer ended.
EventsOfFrame AnsweredOf(EventsOfFrame exchanges, const Timeline& timeline) {
  for (const auto& [key, failures] : EventsOf(timeline, Kind::kFailed)) {
    const auto found = exchanges.find(key);
    if (found == exchanges.end()) continue;
    for (const EventId failed : failures) {
      std::erase_if(found->second, [&](EventId id) {
        return id.process == failed.process && timeline.At(id).end == timeline.At(failed).begin;
      });
    }
    if (found->second.empty()) exchanges.erase(found);
  }
  return exchanges;
}

// Of frames and answers that cannot be mistaken for others.
void AddMessages(const Timeline& timeline, const EventsOfFrame& exchanges, Kind kind,
                 Clocks& clocks) {
  for (const auto& [key, events] : EventsOf(timeline, kind)) {
    const auto exchange = exchanges.find(key);
    if (exchange == exchanges.end()) continue;
    if (events.size() != 1 || exchange->second.size() != 1) continue;
    const EventId there = events[0], here = exchange->second[0];
    const size_t host_there = timeline.processes[there.process].host;
    const size_t host_here = timeline.processes[here.process].host;
    if (kind == Kind::kFrame) {
      clocks.AddMessage(host_here, timeline.At(here).begin, host_there, timeline.At(there).begin);
    } else {
      clocks.AddMessage(host_there, timeline.At(there).begin, host_here, timeline.At(here).end);
    }
  }
}

// Finds the hosts' offsets; each host's `offset` is what the system's clock says when this begins.
void CompareClocks(Timeline& timeline) {
  if (timeline.hosts.empty()) return;
  Clocks clocks(timeline.hosts.size());
  const EventsOfFrame exchanges = EventsOf(timeline, Kind::kExchange);
  AddMessages(timeline, exchanges, Kind::kFrame, clocks);
  AddMessages(timeline, AnsweredOf(exchanges, timeline), Kind::kAnswer, clocks);
  const std::vector<std::optional<Clocks::Offset>> offsets = clocks.Solve();
  const int64_t wall_of_first = timeline.hosts[0].offset;
  for (size_t i = 0; i < timeline.hosts.size(); ++i) {
    HostClock& host = timeline.hosts[i];
    // The system's clock is ahead of the steady one by so much less as that was started earlier.
    host.offset = wall_of_first - host.offset;
    if (!offsets[i]) continue;
    host.offset = offsets[i]->offset;
    host.bound = offsets[i]->bound;
    host.is_contradictory = offsets[i]->is_contradictory;
  }
}

void PutOnOneClock(Timeline& timeline) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (Process& process : timeline.processes) {
    const int64_t offset = timeline.hosts[process.host].offset;
    for (Event& event : process.events) {
      event.begin -= offset;
      event.end -= offset;
      first = std::min(first, event.begin);
    }
  }
  for (Process& process : timeline.processes) {
    for (Event& event : process.events) {
      event.begin -= first;
      event.end -= first;
    }
  }
}

// That was under way at `time`, or else the one nearest to it.
EventId UnderWayAt(int64_t time, const std::vector<EventId>& exchanges, const Timeline& timeline) {
  const auto distance = [&](EventId id) {
    const Event& event = timeline.At(id);
    return std::max({event.begin - time, time - event.end, int64_t{0}});
  };
  return *std::min_element(exchanges.begin(), exchanges.end(), [&](EventId a, EventId b) {
    return std::pair(distance(a), -timeline.At(a).begin) <
           std::pair(distance(b), -timeline.At(b).begin);
  });
}

// By one clock: it would have come before it was sent, so it belongs to something else.
bool IsBackwards(const Arrow& arrow, const Timeline& timeline) {
  const Event& to = timeline.At(arrow.to);
  const int64_t came = to.kind == Kind::kFrame ? to.begin : to.end;
  return timeline.processes[arrow.from.process].host == timeline.processes[arrow.to.process].host &&
         came < timeline.At(arrow.from).begin;
}

bool IsInRound(EventId id, const absl::flat_hash_map<RoundKey, std::vector<EventId>>& rounds,
               const Timeline& timeline) {
  const Event& event = timeline.At(id);
  const auto found = rounds.find(KeyOf(event));
  if (found == rounds.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [&](EventId round) {
    return round.process == id.process && timeline.At(round).begin <= event.begin &&
           event.begin <= timeline.At(round).end;
  });
}

}  // namespace

RoundKey KeyOf(const Event& event) { return {event.job, event.chunk, event.epoch, event.step}; }

Timeline Join(std::vector<Recording> recordings) {
  std::sort(recordings.begin(), recordings.end(),
            [](const Recording& a, const Recording& b) { return OrderOf(a) < OrderOf(b); });
  Timeline timeline;
  for (Recording& recording : recordings) {
    timeline.processes.push_back(ProcessOf(std::move(recording), timeline));
  }
  CompareClocks(timeline);
  PutOnOneClock(timeline);
  FindArrows(timeline);
  return timeline;
}

void FindArrows(Timeline& timeline) {
  const EventsOfFrame exchanges = EventsOf(timeline, Kind::kExchange);
  const EventsOfFrame answered = AnsweredOf(exchanges, timeline);
  absl::flat_hash_map<RoundKey, std::vector<EventId>> rounds;
  for (const auto& [key, events] : EventsOf(timeline, Kind::kRound)) {
    for (const EventId id : events) rounds[key.first].push_back(id);
  }
  for (size_t process = 0; process < timeline.processes.size(); ++process) {
    const std::vector<Event>& all = timeline.processes[process].events;
    for (size_t i = 0; i < all.size(); ++i) {
      const EventId id = {process, i};
      if (all[i].kind != Kind::kFrame && all[i].kind != Kind::kAnswer) continue;
      const bool is_frame = all[i].kind == Kind::kFrame;
      const EventsOfFrame& candidates = is_frame ? exchanges : answered;
      const auto sent = candidates.find(FrameKeyOf(all[i]));
      if (sent == candidates.end() || !IsInRound(id, rounds, timeline)) continue;
      const EventId exchange = UnderWayAt(all[i].begin, sent->second, timeline);
      const Arrow arrow = is_frame ? Arrow{exchange, id} : Arrow{id, exchange};
      if (!IsBackwards(arrow, timeline)) timeline.arrows.push_back(arrow);
    }
  }
}

}  // namespace signpost::trace
