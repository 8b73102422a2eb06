#include "trace/summary.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost::trace {
namespace {

constexpr size_t kMostRows = 5;  // of each table but the first
// So many frames of a step, and so small, cost more for each call than for what is in them.
constexpr uint64_t kManyChunks = 64;
constexpr uint64_t kSmallFrame = 16 << 10;

absl::Duration DurationOf(const Event& event) { return absl::Nanoseconds(event.end - event.begin); }

using WorkerId = std::tuple<size_t, uint32_t, uint16_t>;  // process, rank, job

bool IsIn(const Event& inner, const Event& outer) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

// Adds it to what it is a part of; false if it is none, or has parts itself.
bool AddPart(const Event& event, StepTime& time) {
  const absl::Duration duration = DurationOf(event);
  switch (event.kind) {
    case Kind::kCompress:
      time.compress += duration;
      return true;
    case Kind::kApply:
    case Kind::kEndStep:
    case Kind::kLocalStep:
      time.apply += duration;
      return true;
    case Kind::kWire:
      time.wire += duration;
      return true;
    case Kind::kWait:
      time.wait += duration;
      return true;
    default:
      return false;
  }
}

// Times at which something was under way; each moment counts once.
class Times {
 public:
  explicit Times(std::vector<Event> events) {
    std::sort(events.begin(), events.end(),
              [](const Event& a, const Event& b) { return a.begin < b.begin; });
    for (const Event& event : events) {
      if (spans_.empty() || event.begin > spans_.back().end) {
        spans_.push_back({event.begin, event.end, sum_});
        sum_ += event.end - event.begin;
      } else if (event.end > spans_.back().end) {
        sum_ += event.end - spans_.back().end;
        spans_.back().end = event.end;
      }
    }
  }

  absl::Duration In(int64_t begin, int64_t end) const {
    return absl::Nanoseconds(Until(end) - Until(begin));
  }

 private:
  struct Span {
    int64_t begin, end;
    int64_t before;  // of all spans before
  };

  int64_t Until(int64_t time) const {
    const auto next = std::partition_point(spans_.begin(), spans_.end(),
                                           [&](const Span& span) { return span.begin < time; });
    if (next == spans_.begin()) return 0;
    const Span& span = next[-1];
    return span.before + std::min(time, span.end) - span.begin;
  }

  std::vector<Span> spans_;
  int64_t sum_ = 0;
};

// What was sent in the steps of a job.
class Stages {
 public:
  explicit Stages(const Timeline& timeline) : timeline_(timeline) {
    for (const Process& process : timeline.processes) {
      for (const Event& event : process.events) {
        if (event.kind == Kind::kLocalStep) of_job_[event.job].insert(kLocal);
        if (event.kind == Kind::kStep) Raise(last_step_[event.job], event.step);
        if (event.kind != Kind::kExchange && event.kind != Kind::kFrame) continue;
        // Who skips a round sends next to nothing.
        Event& most = most_[{event.job, event.epoch, event.step}];
        if (event.bytes >= most.bytes) most = event;
      }
    }
    for (const auto& [round, most] : most_) {
      const absl::string_view codec = timeline.Label(most.codec);
      // A resume begins with that round, which is no step, and has the number of one before.
      if (codec == kRestore) continue;
      of_job_[most.job].insert(codec);
      of_step_[{most.job, most.step}] = codec;
      Raise(last_round_[most.job], most.step);
    }
  }

  // As WorkerSteps::stage, of what belongs to a round.
  absl::string_view Of(const Event& event) const {
    const auto most = most_.find({event.job, event.epoch, event.step});
    if (most == most_.end() || !AreSeveral(event.job)) return "";
    return timeline_.Label(most->second.codec);
  }
  // Of a step of which no part is recorded. Steps have the numbers of their rounds in a job without
  // local ones, which the worker of a node alone records: with them there are more steps.
  absl::string_view OfStep(const Event& step) const {
    const auto codec = of_step_.find({step.job, step.step});
    if (codec == of_step_.end() || !AreSeveral(step.job)) return "";
    const bool has_local_steps =
        of_job_.at(step.job).contains(kLocal) || last_step_.at(step.job) > last_round_.at(step.job);
    return has_local_steps ? "" : codec->second;
  }
  absl::string_view OfLocalStep(uint16_t job) const { return AreSeveral(job) ? kLocal : ""; }

