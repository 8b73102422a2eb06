#include "cli/status_command.h"

#include <google/protobuf/util/json_util.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/table.h"
#include "proto/exit_code.h"
#include "proto/failure_timeout.h"
#include "proto/steady_time.h"
#include "worker/grpc_channel.h"

namespace signpost::cli {
namespace {

// Names and reasons come from outside, and terminals obey control characters.
std::string Printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

// Unknown when one of those that it is made of is.
std::optional<double> Sum(std::optional<double> a, std::optional<double> b) {
  if (!a || !b) return std::nullopt;
  return *a + *b;
}

std::optional<double> RootOf(std::optional<double> square) {
  if (!square) return std::nullopt;
  return std::sqrt(*square);
}

// As usual as it is to wait for the disk for a moment, it is not worth a look.
constexpr absl::Duration kShownHold = absl::Milliseconds(100);

// A job as all its shards together have it.
struct JobSummary {
  uint64_t step = 0;
  uint32_t world_size = 0;
  std::set<uint32_t> joined;  // at every shard that answered
  std::vector<uint32_t> waiting_for;
  absl::Duration waiting;
  absl::Duration silent;  // at all shards, where nobody is there
  absl::Duration held;    // at the shard that has held it for longest
  std::string held_by;    // that one's address
  uint64_t bytes_received = 0;
  uint64_t bytes_sent = 0;
  uint64_t rounds_closed_late = 0;
  uint64_t rounds_skipped = 0;
  // Unknown if any shard does not say.
  std::optional<double> uncompressed_received = 0.0;  // bytes
  std::optional<double> error_squared = 0.0;
  std::optional<double> momentum_squared = 0.0;
  std::map<uint32_t, std::string> refused;  // reason by rank
  std::set<uint32_t> absent;                // at any shard
  std::set<uint32_t> disconnected;          // from all shards
  std::string state_error;                  // of the first shard that has one
};

// For frames, or for ranks to join.
absl::Duration WaitingOf(const JobStatus& shard) {
  return absl::Microseconds(shard.waiting_us() + shard.joining_us());
}

bool IsFurtherBehind(const JobStatus& shard, const JobSummary& job) {
  if (shard.step() != job.step) return shard.step() < job.step;
  return WaitingOf(shard) > job.waiting;
}

void AddFigures(const JobStatus& shard, JobSummary& job) {
  const auto known = [](bool is_known, double value) {
    return is_known ? std::optional<double>(value) : std::nullopt;
  };
  job.uncompressed_received =
      Sum(job.uncompressed_received,
          known(shard.has_uncompressed_bytes_received(), shard.uncompressed_bytes_received()));
  // Squares of norms add up.
  job.error_squared = Sum(job.error_squared,
                          known(shard.has_error_norm(), shard.error_norm() * shard.error_norm()));
  job.momentum_squared =
      Sum(job.momentum_squared,
          known(shard.has_answer_norm(), shard.answer_norm() * shard.answer_norm()));
}

// Those that every shard has.
void Intersect(const google::protobuf::RepeatedField<uint32_t>& of_shard, bool first,
               std::set<uint32_t>& ranks) {
  const std::set<uint32_t> others(of_shard.begin(), of_shard.end());
  if (first) {
    ranks = others;
  } else {
    std::erase_if(ranks, [&](uint32_t rank) { return !others.contains(rank); });
  }
}

void AddShard(const JobStatus& shard, const std::string& address, bool first, JobSummary& job) {
  if (first || IsFurtherBehind(shard, job)) {
    job.step = shard.step();
    job.waiting_for.assign(shard.waiting_for_ranks().begin(), shard.waiting_for_ranks().end());
    job.waiting = WaitingOf(shard);
  }
  const absl::Duration silent = absl::Microseconds(shard.silent_us());
  job.silent = first ? silent : std::min(job.silent, silent);
  if (const absl::Duration held = absl::Microseconds(shard.held_us()); held > job.held) {
    job.held = held;
    job.held_by = address;
  }
  Intersect(shard.joined_ranks(), first, job.joined);
  Intersect(shard.disconnected_ranks(), first, job.disconnected);
  job.world_size = shard.world_size();
  job.bytes_received += shard.payload_bytes_received();
  job.bytes_sent += shard.payload_bytes_sent();
  job.rounds_closed_late += shard.rounds_closed_late();
  job.rounds_skipped += shard.rounds_skipped();
  AddFigures(shard, job);
  for (const RefusedJoin& refused : shard.refused_joins()) {
    job.refused[refused.rank()] = refused.reason();
  }
  job.absent.insert(shard.absent_ranks().begin(), shard.absent_ranks().end());
  if (job.state_error.empty()) job.state_error = shard.state_error();
}

std::map<std::string, JobSummary> Summarize(const std::vector<AggregatorStatus>& aggregators) {
  std::map<std::string, JobSummary> jobs;
  for (const AggregatorStatus& aggregator : aggregators) {
    if (!aggregator.response.ok()) continue;
    for (const JobStatus& shard : aggregator.response->jobs()) {
      const auto [job, first] = jobs.try_emplace(shard.job());
      AddShard(shard, aggregator.address, first, job->second);
    }
  }
  return jobs;
}

// "rank 3" or "ranks 3, 5".
template <typename Ranks>
std::string FormatRanks(const Ranks& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string FormatWaiting(const JobSummary& job) {
  std::vector<std::string> waiting;
  const auto add = [&](const std::string& what, absl::Duration time) {
    waiting.push_back(absl::StrFormat("%s for %.1f s", what, absl::ToDoubleSeconds(time)));
  };
  if (!job.waiting_for.empty()) add(FormatRanks(job.waiting_for), job.waiting);
  if (job.held >= kShownHold) add(absl::StrCat("the disk of ", job.held_by), job.held);
  return waiting.empty() ? "nobody" : absl::StrJoin(waiting, ", ");
}

constexpr char kUnknown[] = "-";

std::string FormatNumber(std::optional<double> number) {
  return number && std::isfinite(*number) ? absl::StrFormat("%.3g", *number) : kUnknown;
}

// Of the frames that came since `before`, or of all if none did.
std::string FormatCompression(const JobSummary& job, const JobSummary& before) {
  if (!job.uncompressed_received || *job.uncompressed_received == 0) return kUnknown;
  const bool any_since = before.uncompressed_received &&
                         *job.uncompressed_received > *before.uncompressed_received &&
                         job.bytes_received > before.bytes_received;
  const JobSummary none;
  const JobSummary& since = any_since ? before : none;
  return absl::StrCat(FormatNumber((*job.uncompressed_received - *since.uncompressed_received) /
                                   (job.bytes_received - since.bytes_received)),
                      "x");
}

using Cells = std::vector<std::string>;
using Rows = std::vector<Cells>;

// What the status page has, too, by the same names; an aggregator may not know it.
Cells FigureNames() { return {"COMPRESSION", "ERROR NORM", "MOMENTUM NORM"}; }

Cells FiguresOf(const JobSummary& job, const JobSummary& before) {
  return {FormatCompression(job, before), FormatNumber(RootOf(job.error_squared)),
          FormatNumber(RootOf(job.momentum_squared))};
}

Cells Row(Cells cells, const Cells& figures, const Cells& last) {
  cells.insert(cells.end(), figures.begin(), figures.end());
  cells.insert(cells.end(), last.begin(), last.end());
  return cells;
}

// Those that are known of no job.
void RemoveUnknownFigures(Rows& rows) {
  for (const std::string& figure : FigureNames()) {
    const size_t column = absl::c_find(rows.front(), figure) - rows.front().begin();
    const bool is_known = std::any_of(rows.begin() + 1, rows.end(), [column](const Cells& row) {
      return row[column] != kUnknown;
    });
    if (is_known) continue;
    for (Cells& row : rows) row.erase(row.begin() + column);
  }
}

std::string Quote(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted.push_back(c);
    }
  }
  quoted.push_back('"');
  return quoted;
}

// 64-bit numbers are strings, as protobuf has it.
std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  return status.ok() ? json : Quote(status.ToString());
}

