// The arithmetic around an exchange: makes the numbers that a worker contributes to a round, and
// takes in those that the round's answer brings. What the step pipeline (worker.h) asks of whoever
// does that.

#ifndef SIGNPOST_WORKER_OPTIMIZER_H_
#define SIGNPOST_WORKER_OPTIMIZER_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/types_cuda.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/payload.h"
#include "worker/gradient.h"
#include "worker/optimizer_state.h"

namespace signpost {

struct GroupRates;

// The first block of a chunk whose gradient a local step had to leave alone.
struct BlockLeftAlone {
  uint32_t chunk;
  uint32_t block;
};

// Not thread-safe. A step has a round, unless it is local; where this file counts by the step it
// means those that have one, and their rounds.
class Optimizer {
 public:
  // Gets what Compress returns, once the payload is there; or why it will not be.
  using Later = absl::AnyInvocable<void(absl::StatusOr<uint32_t>)>;

  virtual ~Optimizer() = default;

  // OK, or what has failed for good: on a GPU, where work goes on after calls return, any of them
  // may find out. Then nothing here is worth anything.
  virtual absl::Status Check() const { return absl::OkStatus(); }
  // OK, or why BeginStep has failed: nothing of the step may be sent.
  virtual absl::Status CheckBegun() const { return absl::OkStatus(); }
  // On a GPU: calls put their work on this stream from now on, behind all that is on the one
  // before. INVALID_ARGUMENT, and nothing changes, for one that is not this GPU's.
  virtual absl::Status SetStream(kernels::cuda::Stream) { return absl::OkStatus(); }

  // Starts step `step`, the one after the last, or a local one before it. `rates` passed
  // CheckRates, and has an entry for each group.
  virtual void BeginStep(uint64_t step, absl::Span<const GroupRates> rates) = 0;
  // Starts it where the others have closed its round already, with their rates; local steps before
  // it are left out.
  virtual void BeginMissedStep(uint64_t step, const StepRates& rates) = 0;
  // Whether the step that has begun is local: StepLocally then takes the place of Compress and
  // Apply, for each chunk.
  virtual bool IsLocal() const { return false; }
  virtual void StepLocally(uint32_t chunk, absl::Span<const Gradient> gradients) {}
  // Since the last call. On a GPU, where a local step is not waited for, those of the last ones may
  // be missing, until a round has ended.
  virtual std::vector<BlockLeftAlone> TakeBlocksLeftAlone() { return {}; }
  // How many steps there are before that round, local ones included.
  virtual uint64_t StepsBefore(uint64_t step) const { return step; }
  // INVALID_ARGUMENT that names the group and the rate.
  virtual absl::Status CheckRates(absl::Span<const GroupRates> rates) const = 0;
  virtual uint32_t groups() const = 0;           // entries that steps need of their rates
  virtual Codec codec() const = 0;               // how this step's frames are encoded
  virtual float error_scale() const = 0;         // for this step's FrameHeader
  virtual float loss_unit() const { return 0; }  // likewise

  // INVALID_ARGUMENT for one that is of another type, or elsewhere, than this optimizer's.
  virtual absl::Status CheckGradient(const Gradient& gradient) const = 0;

  // Whether it could compress another chunk now; otherwise when `later` has been called for one.
  virtual bool CanCompress() const { return true; }
  // Writes the chunk's contribution to `payload` (Layout::PayloadBytes) and its compression error
  // to this worker's error. gradients[i] belongs to tensor i. Blocks whose input is not finite are
  // not packed (kernels/block.h); returns the first of them, or the number of the chunk's blocks.
  // Or nothing: then `later` gets it, as a rule from another thread, and until then, or until this
  // optimizer goes, `payload` and the gradients must stay. Requires CanCompress.
  virtual std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                           uint8_t* payload, Later later) = 0;

  // Takes in a round's answer, in this step's codec.
  virtual void Apply(uint32_t chunk, Answer answer) = 0;

  // The round did not count: what Compress packed goes back into the error. The payload is null if
  // it was not called.
  virtual void TakeBack(uint32_t chunk, const uint8_t* payload) = 0;

  // The round counted, but without what Compress packed (the worker was late): its whole input goes
  // into the error. Before Apply of the answer.
  virtual void KeepInput(uint32_t chunk, const uint8_t* payload) = 0;

  // All chunks' answers of the step have been applied, or taken back: does what needs all of a
  // tensor. On a GPU it may wait.
  virtual void EndStep() {}
  // Whether it does anything: until then a chunk that has its answer, or was skipped, is in the
  // state before no step.
  virtual bool EndsSteps() const { return false; }

  // Whether the chunk has local steps, of an interval that has not ended for it: then there is no
  // state that others could go on from.
  virtual bool HasLocalSteps(uint32_t chunk) const { return false; }
  // For a worker that comes back to a job: what is the same on all workers, as STATE's payload.
  // Sign and payload of every number stay what they are.
  virtual Payload State(uint32_t chunk) const = 0;
  // Takes it over. `state` has the size of the chunk's State.
  virtual void SetState(uint32_t chunk, absl::Span<const uint8_t> state) = 0;
  // What the steps so far have made of it, that of the last BeginStep included.
  virtual const Schedule& schedule() const = 0;
  // Takes over another worker's, of the next step or the one before.
  virtual void SetSchedule(Schedule schedule) = 0;
  // As BeginStep, for one chunk, of a step that others have taken: with their rates, schedule and
  // scales. Not where FreezesBefore.
  virtual void FollowStep(uint64_t step, const StepRates& rates) = 0;
  // Whether the step begins with something that needs all chunks: a chunk by itself cannot follow.
  virtual bool FreezesBefore(uint64_t step) const = 0;
  // Whether that has been done.
  virtual bool HasFrozenFor(uint64_t step) const = 0;
  // What is known of the chunk's tensors, or of all, as a whole. A worker that follows the chunk
  // gets them with the next step.
  virtual TensorScales ScalesOf(uint32_t chunk) const { return {}; }
  virtual TensorScales Scales() const { return {}; }
  // As EndStep, for one chunk that has followed `step`, with the rates that it had and, of the
  // chunk's tensors at least, the scales after it. Nothing unless EndsSteps.
  virtual void EndFollowedStep(uint32_t chunk, uint64_t step, const StepRates& rates,
                               const TensorScales& after) {}
  // Takes over another worker's, as EndStep and EndFollowedStep change them.
  virtual void SetScales(const TensorScales& scales) {}
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_OPTIMIZER_H_