 private:
  static constexpr absl::string_view kLocal = "local";
  static constexpr absl::string_view kRestore = "restore";

  static void Raise(uint64_t& most, uint64_t number) { most = std::max(most, number); }

  bool AreSeveral(uint16_t job) const {
    const auto stages = of_job_.find(job);
    return stages != of_job_.end() && stages->second.size() > 1;
  }

  const Timeline& timeline_;
  // By job, epoch and round: what had most bytes.
  absl::flat_hash_map<std::tuple<uint16_t, uint64_t, uint64_t>, Event> most_;
  absl::flat_hash_map<std::pair<uint16_t, uint64_t>, absl::string_view> of_step_;
  std::map<uint16_t, std::set<absl::string_view>> of_job_;
  std::map<uint16_t, uint64_t> last_step_, last_round_;  // by job
};

// Of a worker, by their ends.
struct WorkerEvents {
  std::vector<Event> steps;
  std::vector<Event> parts;  // of those, without calls
  std::vector<Event> calls;
  std::vector<Event> aside;  // joins and checkpoints
  std::optional<int64_t> joined;
  int64_t recorded_since = 0;  // what has ended before may be missing
};

std::map<WorkerId, WorkerEvents> WorkersOf(const Timeline& timeline) {
  std::map<WorkerId, WorkerEvents> workers;
  for (size_t i = 0; i < timeline.processes.size(); ++i) {
    const Process& process = timeline.processes[i];
    for (const Event& event : process.events) {
      if (NameOf(event.kind).row != Row::kSteps) continue;
      WorkerEvents& worker = workers[{i, event.rank, event.job}];
      StepTime unused;
      if (event.kind == Kind::kStep) worker.steps.push_back(event);
      if (event.kind == Kind::kCall) worker.calls.push_back(event);
      if (event.kind == Kind::kJoin) worker.joined = event.end;
      if (event.kind == Kind::kJoin || event.kind == Kind::kCheckpoint) {
        worker.aside.push_back(event);
      }
      if (AddPart(event, unused)) worker.parts.push_back(event);
      if (process.dropped > 0) worker.recorded_since = process.events.front().end;
    }
  }
  return workers;
}

// Events [first, first of those that end after `end`), by their ends.
std::pair<size_t, size_t> EndingIn(const std::vector<Event>& events, size_t first, int64_t end) {
  size_t last = first;
  while (last < events.size() && events[last].end <= end) ++last;
  return {first, last};
}

// When the worker's steps were in Signpost: in their calls, or else all the time.
std::vector<Event> InsideOf(const WorkerEvents& events) {
  std::vector<Event> inside;
  size_t call = 0;
  for (const Event& step : events.steps) {
    const size_t before = inside.size();
    const auto [first, end] = EndingIn(events.calls, call, step.end);
    for (call = first; call < end; ++call) {
      if (IsIn(events.calls[call], step)) inside.push_back(events.calls[call]);
    }
    if (inside.size() == before) inside.push_back(step);
  }
  return inside;
}

// `signposts`: when the process was in Signpost at all, for whichever job.
std::map<absl::string_view, WorkerSteps> StepsOf(const WorkerEvents& events, const Times& signposts,
                                                 const Stages& stages) {
  std::map<absl::string_view, WorkerSteps> of_stages;
  const Times steps(InsideOf(events));
  size_t part = 0;
  std::optional<int64_t> before = events.joined;
  for (const Event& step : events.steps) {
    const int64_t begin = std::min(before.value_or(step.begin), step.begin);
    StepTime time = {.total = absl::Nanoseconds(step.end - begin)};
    const absl::Duration inside = steps.In(begin, step.end);
    absl::Duration parts;
    absl::string_view stage = stages.OfStep(step);
    std::optional<uint64_t> round;
    const auto [first_part, end_parts] = EndingIn(events.parts, part, step.end);
    for (size_t i = first_part; i < end_parts; ++i) {
      const Event& part_of_it = events.parts[i];
      if (!IsIn(part_of_it, step)) continue;
      AddPart(part_of_it, time);
      if (part_of_it.kind == Kind::kLocalStep) {
        stage = stages.OfLocalStep(step.job);
      } else if (part_of_it.chunk != kNone && !round) {
        round = part_of_it.step;  // those that follow may be of steps that are caught up with
        stage = stages.Of(part_of_it);
      }
      parts += DurationOf(part_of_it);
    }
    part = end_parts;
    const bool is_whole = begin >= events.recorded_since;
    before = step.end;
    if (!is_whole) continue;
    time.rest = inside - parts;
    time.other = signposts.In(begin, step.end) - inside;
    time.outside = time.total - inside - time.other;
    WorkerSteps& worker = of_stages[stage];
    worker.steps.push_back(step.step);
    worker.rounds.push_back(round);
    worker.times.push_back(time);
    worker.sum.Add(time);
  }
  return of_stages;
}

// As the worker of a node calls its process.
std::string NodeName(uint32_t rank) { return absl::StrCat("node ", rank); }

// Rounds, and those who waited for them.
class Rounds {
 public:
  Rounds(const Timeline& timeline, const Stages& stages) : timeline_(timeline), stages_(stages) {
    ForEach([this](const Process& process, const Event& event) {
      if (event.kind == Kind::kRound) aggregators_[{event.job, event.chunk}] = process.name;
      if (event.kind == Kind::kFrame || event.kind == Kind::kMissing) {
        frames_[KeyOf(event)].push_back(event);
      }
      if (event.kind == Kind::kGather && event.rank != kNone) gathers_[KeyOf(event)] = event;
      if (event.kind == Kind::kExchange && process.name == NodeName(event.rank)) {
        nodes_.insert({event.job, event.rank});
      }
    });
    ForEach([this](const Process&, const Event& event) { Add(event); });
  }

