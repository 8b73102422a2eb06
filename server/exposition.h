// An aggregator's numbers in words: in Prometheus's text format, and as JSON for the status page.
// docs/operations.md says what each metric means.

#ifndef SIGNPOST_SERVER_EXPOSITION_H_
#define SIGNPOST_SERVER_EXPOSITION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/metrics.h"
#include "server/process_metrics.h"

namespace signpost {

// A job has a series for each of so many ranks at most, where they have series: those that were
// waited for the longest, or the lowest.
inline constexpr size_t kMostRankSeries = 64;

// How a process's connections are protected.
struct SecurityMetrics {
  bool insecure = false;                              // in plain text, beyond loopback
  std::optional<absl::Time> certificate_valid_until;  // with mTLS
  uint64_t denied_calls = 0;                          // that the caller may not make
  uint64_t refused_connections = 0;                   // beyond a limit, or with too many calls
};

// All that one look at an aggregator's process shows.
struct Observation {
  absl::Time time;  // by the system's clock
  AggregatorMetrics aggregator;
  // Of gRPC messages of frames and answers.
  uint64_t message_bytes_received = 0;
  uint64_t message_bytes_sent = 0;
  ProcessMetrics process;
  SecurityMetrics security;
};

// Text format 0.0.4. All metrics of Signpost's have the label shard; names of jobs, which come from
// outside, are escaped.
std::string FormatPrometheus(const Observation& observation);

// One object; server/status_page.html reads it.
std::string FormatStatusJson(const Observation& observation);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_EXPOSITION_H_
