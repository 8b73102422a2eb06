// What a step was like.

#ifndef SIGNPOST_WORKER_STEP_REPORT_H_
#define SIGNPOST_WORKER_STEP_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/aggregator.pb.h"

namespace signpost {

// A round that all workers skipped because one worker's input was not finite. Or, of this rank, a
// block that its local step left alone (0/1 Adam): a GPU's may come with a later step's report, at
// the latest with that of the round that ends the interval.
struct SkippedRound {
  uint32_t rank = 0;  // the lowest rank at fault
  std::string block;  // Layout::DescribeBlock
};

struct StepReport {
  uint64_t step = 0;  // the last one that was taken
  // Steps that were taken before it in the same call, without a gradient, because the others had
  // gone on without this worker.
  uint64_t steps_caught_up = 0;
  // Rounds, of one chunk each, that closed without this worker's frame. What was in it is in this
  // worker's error, for later rounds.
  uint32_t late_rounds = 0;
  std::vector<uint32_t> late_ranks;  // without whose frame some round closed, ascending
  Codec codec = CODEC_UNSPECIFIED;   // none: it was a local step
  absl::Duration kernels;  // compressing and applying; on a GPU what the worker waits for of it
  absl::Duration wire;     // blocked on transfer and aggregation
  absl::Duration wait;     // blocked because another worker's frame was late
  std::vector<SkippedRound> skipped;
  uint32_t restarted_aggregators = 0;  // that were found to have gone back to an earlier state
  uint64_t replayed_frames = 0;        // sent again to them
  uint64_t kept_bytes = 0;             // of frames that aggregators may ask for, after the step
  // Of payloads that this worker has sent, once each, by parameter and step since it joined.
  double sent_bits = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_STEP_REPORT_H_