  std::vector<RankDelay> Delays() const {
    std::vector<RankDelay> delays;
    for (const auto& [key, delay] : delays_) delays.push_back(delay);
    std::stable_sort(delays.begin(), delays.end(), [](const RankDelay& a, const RankDelay& b) {
      return std::pair(a.waited, a.gathered) > std::pair(b.waited, b.gathered);
    });
    return delays;
  }

  std::vector<ChunkTime> Chunks() const {
    std::vector<ChunkTime> chunks;
    for (const auto& [key, chunk] : chunks_) chunks.push_back(chunk);
    std::stable_sort(chunks.begin(), chunks.end(), [](const ChunkTime& a, const ChunkTime& b) {
      return std::pair(a.exchange, a.gather) > std::pair(b.exchange, b.gather);
    });
    for (ChunkTime& chunk : chunks) {
      if (chunk.rounds > 0) {
        chunk.gather /= chunk.rounds;
        chunk.hold /= chunk.rounds;
        chunk.average /= chunk.rounds;
      }
      if (chunk.exchanges > 0) chunk.exchange /= chunk.exchanges;
    }
    return chunks;
  }

 private:
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (const Process& process : timeline_.processes) {
      for (const Event& event : process.events) visit(process, event);
    }
  }

  void Add(const Event& event) {
    switch (event.kind) {
      case Kind::kWait:
        if (const auto found = gathers_.find(KeyOf(event)); found != gathers_.end()) {
          AddWait(event, found->second);
        }
        break;
      case Kind::kGather:
        if (event.rank != kNone) {
          const Arrivals arrivals = ArrivalsOf(event);
          for (const auto& [rank, time] : arrivals) {
            if (time == event.end) ++DelayOf(event.job, rank).last;
          }
          for (const auto& [rank, share] : SharesOf(arrivals, event.begin)) {
            DelayOf(event.job, rank).gathered += share;
          }
        }
        ChunkOf(event).gather += DurationOf(event);
        break;
      case Kind::kHold:
        ChunkOf(event).hold += DurationOf(event);
        break;
      case Kind::kAverage:
        ChunkOf(event).average += DurationOf(event);
        break;
      case Kind::kRound:
        ++ChunkOf(event).rounds;
        break;
      case Kind::kExchange:
        ChunkOf(event).exchange += DurationOf(event);
        ++ChunkOf(event).exchanges;
        ChunkOf(event).bytes += event.bytes;
        break;
      default:
        break;
    }
  }

