#include "server/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/time/clock.h"

namespace signpost {

void DurationHistogram::Add(absl::Duration duration) {
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(duration));
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  ++counts_[bound - kBounds.begin()];
  sum_seconds_ += seconds;
}

void DurationHistogram::Merge(const DurationHistogram& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  sum_seconds_ += other.sum_seconds_;
}

uint64_t DurationHistogram::count() const {
  return std::accumulate(counts_.begin(), counts_.end(), uint64_t{0});
}

uint64_t DurationHistogram::count_up_to(size_t bucket) const {
  return std::accumulate(counts_.begin(), counts_.begin() + bucket + 1, uint64_t{0});
}

void RoundMetrics::Merge(const RoundMetrics& other) {
  gathering.Merge(other.gathering);
  holding.Merge(other.holding);
  averaging.Merge(other.averaging);
  rounds_skipped += other.rounds_skipped;
  rounds_replayed += other.rounds_replayed;
  rounds_partial += other.rounds_partial;
  rounds_full += other.rounds_full;
  errors_rescaled += other.errors_rescaled;
  replays_asked += other.replays_asked;
  payload_bytes_received += other.payload_bytes_received;
  payload_bytes_sent += other.payload_bytes_sent;
  float32_bytes_received += other.float32_bytes_received;
  float32_bytes_sent += other.float32_bytes_sent;
  straggler_seconds.resize(other.straggler_seconds.size());
  for (size_t rank = 0; rank < other.straggler_seconds.size(); ++rank) {
    straggler_seconds[rank] += other.straggler_seconds[rank];
  }
}

double NormMetrics::error_norm() const { return std::sqrt(error_squared); }

std::optional<double> NormMetrics::answer_norm() const {
  if (!answer_squared) return std::nullopt;
  return std::sqrt(*answer_squared);
}

void SnapshotMetrics::Add(const absl::Status& outcome, absl::Duration duration) {
  if (!outcome.ok()) {
    ++failures;
    return;
  }
  durations.Add(duration);
  last = absl::Now();
}

}  // namespace signpost
