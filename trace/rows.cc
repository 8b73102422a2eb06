#include "trace/rows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

namespace signpost::trace {
namespace {

// A process may have several workers, and a worker several jobs, as reductions are, one at a time.
using Group = std::pair<Row, uint32_t>;  // and whose rank

Group GroupOf(const Event& event) {
  const Row row = NameOf(event.kind).row;
  const bool is_of_rank = row == Row::kSteps || row == Row::kExchanges;
  return {row, is_of_rank ? event.rank : kNone};
}

std::string NameOf(const Group& group, size_t lane) {
  const std::string rank = group.second == kNone ? "" : absl::StrCat(" of rank ", group.second);
  switch (group.first) {
    case Row::kSteps:
      return absl::StrCat("steps", rank, lane == 0 ? "" : absl::StrCat(" (", lane + 1, ")"));
    case Row::kExchanges:
      return absl::StrCat("exchanges", rank, " ", lane + 1);
    case Row::kConnections:
      return absl::StrCat("connections ", lane + 1);
    case Row::kRounds:
      return absl::StrCat("rounds ", lane + 1);
    case Row::kSnapshots:
      break;
  }
  return "snapshots";
}

// Of one group: for each event its lane, the first in which it crosses no other. Those that contain
// others come first.
std::vector<size_t> LanesOf(const std::vector<const Event*>& events) {
  std::vector<std::vector<int64_t>> open;  // by lane: the ends of those that contain each other
  std::vector<size_t> lanes;
  for (const Event* event : events) {
    size_t lane = 0;
    for (; lane < open.size(); ++lane) {
      while (!open[lane].empty() && open[lane].back() <= event->begin) open[lane].pop_back();
      if (open[lane].empty() || event->end <= open[lane].back()) break;
    }
    if (lane == open.size()) open.emplace_back();
    open[lane].push_back(event->end);
    lanes.push_back(lane);
  }
  return lanes;
}

// Events that are parts of a round, and are drawn where it is.
bool IsPartOfRound(Kind kind) {
  return kind == Kind::kFrame || kind == Kind::kMissing || kind == Kind::kAnswer ||
         kind == Kind::kGather || kind == Kind::kHold || kind == Kind::kAverage;
}

}  // namespace

Rows RowsOf(const Process& process) {
  const std::vector<Event>& events = process.events;
  std::map<Group, std::vector<size_t>> groups;
  for (size_t i = 0; i < events.size(); ++i) {
    if (!IsPartOfRound(events[i].kind)) groups[GroupOf(events[i])].push_back(i);
  }
  Rows rows;
  rows.row_of.resize(events.size());
  absl::flat_hash_map<RoundKey, std::vector<size_t>> rounds;
  for (auto& [group, members] : groups) {
    std::stable_sort(members.begin(), members.end(), [&](size_t a, size_t b) {
      return std::tuple(events[a].begin, -events[a].end, events[a].kind) <
             std::tuple(events[b].begin, -events[b].end, events[b].kind);
    });
    // Nothing contains another exchange or round: those that would have a row of their own.
    const bool contains = group.first == Row::kSteps;
    std::vector<const Event*> sorted;
    for (const size_t i : members) sorted.push_back(&events[i]);
    std::vector<size_t> lanes;
    if (contains) {
      lanes = LanesOf(sorted);
    } else {
      std::vector<int64_t> ends;
      for (const Event* event : sorted) {
        const auto free = std::find_if(ends.begin(), ends.end(),
                                       [&](int64_t end) { return end <= event->begin; });
        lanes.push_back(free - ends.begin());
        if (free == ends.end()) ends.push_back(0);
        ends[lanes.back()] = event->end;
      }
    }
    const size_t first = rows.names.size();
    const size_t count = lanes.empty() ? 0 : *std::max_element(lanes.begin(), lanes.end()) + 1;
    for (size_t lane = 0; lane < count; ++lane) rows.names.push_back(NameOf(group, lane));
    for (size_t i = 0; i < members.size(); ++i) {
      rows.row_of[members[i]] = static_cast<uint32_t>(first + lanes[i]);
      if (events[members[i]].kind == Kind::kRound) {
        rounds[KeyOf(events[members[i]])].push_back(members[i]);
      }
    }
  }
  uint32_t without_round = UINT32_MAX;
  for (size_t i = 0; i < events.size(); ++i) {
    if (!IsPartOfRound(events[i].kind)) continue;
    bool is_drawn = false;
    for (const size_t round : rounds[KeyOf(events[i])]) {
      if (events[round].begin > events[i].begin || events[i].end > events[round].end) continue;
      rows.row_of[i] = rows.row_of[round];
      is_drawn = true;
    }
    if (is_drawn) continue;
    if (without_round == UINT32_MAX) {
      without_round = rows.names.size();
      rows.names.push_back("frames outside of rounds");
    }
    rows.row_of[i] = without_round;
  }
  return rows;
}

}  // namespace signpost::trace
