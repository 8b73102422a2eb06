// Parameters that begin with rank 0's values, as data-parallel training wants them.

#ifndef SIGNPOST_CLIENT_START_VALUES_H_
#define SIGNPOST_CLIENT_START_VALUES_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "worker/onebit_adam.h"
#include "worker/worker.h"

namespace signpost {

// Gives the parameters the values that rank 0 has, on all ranks, which all must call it; by a
// reduction, "<job>/values of rank 0", that adds zeros to them and waits for all ranks, whatever
// the job's round deadline. Zeros lose their sign.
//
// Parameters are on `gpu`, and cross to the host and back; or, if it is null, on the host.
//
// Ends when the epoch that `worker` has joined does, as when a rank is started anew that the others
// wait for here. CANCELLED, with nothing overwritten, if `is_interrupted` when all ranks are there.
// INVALID_ARGUMENT, on all ranks, names a block of rank 0's that is not finite or out of range.
// Otherwise errors as ReductionSession's. On these parameters may have been overwritten.
absl::Status TakeValuesOfRank0(const SessionOptions& options, Worker& worker,
                               absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu);

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_START_VALUES_H_
