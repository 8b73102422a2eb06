// How a worker that comes back to a running job gets what the others have.

#ifndef SIGNPOST_WORKER_REPLICA_FETCH_H_
#define SIGNPOST_WORKER_REPLICA_FETCH_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/channel.h"
#include "worker/clock.h"
#include "worker/kept_frames.h"
#include "worker/onebit_adam.h"

namespace signpost {

struct ReplicaSource {
  std::vector<Channel*> channel_of_chunk;
  // Without step and codec.
  std::function<FrameHeader(uint32_t chunk)> header_of;
  Clock* clock;
  absl::Duration timeout;   // of each exchange
  uint32_t window;          // most chunks of an aggregator whose state is under way at once
  uint64_t least_step = 0;  // not to return an earlier one
};

struct Replica {
  uint64_t step = 0;  // the optimizer's next
  // By chunk: the LISTEN of each round that was followed since its state came, and that was not
  // known to be durable, with what came of it.
  std::vector<std::vector<SentFrame>> followed;
};

// Gets parameters, momentum and variance of each chunk from whichever worker gives them, follows
// the rounds of the chunks it has while the others come, and brings all of them to the same step.
// The others train on meanwhile; memory is that of the optimizer and of `window` chunks' states
// of each aggregator. The error stays as it is.
//
// On error the optimizer and the parameters are spoilt. DEADLINE_EXCEEDED, which says what that may
// mean, when no worker gives a state in the time; FAILED_PRECONDITION, after several attempts, when
// the others are so fast that answers are gone before they are asked for; otherwise the
// aggregator's error, which names it.
absl::StatusOr<Replica> FetchReplica(const ReplicaSource& source, const Layout& layout,
                                     Optimizer& optimizer);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_REPLICA_FETCH_H_