  using Arrivals = std::map<uint32_t, int64_t>;  // by rank

  // Until when each rank was missing. A rank that took its frame back, and sent another, until that
  // came. The last is there once all is gathered, and so is who was waited for until the round
  // closed without it.
  Arrivals ArrivalsOf(const Event& gather) const {
    Arrivals arrivals;
    if (const auto found = frames_.find(KeyOf(gather)); found != frames_.end()) {
      for (const Event& frame : found->second) {
        if (!IsIn(frame, gather)) continue;
        arrivals[frame.rank] = frame.kind == Kind::kMissing ? gather.end : frame.begin;
      }
    }
    arrivals[gather.rank] = gather.end;
    return arrivals;
  }

  // What each rank has of the time from `from` on.
  static std::map<uint32_t, absl::Duration> SharesOf(const Arrivals& arrivals, int64_t from) {
    std::vector<std::pair<int64_t, uint32_t>> in_order;
    for (const auto& [rank, time] : arrivals) in_order.emplace_back(time, rank);
    std::sort(in_order.begin(), in_order.end());
    std::map<uint32_t, absl::Duration> shares;
    absl::Duration of_each_missing;
    size_t missing = in_order.size();
    for (const auto& [time, rank] : in_order) {
      if (time > from) of_each_missing += absl::Nanoseconds(time - from) / missing;
      from = std::max(from, time);
      --missing;
      if (of_each_missing > absl::ZeroDuration()) shares[rank] = of_each_missing;
    }
    return shares;
  }

  // A worker was blocked for the end of the gathering, and not before its own frame was there.
  void AddWait(const Event& wait, const Event& gather) {
    const Arrivals arrivals = ArrivalsOf(gather);
    int64_t from = std::max(gather.begin, gather.end - (wait.end - wait.begin));
    if (const auto own = arrivals.find(wait.rank); own != arrivals.end()) {
      from = std::max(from, own->second);
    }
    const absl::Duration gathered = absl::Nanoseconds(gather.end - from);
    if (gathered == absl::ZeroDuration()) {
      DelayOf(gather.job, gather.rank).waited += DurationOf(wait);
      return;
    }
    for (const auto& [rank, share] : SharesOf(arrivals, from)) {
      DelayOf(gather.job, rank).waited += DurationOf(wait) * absl::FDivDuration(share, gathered);
    }
  }

  RankDelay& DelayOf(uint16_t job, uint32_t rank) {
    RankDelay& delay = delays_[{job, rank}];
    delay.job = std::string(timeline_.Label(job));
    delay.rank = rank;
    delay.is_node = nodes_.contains({job, rank});
    return delay;
  }

  ChunkTime& ChunkOf(const Event& event) {
    const absl::string_view stage = stages_.Of(event);
    ChunkTime& chunk = chunks_[{event.job, stage, event.chunk}];
    chunk.job = std::string(timeline_.Label(event.job));
    chunk.stage = std::string(stage);
    chunk.aggregator = aggregators_[{event.job, event.chunk}];
    chunk.chunk = event.chunk;
    return chunk;
  }

  const Timeline& timeline_;
  const Stages& stages_;
  std::map<std::pair<uint16_t, uint32_t>, std::string> aggregators_;  // by job and chunk
  absl::flat_hash_map<RoundKey, std::vector<Event>> frames_;
  absl::flat_hash_map<RoundKey, Event> gathers_;
  std::set<std::pair<uint16_t, uint32_t>> nodes_;  // jobs and ranks of workers that nodes have
  std::map<std::pair<uint16_t, uint32_t>, RankDelay> delays_;
  std::map<std::tuple<uint16_t, absl::string_view, uint32_t>, ChunkTime> chunks_;
};

// Frames and answers on their way.
class Ways {
 public:
  Ways(const Timeline& timeline, const Stages& stages) : timeline_(timeline), stages_(stages) {
    for (const Process& process : timeline.processes) {
      for (const Event& event : process.events) {
        if (event.kind == Kind::kRetry) retries_[{KeyOf(event), event.rank}].push_back(event);
        if (event.kind == Kind::kFailed) failed_.insert({KeyOf(event), event.rank});
      }
    }
    for (const Arrow& arrow : timeline.arrows) Add(arrow);
  }

