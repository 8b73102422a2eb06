#include "trace/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ios>
#include <istream>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "trace/rows.h"

namespace signpost::trace {
namespace {

using Json = nlohmann::ordered_json;

// Whatever the bytes are: what is not UTF-8 is replaced.
std::string Text(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

// The format's times are microseconds.
std::string Microseconds(int64_t nanoseconds) {
  return absl::StrFormat("%d.%03d", nanoseconds / 1000, nanoseconds % 1000);
}
double ToMicroseconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000; }
// Of what somebody has written: at most some decades.
int64_t ToNanoseconds(double microseconds) {
  return std::llround(std::clamp(microseconds, -1e15, 1e15) * 1000);
}

// Writes the array's entries.
class Entries {
 public:
  explicit Entries(std::ostream& to) : to_(to) {}

  void Add(const std::string& entry) {
    to_ << (is_first_ ? "\n" : ",\n") << entry;
    is_first_ = false;
  }

 private:
  std::ostream& to_;
  bool is_first_ = true;
};

void AddName(Entries& entries, const char* what, size_t pid, size_t tid, const std::string& name,
             size_t sort_index) {
  const std::string of = absl::StrCat(what, "_name"), order = absl::StrCat(what, "_sort_index");
  entries.Add(Text(
      {{"ph", "M"}, {"name", of}, {"pid", pid}, {"tid", tid}, {"args", Json{{"name", name}}}}));
  entries.Add(Text({{"ph", "M"},
                    {"name", order},
                    {"pid", pid},
                    {"tid", tid},
                    {"args", Json{{"sort_index", sort_index}}}}));
}

Json ArgumentsOf(const Event& event, const Timeline& timeline) {
  Json args = Json::object();
  if (event.job != 0) args["job"] = timeline.Label(event.job);
  // More than a JavaScript number holds.
  if (event.epoch != 0) args["epoch"] = absl::StrCat(event.epoch);
  args["step"] = event.step;
  if (event.chunk != kNone) args["chunk"] = event.chunk;
  const bool is_round = event.kind == Kind::kRound || event.kind == Kind::kGather;
  if (event.rank != kNone) args[is_round ? "last_rank" : "rank"] = event.rank;
  if (event.codec != 0) args["codec"] = timeline.Label(event.codec);
  if (event.bytes != 0) args["bytes"] = event.bytes;
  return args;
}

bool IsMoment(Kind kind) {
  return kind == Kind::kFrame || kind == Kind::kMissing || kind == Kind::kAnswer ||
         kind == Kind::kReplay || kind == Kind::kRetry || kind == Kind::kFailed;
}

std::string EntryOf(const Event& event, const Timeline& timeline, size_t pid, size_t tid) {
  const absl::string_view name = NameOf(event.kind).name;
  const std::string when =
      IsMoment(event.kind) ? absl::StrCat(R"("ph":"i","s":"t","ts":)", Microseconds(event.begin))
                           : absl::StrCat(R"("ph":"X","ts":)", Microseconds(event.begin),
                                          R"(,"dur":)", Microseconds(event.end - event.begin));
  return absl::StrCat(R"({"name":")", name, R"(","cat":"signpost",)", when, R"(,"pid":)", pid,
                      R"(,"tid":)", tid, R"(,"args":)", Text(ArgumentsOf(event, timeline)), "}");
}

// One end of an arrow. It ends in the slice that is around it, not in the one after.
std::string EndOf(bool is_begin, bool is_frame, size_t id, int64_t when, size_t pid, size_t tid) {
  return absl::StrCat(R"({"name":")", is_frame ? "frame" : "answer", R"(","cat":"signpost","ph":")",
                      is_begin ? R"(s")" : R"(f","bp":"e")", R"(,"id":)", id, R"(,"ts":)",
                      Microseconds(when), R"(,"pid":)", pid, R"(,"tid":)", tid, "}");
}

void AddArrows(const Timeline& timeline, const std::vector<Rows>& rows, Entries& entries) {
  for (size_t i = 0; i < timeline.arrows.size(); ++i) {
    const Arrow& arrow = timeline.arrows[i];
    const Event& from = timeline.At(arrow.from);
    const Event& to = timeline.At(arrow.to);
    const bool is_frame = to.kind == Kind::kFrame;
    const auto add = [&](bool is_begin, EventId id, int64_t when) {
      entries.Add(EndOf(is_begin, is_frame, i + 1, when, id.process + 1,
                        rows[id.process].row_of[id.event] + 1));
    };
    add(true, arrow.from, from.begin);
    add(false, arrow.to, is_frame ? to.begin : to.end);
  }
}

Json HostsOf(const Timeline& timeline) {
  Json hosts = Json::array();
  for (const HostClock& clock : timeline.hosts) {
    Json host = {{"host", clock.host},
                 {"clock", clock.clock},
                 {"clock_offset_us", ToMicroseconds(clock.offset)}};
    if (clock.bound) host["clock_offset_bound_us"] = ToMicroseconds(*clock.bound);
    if (clock.is_contradictory) host["clocks_drift"] = true;
    hosts.push_back(std::move(host));
  }
  return hosts;
}

Json ProcessesOf(const Timeline& timeline) {
  Json processes = Json::array();
  for (size_t i = 0; i < timeline.processes.size(); ++i) {
    const Process& process = timeline.processes[i];
    processes.push_back({{"pid", i + 1},
                         {"process", process.name},
                         {"host", process.host},
                         {"system_pid", process.pid},
                         {"events", process.events.size()},
                         {"dropped_events", process.dropped},
                         {"refused_labels", process.refused_labels}});
  }
  return processes;
}

// Reading.

uint32_t NumberAt(const Json& args, const char* name) { return args.value(name, kNone); }

uint16_t LabelOf(const Json& args, const char* name, Timeline& timeline) {
  const std::string text = args.value(name, "");
  for (size_t label = 0; label < timeline.labels.size(); ++label) {
    if (timeline.labels[label] == text) return static_cast<uint16_t>(label);
  }
  if (timeline.labels.size() > UINT16_MAX) return 0;
  timeline.labels.push_back(text);
  return static_cast<uint16_t>(timeline.labels.size() - 1);
}

// Adds it to its process, by pid. Throws what Json throws.
void AddEntry(const Json& entry, std::map<uint64_t, std::vector<Event>>& events,
              Timeline& timeline) {
  const std::string ph = entry.value("ph", "");
  if (ph != "X" && ph != "i") return;
  const std::optional<Kind> kind = KindNamed(entry.value("name", ""));
  if (!kind || entry.value("cat", "") != "signpost") return;
  Event event;
  event.kind = *kind;
  event.begin = ToNanoseconds(entry.at("ts").get<double>());
  event.end = event.begin + ToNanoseconds(entry.value("dur", 0.0));
  const Json args = entry.value("args", Json::object());
  if (!absl::SimpleAtoi(args.value("epoch", "0"), &event.epoch)) event.epoch = 0;
  event.step = args.value("step", uint64_t{0});
  event.chunk = NumberAt(args, "chunk");
  event.rank = NumberAt(args, args.contains("last_rank") ? "last_rank" : "rank");
  event.bytes = args.value("bytes", uint64_t{0});
  event.job = LabelOf(args, "job", timeline);
  event.codec = LabelOf(args, "codec", timeline);
  events[entry.at("pid").get<uint64_t>()].push_back(event);
}

void AddHost(const Json& entry, Timeline& timeline) {
  HostClock host = {entry.value("host", ""), entry.value("clock", ""),
                    ToNanoseconds(entry.value("clock_offset_us", 0.0))};
  if (entry.contains("clock_offset_bound_us")) {
    host.bound = ToNanoseconds(entry["clock_offset_bound_us"].get<double>());
  }
  host.is_contradictory = entry.value("clocks_drift", false);
  timeline.hosts.push_back(std::move(host));
}

// Throws what Json throws.
Timeline Read(std::istream& from) {
  Timeline timeline;
  std::map<uint64_t, std::vector<Event>> events;
  // Each event is let go of once it is read: all of them as JSON would take many times the memory.
  std::string list;
  const auto take = [&](int depth, Json::parse_event_t what, Json& parsed) {
    if (depth == 1 && what == Json::parse_event_t::key) list = parsed.get<std::string>();
    const bool is_entry = depth == 2 && what == Json::parse_event_t::object_end;
    if (!is_entry || list != "traceEvents") return true;
    AddEntry(parsed, events, timeline);
    return false;
  };
  const Json trace = Json::parse(from, take);
  const Json& other = trace.at("otherData");
  for (const Json& host : other.at("hosts")) AddHost(host, timeline);
  for (const Json& entry : other.at("processes")) {
    timeline.processes.push_back({entry.at("process"), entry.at("host"), entry.at("system_pid"),
                                  entry.at("dropped_events"),
                                  std::move(events[entry.at("pid").get<uint64_t>()]),
                                  entry.value("refused_labels", uint64_t{0})});
  }
  FindArrows(timeline);
  return timeline;
}

}  // namespace

