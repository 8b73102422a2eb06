// Where the time of a trace's steps has gone: the answer to "why is it slow".

#ifndef SIGNPOST_TRACE_SUMMARY_H_
#define SIGNPOST_TRACE_SUMMARY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "trace/timeline.h"

namespace signpost::trace {

// Of one step, or of several. All but `total` add up to `total`.
struct StepTime {
  absl::Duration total;     // since the end of the step before
  absl::Duration outside;   // the model's: nothing of Signpost's was running
  absl::Duration other;     // Signpost's, and not this job's step: checkpoints, joins, other jobs
  absl::Duration compress;  // and what else is done to frames before they are sent
  absl::Duration apply;     // and what is done once all chunks are there
  absl::Duration wire;
  absl::Duration wait;
  absl::Duration rest;  // in Signpost, and none of these

  void Add(const StepTime& more);
};

// A worker's steps of one stage of a job, of which all is recorded.
struct WorkerSteps {
  std::string process;
  std::string job;
  // Which codec was sent, or "local" if nothing was; empty if all steps of the job are alike. Dense
  // steps take many times as long as one-bit ones.
  std::string stage;
  uint32_t rank = 0;
  std::vector<uint64_t> steps;  // their numbers
  // By step: its round, of which exchanges have the number. None if it had none, or no part of the
  // step is recorded.
  std::vector<std::optional<uint64_t>> rounds;
  std::vector<StepTime> times;  // by step
  StepTime sum;
};

struct RankDelay {
  std::string job;
  bool is_node = false;  // the rank is a node's: its worker speaks for several processes
  uint32_t rank = 0;
  uint64_t last = 0;  // rounds for which it came last, or that closed without it
  // Its share of the time that rounds were gathered: each moment belongs to the ranks that are
  // missing then, in equal parts, as the metrics have it.
  absl::Duration gathered;
  absl::Duration waited;  // its share, likewise, of how long workers were blocked
};

struct ChunkTime {
  std::string job;
  std::string stage;       // as WorkerSteps
  std::string aggregator;  // the process that has its rounds; empty if it recorded none
  uint32_t chunk = 0;
  uint64_t rounds = 0;  // that are recorded, as exchanges are
  uint64_t exchanges = 0;
  uint64_t bytes = 0;       // of all frames' payloads
  absl::Duration exchange;  // of one frame, in the mean over all ranks
  absl::Duration gather;    // of one round, in the mean
  absl::Duration hold;
  absl::Duration average;
};

// Between all workers and one aggregator, or one worker and all aggregators. The way in is from a
// frame's sending until an aggregator takes it into its round, the way back likewise. Frames that
// were sent again, or whose exchange failed, are left out: their time is an outage's.
struct WayTime {
  std::string job;
  std::string stage;  // as WorkerSteps
  std::string process;
  bool is_aggregator = false;
  uint64_t frames = 0;
  uint64_t answers = 0;
  absl::Duration in;  // of one frame, in the mean
  absl::Duration back;
};

// Of one process's connections.
struct LostTime {
  std::string process;
  uint64_t times = 0;
  absl::Duration lost;
  std::map<std::string, uint64_t> again;  // how often it sent frames again, by aggregator
};

struct Summary {
  std::vector<WorkerSteps> workers;
  std::vector<RankDelay> delays;  // the longest first
  std::vector<ChunkTime> chunks;  // likewise, all their exchanges together
  // Of the job, and its stage, that was longest on its way; aggregators first, and the longest of
  // each.
  std::vector<WayTime> ways;
  absl::Duration ways_off;     // by that much at most, because hosts have clocks of their own
  bool clocks_drift = false;   // or by more, as those run at different speeds
  uint64_t ways_unknown = 0;   // frames and answers between hosts whose clocks nothing compares
  std::vector<LostTime> lost;  // of those that lost some, or sent again
  uint64_t dropped = 0;        // events that the trace lacks
  bool aggregator_dropped = false;  // an aggregator's are among those
  uint64_t refused_labels = 0;      // how often a name did not fit, and an event has none
};

Summary Summarise(const Timeline& timeline);

// For a person: tables, with the steps one by one if `with_steps`.
std::string Format(const Summary& summary, bool with_steps);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_SUMMARY_H_