std::string FormatNotes(const std::map<std::string, JobSummary>& jobs,
                        const std::vector<AggregatorStatus>& aggregators) {
  std::string notes;
  for (const auto& [given_name, job] : jobs) {
    const std::string name = Printable(given_name);
    for (const auto& [rank, reason] : job.refused) {
      absl::StrAppend(&notes, "job ", name, " refused rank ", rank, ": ", Printable(reason), "\n");
    }
    if (!job.disconnected.empty()) {
      absl::StrAppend(&notes, "job ", name, " has no connection to ", FormatRanks(job.disconnected),
                      ": gone, or to connect again when there is something to send\n");
    }
    // They may be frozen, or cut off.
    if (const absl::Duration silent = absl::Trunc(job.silent, absl::Seconds(1));
        silent > absl::ZeroDuration()) {
      absl::StrAppend(&notes, "job ", name,
                      " has no connection to anybody, and nothing has come for ",
                      absl::FormatDuration(silent),
                      "; `signpost aggregator --forget-after` says when it is forgotten\n");
    }
    if (!job.absent.empty()) {
      absl::StrAppend(&notes, "job ", name, " goes on without ", FormatRanks(job.absent), "\n");
    }
    if (!job.state_error.empty()) {
      absl::StrAppend(&notes, "job ", name, " cannot be written down: ", Printable(job.state_error),
                      "\n");
    }
  }
  for (const AggregatorStatus& aggregator : aggregators) {
    if (aggregator.response.ok()) {
      for (const std::string& warning : aggregator.response->warnings()) {
        absl::StrAppend(&notes, "aggregator ", aggregator.address,
                        " warned when it was started: ", warning, "\n");
      }
      continue;
    }
    absl::StrAppend(&notes, "no answer from aggregator ", aggregator.address, ": ",
                    aggregator.response.status().message(), "\n");
  }
  return notes;
}

