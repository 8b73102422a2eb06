// What one worker of a training run has to tell about it, and the file in which it does.

#ifndef SIGNPOST_CLIENT_DEMO_WORKER_RESULT_H_
#define SIGNPOST_CLIENT_DEMO_WORKER_RESULT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/wire_bytes.h"

namespace signpost::demo {

// A point of the loss curve; bits per byte.
struct CurvePoint {
  uint64_t step = 0;  // steps done
  double training_bpb = 0;
  double validation_bpb = 0;
};

struct WorkerResult {
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint64_t parameters = 0;
  uint64_t steps = 0;
  uint64_t one_bit_steps = 0;      // of the steps: those that sent one bit
  double seconds = 0;              // from the first step to the last, validation included
  uint32_t parameters_crc32c = 0;  // of the parameters after the last step
  WireBytes wire;                  // of all steps since it joined, measured
  WireBytes one_bit_wire;          // of the one-bit steps
  double validation = 0;           // after the last step, in bits per byte; rank 0 only
  std::vector<CurvePoint> curve;   // rank 0 only
};

// The file is text: a line per figure, "name value", and last the line "end".
std::string FormatResult(const WorkerResult& result);

// INVALID_ARGUMENT that says which figure is missing or not a number.
absl::StatusOr<WorkerResult> ParseResult(absl::string_view text);

absl::Status WriteResult(const WorkerResult& result, const std::string& path);

// Errors name the file.
absl::StatusOr<WorkerResult> ReadResult(const std::string& path);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_WORKER_RESULT_H_
