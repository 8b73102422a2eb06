// Signpost's C++ SDK: a training job's connection to its aggregators.
//
//   auto session = Session::Join(*SessionOptions::FromEnvironment(), {.freeze_step = 400},
//   parameters); for (...) {
//     ComputeGradients(...);
//     auto report = (*session)->Step(gradients, {{.learning_rate = 1e-3}});
//   }
//   (*session)->Leave();
//
// After every step the parameters are byte-identical on all workers, but between 0/1 Adam's
// synchronisations.

#ifndef SIGNPOST_CLIENT_SESSION_H_
#define SIGNPOST_CLIENT_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/owner.h"
#include "client/session_options.h"
#include "kernels/types_cuda.h"
#include "proto/codec.h"
#include "worker/gradient.h"
#include "worker/onebit_adam.h"
#include "worker/wire_bytes.h"
#include "worker/worker.h"

namespace signpost {

// Has the optimizer train these parameters as DeepSpeed's of that name does, to compare with:
// docs/algorithms.md. It has neither bias_correction nor variance_floor, gamma is 1, and a block is
// as long as the largest tensor, so that each tensor has one scale; one of more than
// kMaxBlockElements has one for each so many. What these options were is lost, and chunk_elements,
// unless it is 0, becomes whole blocks. Large blocks take long: each is compressed by one thread.
void SetAsDeepSpeed(absl::Span<const Parameter> parameters, SessionOptions& session,
                    OptimizerOptions& optimizer);

// One worker's membership in a job. It is of the process that has joined: a fork of that must call
// nothing of it but owner(), nor destroy it.
//
// Threads: one call at a time. While one is under way, another thread's call returns
// FAILED_PRECONDITION, which names both, and changes nothing. steps(), is_synchronised() and
// wire_bytes() then return what they did before it. ParametersCrc32c() and the destructor wait.
class Session {
 public:
  // Without leaving.
  virtual ~Session() = default;

  // Connects, and blocks until all ranks have joined. Parameters' memory must outlive the session,
  // and must hold the same values on all ranks, or get rank 0's (start_from_rank_0: then zeros lose
  // their sign, and INVALID_ARGUMENT names what is not finite); with `resume` it gets those of the
  // checkpoint, the first step to take is steps(), and what follows has the bits that it would have
  // had without the end of the job. In a job with a round deadline it may come in the place of a
  // worker that is gone (returned()): parameters and the optimizer's state then come from the
  // others, who train on. Errors as Worker::Join; INVALID_ARGUMENT too in a fork of a process that
  // had a session or reduction then.
  //
  // With options.node this process attaches to the worker of its node instead of being one:
  // node/attached_session.h says what differs.
  //
  // With options.gpu parameters are on that GPU, and what was put on any of its streams to make
  // them must be done; INVALID_ARGUMENT when it cannot be used, RESOURCE_EXHAUSTED when 12 bytes
  // for each parameter (with 1-bit LAMB 16, with 0/1 Adam 20; with options.node none), and some,
  // are not free on it. Every call is then made with the same bits as on a host, where others of
  // the job may be.
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options,
                                                       const OptimizerOptions& optimizer,
                                                       std::vector<Parameter> parameters);

  // With a GPU: later calls put their work on this stream, behind all that is on the one before,
  // which must be there until then. A step has read all gradients when it returns, but for 0/1
  // Adam's local ones, which read them in the stream's order; parameters are written in that order,
  // perhaps later. The default one at first. INVALID_ARGUMENT, and nothing changes, for a stream of
  // another GPU. Of what has failed steps tell.
  virtual absl::Status SetStream(kernels::cuda::Stream stream) = 0;

  // One optimizer step on the mean of all workers' gradients, as Worker::Step: after one that
  // failed, but for INVALID_ARGUMENT, parameters may be partly stepped, and the session can only
  // leave. gradients[i] belongs to parameter i and is only read during the call.
  virtual absl::StatusOr<StepReport> Step(absl::Span<const Gradient> gradients,
                                          absl::Span<const GroupRates> rates) = 0;

  // The same step in parts, so that the exchange overlaps the computation of gradients: begin,
  // each parameter's gradient as soon as it is there, finish. Parameters change in FinishStep only,
  // until which gradients must stay. The same bits as Step, and errors as Worker's.
  virtual absl::Status BeginStep(absl::Span<const GroupRates> rates) = 0;
  virtual absl::Status GradientReady(size_t parameter, Gradient gradient) = 0;
  virtual absl::StatusOr<StepReport> FinishStep() = 0;

  // Saves the job as it is after the last step: what Join can `resume` from, workers' and
  // aggregators' errors included. Every rank must call it after the same step with the same
  // directory, which all of them see (a shared file system) and which belongs to this job; it is
  // created if need be. Returns once the checkpoint is committed, on every rank; the newest two are
  // kept. Errors as Worker::Checkpoint, naming the directory; the checkpoints before stay, and
  // training may go on, but after DATA_LOSS.
  virtual absl::Status Checkpoint(const std::string& directory) = 0;

  // This rank's share of such a checkpoint, as bytes to be kept wherever the program keeps things:
  // 16 bytes for each parameter (with 1-bit LAMB 20, with 0/1 Adam between two synchronisations
  // 24), and 4 / n more with n workers. Once all ranks have saved theirs after the same step, a job
  // goes on from them (SessionOptions::resume_state, each rank with its own) as from a checkpoint;
  // no rank waits for another. Errors as Worker::SaveState.
  virtual absl::StatusOr<std::string> SaveState() = 0;

  // Ends this worker's membership. Without it the aggregators keep the job until it has been idle
  // for long.
  virtual absl::Status Leave() = 0;

  virtual uint64_t steps() const = 0;  // done, before a resume included
  // Whether all workers have the same parameters: always, but between 0/1 Adam's synchronisations.
  virtual bool is_synchronised() const = 0;
  // Which checkpoint it goes on from, and what newer ones were damaged; empty if it started anew.
  virtual const Resumed& resumed() const = 0;
  // Where this worker came back to a job that had gone on without its rank; none if it did not.
  virtual const std::optional<Returned>& returned() const = 0;
  virtual uint64_t elements() const = 0;  // of all parameters
  virtual uint32_t ParametersCrc32c() const = 0;

  // Since Join, as the kernel counted them on this process's sockets to the aggregators: those of
  // other sessions with the same aggregators are in it, and what a connection that broke has
  // carried since the step before is not.
  virtual WireBytes wire_bytes() = 0;

  const Owner& owner() const { return owner_; }

 private:
  const Owner owner_;
};

// The steps that are in the newest committed checkpoint of a directory, from which `resume` would
// go on if it is whole. NOT_FOUND: there is none, or no such directory. DATA_LOSS: all are damaged.
// Otherwise the file system's errors.
absl::StatusOr<uint64_t> CheckpointStep(const std::string& directory);

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_SESSION_H_