std::string FormatTable(const Rows& rows, const std::string& notes) {
  const bool has_jobs = rows.size() > 1;
  if (!has_jobs && notes.empty()) return "no jobs\n";
  return absl::StrCat(has_jobs ? Align(rows) : "", notes);
}

// Counters that went back are those of another run.
bool GoesOnFrom(const JobSummary& before, const JobSummary& job) {
  return job.step >= before.step && job.bytes_received >= before.bytes_received &&
         job.bytes_sent >= before.bytes_sent &&
         job.rounds_closed_late >= before.rounds_closed_late &&
         job.rounds_skipped >= before.rounds_skipped;
}

bool SameAnswer(const std::vector<AggregatorStatus>& a, const std::vector<AggregatorStatus>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const AggregatorStatus& one, const AggregatorStatus& other) {
                      return one.response.ok() == other.response.ok();
                    });
}

struct Flags {
  std::string aggregators;
  TransportSecurity security;
  absl::Duration timeout = absl::Seconds(5);
  bool json = false;
  bool watch = false;
  absl::Duration interval = absl::Seconds(1);
};

// Those to ask. They stay connected.
class Aggregators {
 public:
  Aggregators(const std::vector<std::string>& addresses,
              const std::shared_ptr<const ClientSecurity>& security) {
    request_.set_job(security->JobToAskAbout());
    for (const std::string& address : addresses) {
      connected_.push_back({address, ConnectToAggregator(address, FailureTimeout(),
                                                         /*on_connection=*/nullptr, security)});
    }
  }

  // All at once: one that does not answer takes no time from the others.
  std::vector<AggregatorStatus> Ask(absl::Duration timeout);

 private:
  struct Connected {
    std::string address;
    std::unique_ptr<Channel> channel;
  };
  StatusRequest request_;
  std::vector<Connected> connected_;
};

