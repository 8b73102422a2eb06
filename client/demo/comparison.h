// Two runs of the same job side by side, and the figures that compare them.

#ifndef SIGNPOST_CLIENT_DEMO_COMPARISON_H_
#define SIGNPOST_CLIENT_DEMO_COMPARISON_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/demo/worker_result.h"

namespace signpost::demo {

// One result per worker, in rank order.
using RunResults = std::vector<WorkerResult>;

// The same job trained with both optimizers.
struct Comparison {
  RunResults adam;
  RunResults onebit;
};

// INVALID_ARGUMENT, saying what does not fit, unless both runs have all their workers in rank order
// and equal parameter counts, steps and worlds, only 1-bit Adam had one-bit steps, and both have a
// loss curve.
absl::Status CheckComparison(const Comparison& comparison);

// Bytes of the worker that had most of them, each way.
WireBytes MostBytes(const RunResults& run);
WireBytes MostOneBitBytes(const RunResults& run);

// What fp32 costs, 32 bits per parameter and step each way, over `bytes` for as many steps.
double RatioToFp32(const WireBytes& bytes, uint64_t parameters, uint64_t steps);

// Bits per parameter and step.
double BitsPerParameter(uint64_t bytes, uint64_t parameters, uint64_t steps);

// Whether all workers ended with equal parameters.
bool ReplicasIdentical(const RunResults& run);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_COMPARISON_H_