  absl::Duration off() const { return absl::Nanoseconds(off_); }
  uint64_t unknown() const { return unknown_; }

  std::vector<WayTime> OfLongestJob() const {
    std::map<std::pair<std::string, std::string>, absl::Duration> of_job;
    for (const auto& [key, way] : ways_) of_job[{way.job, way.stage}] += way.in + way.back;
    const auto longest = std::max_element(of_job.begin(), of_job.end(),
                                          [](auto& a, auto& b) { return a.second < b.second; });
    std::vector<WayTime> ways;
    for (auto [key, way] : ways_) {
      if (std::pair(way.job, way.stage) != longest->first) continue;
      if (way.frames > 0) way.in /= way.frames;
      if (way.answers > 0) way.back /= way.answers;
      ways.push_back(std::move(way));
    }
    std::stable_sort(ways.begin(), ways.end(), [](const WayTime& a, const WayTime& b) {
      return std::pair(a.is_aggregator, a.in + a.back) > std::pair(b.is_aggregator, b.in + b.back);
    });
    return ways;
  }

 private:
  void Add(const Arrow& arrow) {
    const Event& from = timeline_.At(arrow.from);
    const Event& to = timeline_.At(arrow.to);
    const Process& sender = timeline_.processes[arrow.from.process];
    const Process& receiver = timeline_.processes[arrow.to.process];
    if (sender.host != receiver.host) {
      const std::optional<int64_t> bound = timeline_.hosts[sender.host].bound;
      const std::optional<int64_t> other_bound = timeline_.hosts[receiver.host].bound;
      if (!bound || !other_bound) {
        ++unknown_;
        return;
      }
      off_ = std::max(off_, *bound + *other_bound);
    }
    const bool is_frame = to.kind == Kind::kFrame;
    if (WasSentAgain(is_frame ? from : to)) return;
    const int64_t end = is_frame ? to.begin : to.end;
    for (const Process* process : {&sender, &receiver}) {
      WayTime& way = ways_[{from.job, stages_.Of(from), process->name}];
      way.job = std::string(timeline_.Label(from.job));
      way.stage = std::string(stages_.Of(from));
      way.process = process->name;
      way.is_aggregator = (process == &receiver) == is_frame;
      (is_frame ? way.in : way.back) += absl::Nanoseconds(end - from.begin);
      ++(is_frame ? way.frames : way.answers);
    }
  }

  // Or could not be sent: what failed may be sent again, as another exchange.
  bool WasSentAgain(const Event& exchange) const {
    if (failed_.contains({KeyOf(exchange), exchange.rank})) return true;
    const auto found = retries_.find({KeyOf(exchange), exchange.rank});
    return found != retries_.end() &&
           std::any_of(found->second.begin(), found->second.end(),
                       [&](const Event& retry) { return IsIn(retry, exchange); });
  }

  const Timeline& timeline_;
  const Stages& stages_;
  absl::flat_hash_map<std::pair<RoundKey, uint32_t>, std::vector<Event>> retries_;
  absl::flat_hash_set<std::pair<RoundKey, uint32_t>> failed_;
  std::map<std::tuple<uint16_t, absl::string_view, std::string>, WayTime> ways_;
  int64_t off_ = 0;
  uint64_t unknown_ = 0;
};

std::vector<LostTime> LostOf(const Timeline& timeline, const std::vector<ChunkTime>& chunks) {
  std::map<std::pair<absl::string_view, uint32_t>, std::string> aggregators;
  for (const ChunkTime& chunk : chunks) aggregators[{chunk.job, chunk.chunk}] = chunk.aggregator;
  std::vector<LostTime> all;
  for (const Process& process : timeline.processes) {
    LostTime lost = {.process = process.name};
    for (const Event& event : process.events) {
      if (event.kind == Kind::kLost) {
        ++lost.times;
        lost.lost += DurationOf(event);
      } else if (event.kind == Kind::kRetry) {
        const std::string& of = aggregators[{timeline.Label(event.job), event.chunk}];
        ++lost.again[of.empty() ? "an aggregator without a recording" : of];
      }
    }
    if (lost.times > 0 || !lost.again.empty()) all.push_back(std::move(lost));
  }
  return all;
}

