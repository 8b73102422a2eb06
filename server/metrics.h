// What an aggregator counts of its jobs, as it is at one moment: plain numbers. exposition.h says
// them in words, docs/operations.md what they are good for.

#ifndef SIGNPOST_SERVER_METRICS_H_
#define SIGNPOST_SERVER_METRICS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/aggregator.pb.h"

namespace signpost {

// How long something took, by buckets. Not thread-safe.
class DurationHistogram {
 public:
  // The buckets' upper ends in seconds, which belong to them; one more has what is above.
  static constexpr std::array<double, 13> kBounds = {0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1,
                                                     0.3,    1,      3,     10,    30,   100};

  // Less than none counts as none.
  void Add(absl::Duration duration);
  void Merge(const DurationHistogram& other);

  uint64_t count() const;
  double sum_seconds() const { return sum_seconds_; }
  // Of those up to kBounds[bucket].
  uint64_t count_up_to(size_t bucket) const;

 private:
  std::array<uint64_t, kBounds.size() + 1> counts_ = {};
  double sum_seconds_ = 0;
};

// When the ranks' frames came to a round, and so for whom it was gathered that long. Not
// thread-safe.
class FrameArrivals {
 public:
  // What a round that does without a rank knows of it: absent is who was so when it began. Those
  // that come first here are waited for first.
  enum class Away { kNot, kAbsent, kForGood };

  // With the first frame.
  FrameArrivals(uint32_t world_size, absl::Time begin);

  // The rank's frame is there; or, if it is away, or only late, the round is to close without it.
  // Times that go back, as they do when they are taken before a lock is, count as the one before.
  void Add(uint32_t rank, absl::Time now, Away away = Away::kNot);
  // It takes that back, and is missing until its next frame is there, as if this had not come.
  void Remove(uint32_t rank);

  // From the first frame to the last, or until nobody was waited for any more.
  absl::Duration gathering() const { return newest_ - begin_; }
  // Adds to each rank's seconds what it has of that: each moment belongs, in equal parts, to the
  // ranks that are missing then: to those that are not away, to the absent ones only when all
  // others are here, and to who is away for good when those are here too. Requires that all ranks
  // have been added.
  void AddShares(std::vector<double>& seconds) const;

 private:
  struct Arrival {
    uint32_t rank;
    absl::Time time;
    Away away;
  };
  absl::Time begin_;
  absl::Time newest_;
  std::vector<Arrival> arrivals_;  // by their times; of each rank one at most
};

// Of the rounds of a chunk, or of several, that this process has closed, and of their frames. A
// resend's payload counts again.
struct RoundMetrics {
  DurationHistogram gathering;  // from a round's first frame on, until nobody's is missing
  DurationHistogram holding;    // from then on, until what must survive a crash first does
  DurationHistogram averaging;  // the arithmetic
  // Each round is one of these, the first that fits.
  uint64_t rounds_skipped = 0;   // counted for nobody: a gradient was not finite
  uint64_t rounds_replayed = 0;  // an earlier process had closed it
  uint64_t rounds_partial = 0;   // without some rank
  uint64_t rounds_full = 0;
  uint64_t errors_rescaled = 0;  // rounds before which the error was multiplied (Round::Close)
  uint64_t replays_asked = 0;    // of frames, after a restart
  uint64_t payload_bytes_received = 0;
  uint64_t payload_bytes_sent = 0;
  // What payloads with numbers would have in fp32.
  uint64_t float32_bytes_received = 0;
  uint64_t float32_bytes_sent = 0;
  // By rank: how long rounds were gathered because of it, as FrameArrivals shares it. All of them
  // add up to `gathering`.
  std::vector<double> straggler_seconds;

  // As many ranks as there are here, or none here.
  void Merge(const RoundMetrics& other);
};

// What a job has in an aggregator's memory, in bytes of payloads and errors; and, with
// `undurable`, what each of its workers keeps because it would be needed after a crash.
struct RetainedBytes {
  uint64_t open_frames = 0;
  uint64_t answers = 0;
  uint64_t error = 0;
  uint64_t undurable = 0;
};

// Squares of 2-norms over all chunks of a shard.
struct NormMetrics {
  // Of the aggregator's error. Of large chunks a sample is taken, in another place for each step.
  double error_squared = 0;
  // Of the newest answers, while all of them are in one bit: of the mean momentum, then.
  std::optional<double> answer_squared = 0.0;

  double error_norm() const;
  std::optional<double> answer_norm() const;
};

struct SnapshotMetrics {
  DurationHistogram durations;  // of those that succeeded
  uint64_t failures = 0;
  std::optional<absl::Time> last = {};  // that succeeded, by the system's clock

  void Add(const absl::Status& outcome, absl::Duration duration);
};

struct JobMetrics {
  JobStatus status;
  RoundMetrics rounds;
  RetainedBytes retained;
  NormMetrics norms;
  std::optional<SnapshotMetrics> snapshots;  // with a state directory
};

struct AggregatorMetrics {
  uint32_t shard = 0;
  uint32_t shard_count = 1;
  uint64_t generation = 0;       // grows each time the state directory is served; 0: there is none
  std::vector<JobMetrics> jobs;  // by name
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_METRICS_H_