std::vector<AggregatorStatus> Aggregators::Ask(absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  std::vector<std::future<AggregatorStatus>> asked;
  for (const Connected& one : connected_) {
    asked.push_back(std::async(std::launch::async, [this, &one, deadline] {
      return AggregatorStatus{one.address, one.channel->Status(request_, deadline)};
    }));
  }
  std::vector<AggregatorStatus> answered;
  for (std::future<AggregatorStatus>& status : asked) answered.push_back(status.get());
  return answered;
}

// Until the process is told to end.
[[noreturn]] void Watch(Aggregators& aggregators, const Flags& flags) {
  for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, [](int) { _exit(kExitOk); });
  const bool is_terminal = isatty(STDOUT_FILENO) != 0;
  std::vector<AggregatorStatus> before;
  std::chrono::steady_clock::time_point asked_before;
  if (is_terminal) std::fputs("\x1b[2J", stdout);
  while (true) {
    // Aggregators go on while this process is stopped.
    const auto asked = std::chrono::steady_clock::now();
    std::vector<AggregatorStatus> now = aggregators.Ask(flags.timeout);
    const std::string page =
        absl::StrCat(absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone()), "\n",
                     FormatWatchTable(before, now, absl::FromChrono(asked - asked_before)));
    // Over the page before, line by line, so that nothing flickers.
    std::fputs(is_terminal ? absl::StrCat("\x1b[H", absl::StrReplaceAll(page, {{"\n", "\x1b[K\n"}}),
                                          "\x1b[J")
                                 .c_str()
                           : page.c_str(),
               stdout);
    std::fflush(stdout);
    before = std::move(now);
    asked_before = asked;
    absl::SleepFor(flags.interval - absl::FromChrono(std::chrono::steady_clock::now() - asked));
  }
}

absl::StatusOr<int> ShowStatus(const Flags& flags) {
  if (flags.aggregators.empty()) {
    return absl::InvalidArgumentError(
        "no aggregators: give --aggregators HOST:PORT,HOST:PORT... or set SIGNPOST_AGGREGATORS");
  }
  const absl::StatusOr<std::vector<std::string>> addresses = ParseAddresses(flags.aggregators);
  if (!addresses.ok()) return addresses.status();

  if (flags.interval < absl::Milliseconds(100)) {
    return absl::InvalidArgumentError("--interval is less than 100ms");
  }
  const auto security = ClientSecurity::Open(flags.security, *addresses, PrintWarning);
  if (!security.ok()) return security.status();
  Aggregators asked(*addresses, *security);
  if (flags.watch) Watch(asked, flags);
  const std::vector<AggregatorStatus> aggregators = asked.Ask(flags.timeout);
  absl::Status error;  // the first
  for (const AggregatorStatus& aggregator : aggregators) {
    error.Update(aggregator.response.status());
  }
  const std::string text =
      flags.json ? FormatStatusJson(aggregators) : FormatStatusTable(aggregators);
  std::fputs(text.c_str(), stdout);
  // One that does not answer in time cannot be reached, whatever stands in the way.
  return absl::IsDeadlineExceeded(error) ? kExitUnreachable : ExitCodeOf(error);
}

}  // namespace

std::string FormatStatusTable(const std::vector<AggregatorStatus>& aggregators) {
  const std::map<std::string, JobSummary> jobs = Summarize(aggregators);
  Rows rows = {Row({"JOB", "STEP", "JOINED", "WAITING FOR", "RECEIVED", "SENT"}, FigureNames(),
                   {"REFUSED"})};
  for (const auto& [name, job] : jobs) {
    rows.push_back(Row({Printable(name), absl::StrCat(job.step),
                        absl::StrCat(job.joined.size(), "/", job.world_size), FormatWaiting(job),
                        FormatBytes(job.bytes_received), FormatBytes(job.bytes_sent)},
                       FiguresOf(job, /*before=*/JobSummary()),
                       {absl::StrCat(job.refused.size())}));
  }
  RemoveUnknownFigures(rows);
  return FormatTable(rows, FormatNotes(jobs, aggregators));
}

