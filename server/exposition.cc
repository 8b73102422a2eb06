#include "server/exposition.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "proto/version.h"

namespace signpost {
namespace {

constexpr char kCounter[] = "counter";
constexpr char kGauge[] = "gauge";
constexpr char kHistogram[] = "histogram";

// The shortest decimal that is this double.
std::string FormatNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Inf" : "+Inf";
  char digits[32];
  return std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

double Timestamp(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

struct Label {
  absl::string_view name;
  std::string value;
};
using Labels = std::initializer_list<Label>;

// The samples of one metric, with its description in front if there are any.
class Samples {
 public:
  Samples(std::string& text, absl::string_view name, absl::string_view type, absl::string_view help)
      : text_(text), name_(name), type_(type), help_(help) {}

  // Common to the samples that follow.
  void SetLabels(Labels labels) { common_ = Format(labels); }

  void Add(Labels labels, double value) { AddLine("", Format(labels), value); }
  void Add(double value) { Add({}, value); }

  void Add(Labels labels, const DurationHistogram& histogram) {
    const std::string own = Format(labels);
    for (size_t i = 0; i < DurationHistogram::kBounds.size(); ++i) {
      const std::string bound = absl::StrFormat("%g", DurationHistogram::kBounds[i]);
      AddLine("_bucket", absl::StrCat(own, Format({{"le", bound}})), histogram.count_up_to(i));
    }
    AddLine("_bucket", absl::StrCat(own, Format({{"le", "+Inf"}})), histogram.count());
    AddLine("_sum", own, histogram.sum_seconds());
    AddLine("_count", own, histogram.count());
  }

 private:
  // name="value", each with a comma behind it.
  static std::string Format(Labels labels) {
    std::string text;
    for (const Label& label : labels) {
      const std::string escaped =
          absl::StrReplaceAll(label.value, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
      absl::StrAppend(&text, label.name, "=\"", escaped, "\",");
    }
    return text;
  }

  void AddLine(absl::string_view suffix, absl::string_view labels, double value) {
    if (!std::exchange(is_described_, true)) {
      absl::StrAppend(&text_, "# HELP ", name_, " ", help_, "\n# TYPE ", name_, " ", type_, "\n");
    }
    std::string all = absl::StrCat(common_, labels);
    if (!all.empty()) all.back() = '}';
    absl::StrAppend(&text_, name_, suffix, all.empty() ? "" : "{", all, " ", FormatNumber(value),
                    "\n");
  }

  std::string& text_;
  const absl::string_view name_;
  const absl::string_view type_;
  const absl::string_view help_;
  std::string common_;
  bool is_described_ = false;
};

// Those of which there are series, ascending.
std::vector<uint32_t> WorstStragglers(const std::vector<double>& seconds) {
  std::vector<uint32_t> ranks(seconds.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (ranks.size() <= kMostRankSeries) return ranks;
  std::partial_sort(ranks.begin(), ranks.begin() + kMostRankSeries, ranks.end(),
                    [&](uint32_t a, uint32_t b) {
                      return seconds[a] != seconds[b] ? seconds[a] > seconds[b] : a < b;
                    });
  ranks.resize(kMostRankSeries);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// What of a job one metric shows.
struct JobMetric {
  const char* name;
  const char* type;
  const char* help;
  void (*add)(const JobMetrics& job, Samples& samples);
};

constexpr JobMetric kJobMetrics[] = {
    {"signpost_job_parameters", kGauge, "Parameters of the whole job, over all shards.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.parameters()); }},
    {"signpost_job_chunks", kGauge, "Chunks of the job that this shard owns.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.chunks()); }},
    {"signpost_job_workers", kGauge, "Ranks that the job has: its world size.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.world_size()); }},
    {"signpost_job_joined_workers", kGauge, "Ranks that have joined and not left.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.joined_ranks_size()); }},
    {"signpost_job_absent_workers", kGauge,
     "Ranks that rounds no longer wait for: late ones of which nothing came since, or that left.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.absent_ranks_size()); }},
    {"signpost_job_disconnected_workers", kGauge,
     "Ranks that have joined and not left, and have no connection to this shard.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add(job.status.disconnected_ranks_size());
     }},
    {"signpost_job_refused_workers", kGauge,
     "Ranks of which an attempt to join was refused since the job began.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.refused_joins_size()); }},
    {"signpost_job_step", kGauge, "Step of the chunk that is furthest behind.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.status.step()); }},
    {"signpost_job_waiting_seconds", kGauge,
     "How long the oldest frame of that step has waited for those of others; 0: none waits.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add(absl::ToDoubleSeconds(absl::Microseconds(job.status.waiting_us())));
     }},
    {"signpost_job_waiting_for", kGauge, "1 for a rank that is waited for, to join or to send.",
     [](const JobMetrics& job, Samples& samples) {
       const auto& ranks = job.status.waiting_for_ranks();
       const int count = std::min<int>(ranks.size(), kMostRankSeries);
       for (int i = 0; i < count; ++i) samples.Add({{"rank", absl::StrCat(ranks[i])}}, 1);
     }},
    {"signpost_job_held_seconds", kGauge,
     "How long the oldest round of which all frames are there, or the Joins, have waited for the "
     "aggregator's disk; 0: none does.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add(absl::ToDoubleSeconds(absl::Microseconds(job.status.held_us())));
     }},
    {"signpost_round_seconds", kHistogram,
     "Time that rounds of single chunks took: to gather the frames from the first to the last, to "
     "hold the round until what must survive a crash does, and to average.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add({{"phase", "gather"}}, job.rounds.gathering);
       samples.Add({{"phase", "hold"}}, job.rounds.holding);
       samples.Add({{"phase", "average"}}, job.rounds.averaging);
     }},
    {"signpost_rounds_total", kCounter,
     "Rounds of single chunks that closed: in full, partially, that is without some rank, replayed "
     "after a restart, or skipped because a gradient was not finite.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add({{"result", "full"}}, job.rounds.rounds_full);
       samples.Add({{"result", "partial"}}, job.rounds.rounds_partial);
       samples.Add({{"result", "replayed"}}, job.rounds.rounds_replayed);
       samples.Add({{"result", "skipped"}}, job.rounds.rounds_skipped);
     }},
    {"signpost_error_rescales_total", kCounter,
     "Rounds of single chunks before which the error was multiplied, if it was only zeros too, or "
     "dropped, because what is compressed went from gradients to momenta: at the freeze. Again "
     "when "
     "a restart replays them.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.rounds.errors_rescaled); }},
    {"signpost_replay_requests_total", kCounter,
     "Frames that were answered with a request for earlier ones, after a restart.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.rounds.replays_asked); }},
    {"signpost_straggler_seconds_total", kCounter,
     "Time that rounds of single chunks were gathered because of this rank, counted as they close; "
     "while several were missing each has an equal share, and who was absent as they began, or had "
     "left, has one only where nobody else was missing.",
     [](const JobMetrics& job, Samples& samples) {
       for (const uint32_t rank : WorstStragglers(job.rounds.straggler_seconds)) {
         samples.Add({{"rank", absl::StrCat(rank)}}, job.rounds.straggler_seconds[rank]);
       }
     }},
    {"signpost_payload_bytes_total", kCounter,
     "Bytes of the payloads of frames and answers, resends included.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add({{"direction", "received"}}, job.rounds.payload_bytes_received);
       samples.Add({{"direction", "sent"}}, job.rounds.payload_bytes_sent);
     }},
    {"signpost_uncompressed_bytes_total", kCounter,
     "What payloads with numbers would have had in fp32.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add({{"direction", "received"}}, job.rounds.float32_bytes_received);
       samples.Add({{"direction", "sent"}}, job.rounds.float32_bytes_sent);
     }},
    {"signpost_retained_bytes", kGauge,
     "Memory of the job: frames of open rounds, answers that a rank may need again, and errors.",
     [](const JobMetrics& job, Samples& samples) {
       samples.Add({{"kind", "frames"}}, job.retained.open_frames);
       samples.Add({{"kind", "answers"}}, job.retained.answers);
       samples.Add({{"kind", "error"}}, job.retained.error);
     }},
    {"signpost_undurable_bytes", kGauge,
     "Bytes of frames that each worker keeps because a crash would need them again.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.retained.undurable); }},
    {"signpost_error_norm", kGauge,
     "2-norm of the errors that this shard keeps, from a sample of large chunks.",
     [](const JobMetrics& job, Samples& samples) { samples.Add(job.norms.error_norm()); }},
    {"signpost_answer_norm", kGauge,
     "2-norm of the shard's newest answers, the mean momentum; missing while any is not one-bit.",
     [](const JobMetrics& job, Samples& samples) {
       if (job.norms.answer_squared) samples.Add(*job.norms.answer_norm());
     }},
    {"signpost_snapshot_seconds", kHistogram, "How long snapshots took that succeeded.",
     [](const JobMetrics& job, Samples& samples) {
       if (job.snapshots) samples.Add({}, job.snapshots->durations);
     }},
    {"signpost_snapshot_running_seconds", kGauge,
     "For how long the snapshot that is under way has been; 0: none is.",
     [](const JobMetrics& job, Samples& samples) {
       if (!job.snapshots) return;
       samples.Add(absl::ToDoubleSeconds(absl::Microseconds(job.status.snapshot_us())));
     }},
    {"signpost_snapshot_failures_total", kCounter, "Snapshots that failed.",
     [](const JobMetrics& job, Samples& samples) {
       if (job.snapshots) samples.Add(job.snapshots->failures);
     }},
    {"signpost_snapshot_last_success_timestamp_seconds", kGauge,
     "When this process last wrote a snapshot of the job.",
     [](const JobMetrics& job, Samples& samples) {
       if (job.snapshots && job.snapshots->last) samples.Add(Timestamp(*job.snapshots->last));
     }},
    {"signpost_state_failing", kGauge,
     "1 while the job cannot be written down, and rounds will stop for it.",
     [](const JobMetrics& job, Samples& samples) {
       if (job.snapshots) samples.Add(!job.status.state_error().empty());
     }},
};

void AddProcess(const ProcessMetrics& process, std::string& text) {
  Samples(text, "process_cpu_seconds_total", kCounter, "CPU time, user and system.")
      .Add(process.cpu_seconds);
  Samples(text, "process_resident_memory_bytes", kGauge, "Memory that is resident.")
      .Add(process.resident_bytes);
  Samples(text, "process_virtual_memory_bytes", kGauge, "Memory that is mapped.")
      .Add(process.virtual_bytes);
  Samples(text, "process_open_fds", kGauge, "File descriptors that are open.")
      .Add(process.open_fds);
  Samples(text, "process_max_fds", kGauge, "File descriptors that may be open.")
      .Add(process.max_fds);
  Samples(text, "process_threads", kGauge, "Threads.").Add(process.threads);
  Samples(text, "process_start_time_seconds", kGauge, "When the process was started.")
      .Add(Timestamp(process.started));
}

void AddShard(const Observation& observation, const std::string& shard, std::string& text) {
  const AggregatorMetrics& aggregator = observation.aggregator;
  Samples(text, "signpost_build_info", kGauge, "1, with the version.")
      .Add({{"shard", shard}, {"version", kVersion}}, 1);
  Samples(text, "signpost_shards", kGauge, "Aggregators that jobs here are sharded over.")
      .Add({{"shard", shard}}, aggregator.shard_count);
  Samples(text, "signpost_generation", kGauge,
          "Grows each time the state directory is served; 0: there is none.")
      .Add({{"shard", shard}}, aggregator.generation);
  Samples(text, "signpost_jobs", kGauge, "Jobs that are here.")
      .Add({{"shard", shard}}, aggregator.jobs.size());
  Samples messages(text, "signpost_message_bytes_total", kCounter,
                   "Bytes of gRPC messages with frames and answers, headers included, "
                   "without what HTTP/2, TLS and TCP add.");
  messages.SetLabels({{"shard", shard}});
  messages.Add({{"direction", "received"}}, observation.message_bytes_received);
  messages.Add({{"direction", "sent"}}, observation.message_bytes_sent);
  const SecurityMetrics& security = observation.security;
  Samples(text, "signpost_insecure_plain_text", kGauge,
          "1 while other hosts may connect in plain text.")
      .Add({{"shard", shard}}, security.insecure);
  Samples certificate(text, "signpost_tls_certificate_expiry_timestamp_seconds", kGauge,
                      "Until when the certificate in use is valid; missing without mTLS.");
  if (security.certificate_valid_until) {
    certificate.Add({{"shard", shard}}, Timestamp(*security.certificate_valid_until));
  }
  Samples(text, "signpost_denied_calls_total", kCounter, "Calls that their caller may not make.")
      .Add({{"shard", shard}}, security.denied_calls);
  Samples(text, "signpost_refused_connections_total", kCounter,
          "Connections that were closed at once, beyond a limit, or ended for their calls.")
      .Add({{"shard", shard}}, security.refused_connections);
}

// JSON.

std::string Quote(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
      continue;
    }
    if (c == '"' || c == '\\') quoted.push_back('\\');
    quoted.push_back(c);
  }
  quoted.push_back('"');
  return quoted;
}

struct Member {
  absl::string_view name;
  std::string json;
};

std::string Object(std::initializer_list<Member> members) {
  return absl::StrCat("{",
                      absl::StrJoin(members, ",",
                                    [](std::string* out, const Member& member) {
                                      absl::StrAppend(out, Quote(member.name), ":", member.json);
                                    }),
                      "}");
}

std::string Number(double value) { return std::isfinite(value) ? FormatNumber(value) : "null"; }

template <typename Ranks>
std::string Array(const Ranks& ranks) {
  return absl::StrCat("[", absl::StrJoin(ranks, ","), "]");
}

std::string Directions(uint64_t received, uint64_t sent) {
  return Object({{"received", Number(received)}, {"sent", Number(sent)}});
}

std::string StragglersJson(const std::vector<double>& seconds) {
  std::vector<std::string> entries;
  for (const uint32_t rank : WorstStragglers(seconds)) {
    entries.push_back(absl::StrCat(Quote(absl::StrCat(rank)), ":", Number(seconds[rank])));
  }
  return absl::StrCat("{", absl::StrJoin(entries, ","), "}");
}

std::string SnapshotJson(const JobMetrics& job, absl::Time now) {
  if (!job.snapshots) return "null";
  const std::optional<absl::Time>& last = job.snapshots->last;
  return Object({{"age_seconds", last ? Number(absl::ToDoubleSeconds(now - *last)) : "null"},
                 {"running_seconds", Number(job.status.snapshot_us() / 1e6)},
                 {"failures", Number(job.snapshots->failures)},
                 {"error", Quote(job.status.state_error())}});
}

std::string JobJson(const JobMetrics& job, absl::Time now) {
  const JobStatus& status = job.status;
  const RoundMetrics& rounds = job.rounds;
  return Object(
      {{"job", Quote(status.job())},
       {"parameters", Number(status.parameters())},
       {"chunks", Number(status.chunks())},
       {"step", Number(status.step())},
       {"workers", Number(status.world_size())},
       {"joined", Number(status.joined_ranks_size())},
       {"absent", Array(status.absent_ranks())},
       {"disconnected", Array(status.disconnected_ranks())},
       {"refused", Number(status.refused_joins_size())},
       {"waiting_for", Array(status.waiting_for_ranks())},
       {"waiting_seconds", Number((status.waiting_us() + status.joining_us()) / 1e6)},
       {"held_seconds", Number(status.held_us() / 1e6)},
       {"rounds", Object({{"full", Number(rounds.rounds_full)},
                          {"partial", Number(rounds.rounds_partial)},
                          {"replayed", Number(rounds.rounds_replayed)},
                          {"skipped", Number(rounds.rounds_skipped)}})},
       {"seconds", Object({{"gather", Number(rounds.gathering.sum_seconds())},
                           {"hold", Number(rounds.holding.sum_seconds())},
                           {"average", Number(rounds.averaging.sum_seconds())}})},
       {"straggler_seconds", StragglersJson(rounds.straggler_seconds)},
       {"payload_bytes", Directions(rounds.payload_bytes_received, rounds.payload_bytes_sent)},
       {"uncompressed_bytes", Directions(rounds.float32_bytes_received, rounds.float32_bytes_sent)},
       {"retained_bytes", Object({{"frames", Number(job.retained.open_frames)},
                                  {"answers", Number(job.retained.answers)},
                                  {"error", Number(job.retained.error)},
                                  {"undurable", Number(job.retained.undurable)}})},
       {"error_norm", Number(job.norms.error_norm())},
       {"answer_norm", job.norms.answer_squared ? Number(*job.norms.answer_norm()) : "null"},
       {"snapshot", SnapshotJson(job, now)}});
}

std::string SecurityJson(const SecurityMetrics& security) {
  return Object(
      {{"insecure", security.insecure ? "true" : "false"},
       {"certificate_valid_until", security.certificate_valid_until
                                       ? Number(Timestamp(*security.certificate_valid_until))
                                       : "null"},
       {"denied_calls", Number(security.denied_calls)},
       {"refused_connections", Number(security.refused_connections)}});
}

}  // namespace

std::string FormatPrometheus(const Observation& observation) {
  std::string text;
  const std::string shard = absl::StrCat(observation.aggregator.shard);
  AddShard(observation, shard, text);
  for (const JobMetric& metric : kJobMetrics) {
    Samples samples(text, metric.name, metric.type, metric.help);
    for (const JobMetrics& job : observation.aggregator.jobs) {
      samples.SetLabels({{"shard", shard}, {"job_name", job.status.job()}});
      metric.add(job, samples);
    }
  }
  AddProcess(observation.process, text);
  return text;
}

std::string FormatStatusJson(const Observation& observation) {
  const AggregatorMetrics& aggregator = observation.aggregator;
  const auto job_json = [&](std::string* out, const JobMetrics& job) {
    absl::StrAppend(out, JobJson(job, observation.time));
  };
  const ProcessMetrics& process = observation.process;
  return absl::StrCat(
      Object({{"version", Quote(kVersion)},
              {"time", Number(Timestamp(observation.time))},
              {"started", Number(Timestamp(process.started))},
              {"shard", Number(aggregator.shard)},
              {"shard_count", Number(aggregator.shard_count)},
              {"generation", Number(aggregator.generation)},
              {"message_bytes",
               Directions(observation.message_bytes_received, observation.message_bytes_sent)},
              {"resident_bytes", Number(process.resident_bytes)},
              {"cpu_seconds", Number(process.cpu_seconds)},
              {"security", SecurityJson(observation.security)},
              {"jobs", absl::StrCat("[", absl::StrJoin(aggregator.jobs, ",", job_json), "]")}}),
      "\n");
}

}  // namespace signpost