void WriteChromeTrace(const Timeline& timeline, std::ostream& to) {
  to << R"({"displayTimeUnit":"ms","otherData":)"
     << Text({{"signpost_trace", 1},
              {"hosts", HostsOf(timeline)},
              {"processes", ProcessesOf(timeline)}})
     << R"(,"traceEvents":[)";
  Entries entries(to);
  std::vector<Rows> rows;
  for (size_t i = 0; i < timeline.processes.size(); ++i) {
    const Process& process = timeline.processes[i];
    rows.push_back(RowsOf(process));
    const std::string host = process.host < timeline.hosts.size() && timeline.hosts.size() > 1
                                 ? absl::StrCat(" on ", timeline.hosts[process.host].host)
                                 : "";
    AddName(entries, "process", i + 1, 0, absl::StrCat(process.name, host), i);
    for (size_t row = 0; row < rows[i].names.size(); ++row) {
      AddName(entries, "thread", i + 1, row + 1, rows[i].names[row], row);
    }
    for (size_t event = 0; event < process.events.size(); ++event) {
      entries.Add(EntryOf(process.events[event], timeline, i + 1, rows[i].row_of[event] + 1));
    }
  }
  AddArrows(timeline, rows, entries);
  to << "\n]}\n";
}

absl::StatusOr<Timeline> ReadChromeTrace(std::istream& from, absl::string_view name) {
  try {
    return Read(from);
  } catch (const Json::exception& exception) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " is no trace that `signpost trace merge` has written: ", exception.what()));
  } catch (const std::ios_base::failure& failure) {
    return absl::InvalidArgumentError(absl::StrCat(name, " cannot be read: ", failure.what()));
  }
}

}  // namespace signpost::trace