// Formatting.

using Table = std::vector<std::vector<std::string>>;

// The first two columns are words, the others numbers.
std::string Align(const Table& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const int width = static_cast<int>(widths[i]);
      absl::StrAppendFormat(
          &line,
          i < 2 ? absl::ParsedFormat<'*', 's'>("%-*s  ") : absl::ParsedFormat<'*', 's'>("%*s  "),
          width, row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&table, line, "\n");
  }
  return table;
}

std::string Milliseconds(absl::Duration duration) {
  return absl::StrFormat("%.3f", absl::ToDoubleMilliseconds(duration));
}

std::string Share(absl::Duration part, absl::Duration whole) {
  if (whole == absl::ZeroDuration()) return "-";
  return absl::StrFormat("%.0f%%", 100 * absl::FDivDuration(part, whole));
}

template <typename Times>
std::string JobOf(const Times& times) {
  return times.stage.empty() ? times.job : absl::StrCat(times.job, ", ", times.stage);
}

std::vector<absl::Duration> PartsOf(const StepTime& time) {
  return {time.outside, time.other, time.compress, time.apply, time.wire, time.wait, time.rest};
}

std::vector<std::string> Row(std::string name, std::string what, const StepTime& time,
                             int64_t steps) {
  std::vector<std::string> row = {std::move(name), std::move(what),
                                  Milliseconds(time.total / steps)};
  for (const absl::Duration part : PartsOf(time)) row.push_back(Milliseconds(part / steps));
  return row;
}

// 0/1 Adam's steps are more than its rounds.
std::string NameOfStep(uint64_t step, std::optional<uint64_t> round) {
  const bool is_another = round && *round != step;
  return absl::StrCat("step ", step, is_another ? absl::StrCat(", round ", *round) : "");
}

std::string FormatWorkers(const Summary& summary, bool with_steps) {
  Table rows = {
      {"process", "", "a step", "outside", "other", "compress", "apply", "wire", "wait", "rest"}};
  for (const WorkerSteps& worker : summary.workers) {
    const int64_t steps = static_cast<int64_t>(worker.steps.size());
    rows.push_back(Row(worker.process, absl::StrCat(steps, steps == 1 ? " step" : " steps"),
                       worker.sum, steps));
    std::vector<std::string> shares = {"", JobOf(worker), "100%"};
    for (const absl::Duration part : PartsOf(worker.sum)) {
      shares.push_back(Share(part, worker.sum.total));
    }
    rows.push_back(std::move(shares));
    for (size_t i = 0; with_steps && i < worker.steps.size(); ++i) {
      rows.push_back(Row("", NameOfStep(worker.steps[i], worker.rounds[i]), worker.times[i], 1));
    }
  }
  return Align(rows);
}

std::string FormatDelays(const std::vector<RankDelay>& delays, bool has_workers) {
  absl::Duration all;
  for (const RankDelay& delay : delays) all += delay.waited;
  Table rows = {{"waited for", "job", "came last", "gathered", "others blocked", ""}};
  for (size_t i = 0; i < std::min(kMostRows, delays.size()); ++i) {
    const RankDelay& delay = delays[i];
    rows.push_back({delay.is_node ? NodeName(delay.rank) : absl::StrCat("rank ", delay.rank),
                    delay.job, absl::StrCat(delay.last), Milliseconds(delay.gathered),
                    has_workers ? Milliseconds(delay.waited) : "-", Share(delay.waited, all)});
  }
  return Align(rows);
}

// What is the mean of nothing was not recorded.
std::string MeanOf(uint64_t recorded, absl::Duration mean) {
  return recorded > 0 ? Milliseconds(mean) : "-";
}

