// Sums of many values, in double and in an order that vectors, threads and GPUs can follow.
//
// The values are cut into runs of kSumRun; the last may be short. In a run, value i is added to
// lane i mod kSumLanes, in increasing i, and the lanes are folded in halves, as those of a block
// (block.h). The runs' sums are summed in the same way, until one is left. Thread-safe.

#ifndef SIGNPOST_KERNELS_SUM_H_
#define SIGNPOST_KERNELS_SUM_H_

#include <cstddef>

#include "absl/types/span.h"

namespace signpost::kernels {

inline constexpr size_t kSumRun = 4096;

// 0 for none.
double Sum(absl::Span<const float> values);

// Of value * value, which a double holds exactly: the square of the values' Euclidean norm.
double SumOfSquares(absl::Span<const float> values);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_SUM_H_
