#include "server/metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "absl/algorithm/container.h"
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

FrameArrivals::FrameArrivals(uint32_t world_size, absl::Time begin)
    : begin_(begin), newest_(begin) {
  arrivals_.reserve(world_size);
}

void FrameArrivals::Add(uint32_t rank, absl::Time now, Away away) {
  newest_ = std::max(newest_, now);
  arrivals_.push_back({rank, newest_, away});
}

void FrameArrivals::Remove(uint32_t rank) {
  std::erase_if(arrivals_, [rank](const Arrival& arrival) { return arrival.rank == rank; });
}

void FrameArrivals::AddShares(std::vector<double>& seconds) const {
  struct Group {
    size_t missing = 0;
    double of_each = 0;  // seconds of the time so far that each of the missing answers for
  };
  std::array<Group, 3> groups;
  const auto group_of = [&](const Arrival& arrival) -> Group& {
    return groups[static_cast<size_t>(arrival.away)];
  };
  for (const Arrival& arrival : arrivals_) ++group_of(arrival).missing;
  absl::Time before = begin_;
  for (const Arrival& arrival : arrivals_) {
    Group& waited_for =
        *absl::c_find_if(groups, [](const Group& group) { return group.missing > 0; });
    waited_for.of_each += absl::ToDoubleSeconds(arrival.time - before) / waited_for.missing;
    before = arrival.time;
    seconds[arrival.rank] += group_of(arrival).of_each;
    --group_of(arrival).missing;
  }
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
