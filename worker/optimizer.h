// The arithmetic around an exchange: makes the numbers that a worker contributes to a round, and
// takes in those that the round's answer brings. What the step pipeline (worker.h) asks of whoever
// does that.

#ifndef SIGNPOST_WORKER_OPTIMIZER_H_
#define SIGNPOST_WORKER_OPTIMIZER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "proto/frame.h"
#include "proto/payload.h"

namespace signpost {

struct GroupRates;

// Not thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Starts step `step`, the one after the last. `rates` has an entry for each group.
  virtual void BeginStep(uint64_t step, absl::Span<const GroupRates> rates) = 0;
  virtual uint32_t groups() const = 0;    // entries that steps need of their rates
  virtual Codec codec() const = 0;        // how this step's frames are encoded
  virtual float error_scale() const = 0;  // for this step's FrameHeader

  // Writes the chunk's contribution to `payload` (Layout::PayloadBytes) and its compression error
  // to this worker's error. gradients[i] belongs to tensor i. Returns the number of blocks packed:
  // the chunk's, unless the input of a block was not finite; that block and all behind it are then
  // untouched.
  virtual uint32_t Compress(uint32_t chunk, absl::Span<const absl::Span<const float>> gradients,
                            uint8_t* payload) = 0;

  // Takes in a round's answer, in this step's codec.
  virtual void Apply(uint32_t chunk, Answer answer) = 0;

  // The round did not count: what Compress packed goes back into the error.
  virtual void TakeBack(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) = 0;

  // The round counted, but without what Compress packed (the worker was late): its whole input goes
  // into the error. Before Apply of the answer.
  virtual void KeepInput(uint32_t chunk, const uint8_t* payload, uint32_t blocks_packed) = 0;

  // For a worker that comes back to a job: what is the same on all workers, as STATE's payload.
  // Sign and payload of every number stay what they are.
  virtual Payload State(uint32_t chunk) const = 0;
  // Takes it over. `state` has the size of the chunk's State.
  virtual void SetState(uint32_t chunk, absl::Span<const uint8_t> state) = 0;
  // As if the steps before had been taken, but for what State has: BeginStep(step) comes next.
  virtual void Seek(uint64_t step) = 0;
  virtual bool has_frozen() const = 0;  // the variance, in a step of its own
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_OPTIMIZER_H_
