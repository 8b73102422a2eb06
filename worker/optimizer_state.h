// What an optimizer is between two steps, as checkpoints and saved states have it.

#ifndef SIGNPOST_WORKER_OPTIMIZER_STATE_H_
#define SIGNPOST_WORKER_OPTIMIZER_STATE_H_

#include <vector>

#include "proto/aggregator.pb.h"

namespace signpost {

using TensorScales = google::protobuf::RepeatedPtrField<TensorScale>;

// All that an optimizer remembers between two steps, parameters apart. Vectors are in layout order.
struct OptimizerState {
  Schedule schedule;            // its begun_steps is the next step
  std::vector<float> error;     // this worker's; the rest is the same on all workers
  std::vector<float> momentum;  // dense
  std::vector<float> variance;  // as OneBitAdam::variance
  // Of 1-bit LAMB; otherwise, or before its freeze step, empty.
  std::vector<float> fresh_variance;
  TensorScales scales;
  // Of 0/1 Adam between two synchronisations, otherwise empty: the parameters after the last one,
  // which are the same on all workers, and this one's sum. The momentum is this worker's, too.
  std::vector<float> anchor;
  std::vector<float> local_sum;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_OPTIMIZER_STATE_H_