std::string FormatChunks(const std::vector<ChunkTime>& chunks) {
  Table rows = {{"slowest", "job", "rounds", "exchange", "gather", "hold", "average"}};
  for (size_t i = 0; i < std::min(kMostRows, chunks.size()); ++i) {
    const ChunkTime& chunk = chunks[i];
    const std::string of = chunk.aggregator.empty() ? "" : absl::StrCat(", ", chunk.aggregator);
    rows.push_back({absl::StrCat("chunk ", chunk.chunk, of), JobOf(chunk),
                    chunk.rounds > 0 ? absl::StrCat(chunk.rounds) : "-",
                    MeanOf(chunk.exchanges, chunk.exchange), MeanOf(chunk.rounds, chunk.gather),
                    MeanOf(chunk.rounds, chunk.hold), MeanOf(chunk.rounds, chunk.average)});
  }
  return Align(rows);
}

// How many chunks jobs have, those first whose chunks are; empty if no frame is recorded.
std::string FormatSizes(const std::vector<ChunkTime>& chunks) {
  struct Job {
    std::string name;
    uint64_t chunks = 0;
    uint64_t exchanges = 0;
    uint64_t bytes = 0;
  };
  std::vector<Job> jobs;
  for (const ChunkTime& chunk : chunks) {
    if (chunk.bytes == 0) continue;
    auto job = std::find_if(jobs.begin(), jobs.end(),
                            [&](const Job& known) { return known.name == JobOf(chunk); });
    if (job == jobs.end()) job = jobs.insert(jobs.end(), {.name = JobOf(chunk)});
    ++job->chunks;
    job->exchanges += chunk.exchanges;
    job->bytes += chunk.bytes;
  }
  std::string text;
  for (size_t i = 0; i < std::min(kMostRows, jobs.size()); ++i) {
    const Job& job = jobs[i];
    const uint64_t mean = job.bytes / job.exchanges;
    absl::StrAppend(&text, job.name, ": ", job.chunks, job.chunks == 1 ? " chunk" : " chunks",
                    ", and ", mean, " bytes in a frame, in the mean.");
    if (job.chunks >= kManyChunks && mean < kSmallFrame) {
      absl::StrAppend(&text, " So many and so small cost more for each call than for what is in ",
                      "them: a larger chunk_elements takes less time.");
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string FormatWays(const Summary& summary) {
  Table rows = {{"on the way", "job", "frames", "way in", "way back"}};
  size_t aggregators = 0, workers = 0;
  for (const WayTime& way : summary.ways) {
    if (++(way.is_aggregator ? aggregators : workers) > kMostRows) continue;
    rows.push_back({way.process, JobOf(way), absl::StrCat(way.frames), MeanOf(way.frames, way.in),
                    MeanOf(way.answers, way.back)});
  }
  std::string text = summary.ways.empty() ? "" : Align(rows);
  if (summary.ways_off > absl::ZeroDuration()) {
    absl::StrAppend(&text, "Hosts' clocks differ: give or take ", Milliseconds(summary.ways_off),
                    summary.clocks_drift ? ", or more, as they run at different speeds" : "",
                    ".\n");
  }
  if (summary.ways_unknown > 0) {
    absl::StrAppend(&text, "Ways of ", summary.ways_unknown,
                    " frames and answers are left out: nothing compares their hosts' clocks.\n");
  }
  return text;
}

std::string FormatLost(const LostTime& lost) {
  std::string text = absl::StrCat(lost.process, " has lost no connection");
  if (lost.times > 0) {
    text = absl::StrCat(lost.process, " has lost a connection ", lost.times,
                        lost.times == 1 ? " time, for " : " times, for ", Milliseconds(lost.lost),
                        " together");
  }
  for (const auto& [aggregator, tries] : lost.again) {
    absl::StrAppend(&text, "; sent again to ", aggregator, ": ", tries);
  }
  return text + ".\n";
}

// Of chunks whose rounds nobody has recorded; empty if there are none.
std::string FormatMissing(const std::vector<ChunkTime>& chunks, bool are_overwritten) {
  std::set<std::pair<absl::string_view, uint32_t>> all, missing;  // jobs' chunks
  for (const ChunkTime& chunk : chunks) {
    all.insert({chunk.job, chunk.chunk});
    if (chunk.aggregator.empty()) missing.insert({chunk.job, chunk.chunk});
  }
  if (missing.empty()) return "";
  return absl::StrCat("\nNo recording of an aggregator has rounds of ", missing.size(), " of ",
                      all.size(), " chunks: who was waited for in those is not known. ",
                      are_overwritten ? "They were overwritten, or nobody recorded them.\n"
                                      : "`signpost aggregator --trace DIR` records them.\n");
}

}  // namespace

void StepTime::Add(const StepTime& more) {
  total += more.total;
  outside += more.outside;
  other += more.other;
  compress += more.compress;
  apply += more.apply;
  wire += more.wire;
  wait += more.wait;
  rest += more.rest;
}

Summary Summarise(const Timeline& timeline) {
  Summary summary;
  for (const Process& process : timeline.processes) {
    summary.dropped += process.dropped;
    if (process.dropped > 0 && absl::StartsWith(process.name, "aggregator")) {
      summary.aggregator_dropped = true;
    }
    summary.refused_labels += process.refused_labels;
  }
  const Stages stages(timeline);
  const std::map<WorkerId, WorkerEvents> workers = WorkersOf(timeline);
  // By process and rank: a process may have several, at the same time.
  std::map<std::pair<size_t, uint32_t>, std::vector<Event>> in_signpost;
  for (const auto& [id, events] : workers) {
    std::vector<Event>& all = in_signpost[{std::get<0>(id), std::get<1>(id)}];
    const std::vector<Event> inside = InsideOf(events);
    all.insert(all.end(), inside.begin(), inside.end());
    all.insert(all.end(), events.aside.begin(), events.aside.end());
  }
  std::map<std::pair<size_t, uint32_t>, Times> signposts;
  for (auto& [id, events] : in_signpost) signposts.emplace(id, std::move(events));
  for (const auto& [id, events] : workers) {
    const auto& [process, rank, job] = id;
    for (auto& [stage, worker] : StepsOf(events, signposts.at({process, rank}), stages)) {
      worker.process = timeline.processes[process].name;
      worker.job = std::string(timeline.Label(job));
      worker.stage = std::string(stage);
      worker.rank = rank;
      summary.workers.push_back(std::move(worker));
    }
  }
  const Rounds rounds(timeline, stages);
  summary.delays = rounds.Delays();
  summary.chunks = rounds.Chunks();
  summary.lost = LostOf(timeline, summary.chunks);
  const Ways ways(timeline, stages);
  summary.ways = ways.OfLongestJob();
  summary.ways_off = ways.off();
  summary.ways_unknown = ways.unknown();
  for (const HostClock& host : timeline.hosts) summary.clocks_drift |= host.is_contradictory;
  return summary;
}

std::string Format(const Summary& summary, bool with_steps) {
  std::string text = "Milliseconds; of steps, rounds and exchanges, the mean of one.\n\n";
  absl::StrAppend(&text, FormatWorkers(summary, with_steps));
  const bool has_workers = !summary.workers.empty() ||
                           std::any_of(summary.chunks.begin(), summary.chunks.end(),
                                       [](const ChunkTime& chunk) { return chunk.exchanges > 0; });
  if (!summary.delays.empty()) {
    absl::StrAppend(&text, "\n", FormatDelays(summary.delays, has_workers));
  }
  if (!summary.chunks.empty()) {
    absl::StrAppend(&text, "\n", FormatChunks(summary.chunks), FormatSizes(summary.chunks));
  }
  if (!summary.ways.empty() || summary.ways_unknown > 0) {
    absl::StrAppend(&text, "\n", FormatWays(summary));
  }
  if (!summary.lost.empty()) absl::StrAppend(&text, "\n");
  for (const LostTime& lost : summary.lost) absl::StrAppend(&text, FormatLost(lost));
  absl::StrAppend(&text, FormatMissing(summary.chunks, summary.aggregator_dropped));
  if (summary.dropped > 0) {
    absl::StrAppend(&text, "\n", summary.dropped,
                    " events, the oldest of their processes, are not in the trace; steps that lack "
                    "some are not counted.\n");
  }
  if (summary.refused_labels > 0) {
    absl::StrAppend(&text, "\nProcesses had no room for a name ", summary.refused_labels,
                    " times: what is here of no job is of several.\n");
  }
  return text;
}

}  // namespace signpost::trace