std::string FormatWatchTable(const std::vector<AggregatorStatus>& before,
                             const std::vector<AggregatorStatus>& now, absl::Duration elapsed) {
  const std::map<std::string, JobSummary> jobs = Summarize(now);
  const std::map<std::string, JobSummary> jobs_before = Summarize(before);
  const double seconds = absl::ToDoubleSeconds(elapsed);
  Rows rows = {Row({"JOB", "STEP", "STEPS/s", "JOINED", "WAITING FOR", "RECEIVED/s", "SENT/s"},
                   FigureNames(), {"LATE", "SKIPPED"})};
  for (const auto& [name, job] : jobs) {
    const auto found = jobs_before.find(name);
    const bool can_tell =
        found != jobs_before.end() && SameAnswer(before, now) && GoesOnFrom(found->second, job);
    const JobSummary& old = can_tell ? found->second : job;
    const auto rate = [&](uint64_t then, uint64_t now) {
      return can_tell ? FormatBytes(std::lround((now - then) / seconds)) : kUnknown;
    };
    const auto more = [&](uint64_t then, uint64_t now) {
      return can_tell ? absl::StrCat(now - then) : kUnknown;
    };
    rows.push_back(
        Row({Printable(name), absl::StrCat(job.step),
             can_tell ? absl::StrFormat("%.1f", (job.step - old.step) / seconds) : kUnknown,
             absl::StrCat(job.joined.size(), "/", job.world_size), FormatWaiting(job),
             rate(old.bytes_received, job.bytes_received), rate(old.bytes_sent, job.bytes_sent)},
            FiguresOf(job, old),
            {more(old.rounds_closed_late, job.rounds_closed_late),
             more(old.rounds_skipped, job.rounds_skipped)}));
  }
  RemoveUnknownFigures(rows);
  return FormatTable(rows, FormatNotes(jobs, now));
}

std::string FormatStatusJson(const std::vector<AggregatorStatus>& aggregators) {
  std::vector<std::string> entries;
  for (const AggregatorStatus& aggregator : aggregators) {
    const std::string outcome =
        aggregator.response.ok()
            ? absl::StrCat("\"status\": ", ToJson(*aggregator.response))
            : absl::StrCat("\"error\": ", Quote(aggregator.response.status().message()));
    entries.push_back(
        absl::StrCat("  {\"address\": ", Quote(aggregator.address), ", ", outcome, "}"));
  }
  return absl::StrCat("{\"aggregators\": [\n", absl::StrJoin(entries, ",\n"), "\n]}\n");
}

Command AddStatusCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "status", "Ask aggregators what they are doing and whom they wait for");
  app.footer(
      "Of each job: its step, who has joined, which rank or which aggregator's disk it waits for\n"
      "and since when, the bytes of its frames, how many times as many fp32 would take\n"
      "(COMPRESSION), the norms of error and momentum once they are known, and whose join was\n"
      "refused. Where nodes have a worker each, a rank here is a node. Exit code 69 if an\n"
      "aggregator does not answer.\n\n"
      "With --watch again and again, until Ctrl-C, with steps and bytes in each second, and how\n"
      "many rounds were late or skipped since the last look.\n\n"
      "Example:\n"
      "  signpost status --aggregators 10.0.0.1:4000,10.0.0.2:4000");
  app.add_option("--aggregators", flags->aggregators, "Aggregators to ask, separated by commas")
      ->type_name("HOST:PORT,...")
      ->envname("SIGNPOST_AGGREGATORS");
  AddClientSecurityFlags(app, flags->security);
  CLI::Option* json = app.add_flag("--json", flags->json,
                                   "Write JSON, for programs: each aggregator's answer as it is");
  CLI::Option* watch =
      app.add_flag("--watch", flags->watch, "Look again and again, until Ctrl-C")->excludes(json);
  AddDurationFlag(app, "--interval", flags->interval, "How often to look, with --watch [1s]")
      ->needs(watch);
  AddDurationFlag(app, "--timeout", flags->timeout, "How long to wait for the answers [5s]");
  return {&app, [flags] { return ShowStatus(*flags); }};
}

}  // namespace signpost::cli
