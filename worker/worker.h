// The step pipeline: chunks are compressed, sent, answered and applied as they come, over one
// channel per shard.

#ifndef SIGNPOST_WORKER_WORKER_H_
#define SIGNPOST_WORKER_WORKER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/checkpoint.pb.h"
#include "proto/layout.h"
#include "storage/disk.h"
#include "trace/event.h"
#include "worker/channel.h"
#include "worker/checkpoint_file.h"
#include "worker/chunk_exchanges.h"
#include "worker/chunk_queue.h"
#include "worker/gradient.h"
#include "worker/inbox.h"
#include "worker/onebit_adam.h"
#include "worker/open_step.h"
#include "worker/optimizer.h"
#include "worker/reduction.h"
#include "worker/resume_state.h"
#include "worker/shards.h"
#include "worker/step_report.h"
#include "worker/worker_options.h"

namespace signpost {

class CheckpointDir;
struct CheckpointId;

// Where a worker that resumed goes on from.
struct Resumed {
  std::string checkpoint;             // its subdirectory
  std::vector<std::string> warnings;  // what newer checkpoints were damaged, and how
};

// How a worker came back to a job in the place of one that was lost.
struct Returned {
  uint64_t step = 0;  // from which on it takes part
  // The worker before had an error, which is lost: of at most this Euclidean norm after the last
  // frame that the aggregators had from it. None when they do not know.
  std::optional<double> lost_error_norm;
};

// Not thread-safe. After an error from Step, GradientReady or FinishStep, unless it is
// INVALID_ARGUMENT or says that the call came out of order, the worker can only leave: some chunks
// of the step may have been applied and others not.
class Worker {
 public:
  ~Worker();

  // An aggregator that is started again with its state directory gets what it has lost, in whatever
  // call comes next; nobody else notices.
  //
  // In a job with a round deadline whose rounds go on without this rank, because its process is
  // gone, this worker takes its place: parameters and optimizer state come from the others, who
  // train on, and steps() begins at the step where they are. Its error begins at zero: see
  // returned(). ALREADY_EXISTS when the rank is not gone. `resume_from` is then ignored.
  //
  // Joins the job at every shard that owns chunks; blocks until all ranks have. `channels[s]` leads
  // to shard s. Errors name the aggregator, rank, tensor or option at fault; DEADLINE_EXCEEDED
  // names the ranks that did not come.
  //
  // With a directory of checkpoints in `resume_from` the job goes on from the newest one that is
  // whole: parameters get its values, steps() begins at its step, and everything
  // that follows has the bits that it would have had, on any number of shards. Errors as
  // LoadNewestCheckpoint; on error parameters are untouched. It is the same with the states that
  // all ranks have saved after one step (SaveState); errors as LoadRankState.
  static absl::StatusOr<std::unique_ptr<Worker>> Join(
      const WorkerOptions& options, const OptimizerOptions& optimizer,
      std::vector<Parameter> parameters, std::vector<std::unique_ptr<Channel>> channels,
      const ResumeFrom& resume_from = {});

  // Joins a job that trains nothing and reduces tensors, whose values come with each Reduce; those
  // of `tensors` and their groups are not looked at. As Join otherwise: a rank that comes back to
  // it begins with an error of zero.
  static absl::StatusOr<std::unique_ptr<Worker>> JoinReduction(
      const WorkerOptions& options, const ReductionOptions& reduction,
      std::vector<Parameter> tensors, std::vector<std::unique_ptr<Channel>> channels);

  // Only after JoinReduction. In place: each tensor, values[i] of tensor i's size, becomes its mean
  // or sum over all ranks, the same bytes on all of them; what the codec loses is in errors, for
  // later calls. A chunk of it is NaN on all ranks, and named in the report, when a value on some
  // rank is not finite (or too large: kernels/block.h); what the others had put in is in their
  // errors, or with fp32 dropped.
  //
  // In a job with a round deadline, a call that comes too late for its round gets the newest
  // round's answer, and counts for all of those until then; so loops count by steps(). Its tensors
  // are in this worker's error for the next round, or with fp32 dropped.
  //
  // With a GPU tensors are on it. Errors as Step; the tensors are then partly reduced, but for
  // INVALID_ARGUMENT.
  absl::StatusOr<StepReport> Reduce(absl::Span<const absl::Span<float>> values);

  // With a GPU: calls put their work on this stream of it from now on, behind all that is on the
  // one before, which must be there until then. A step has read all gradients when it returns, but
  // for 0/1 Adam's local ones, which read them in the stream's order; parameters, and what Reduce
  // makes of tensors, are written in that order, perhaps later. The default one at first.
  // INVALID_ARGUMENT, and nothing changes, for a stream of another GPU. Of what has failed steps
  // tell.
  absl::Status SetStream(kernels::cuda::Stream stream) { return optimizer_.SetStream(stream); }

  // One optimizer step on the mean of all workers' gradients. gradients[i] is tensor i's, of its
  // size. In a job with a round deadline it may be several steps: a worker that was late takes
  // those that the others have taken meanwhile, at their rates, so that loops count by steps(). One
  // that the others have left further behind than aggregators keep answers for gets
  // FAILED_PRECONDITION, and so does every step after one that failed. INVALID_ARGUMENT, with
  // nothing sent, for a wrong number or size of gradients or rates. DEADLINE_EXCEEDED names the
  // ranks that are waited for. DATA_LOSS when an aggregator has lost what it had promised to keep,
  // or comes to another result than before.
  absl::StatusOr<StepReport> Step(absl::Span<const Gradient> gradients,
                                  absl::Span<const GroupRates> rates);

  // The same step in parts, with the same bits, so that the exchange overlaps the computation of
  // gradients: BeginStep, GradientReady for each tensor, in any order, FinishStep. Other ranks may
  // have another order, or call Step. A chunk is compressed and sent when all its tensors'
  // gradients are there and the window has room; answers that come before FinishStep are kept, in
  // dense steps as much memory as the parameters', and parameters do not change until then. A round
  // deadline must be longer than the ranks' ways through a step are apart: a frame that is sent
  // first may wait for one that another rank sends last. The exchange timeout counts anew from each
  // of these calls.
  //
  // A step that has begun can only be finished: there is no way back once something was sent.
  // FAILED_PRECONDITION, with nothing changed, for a call out of order: BeginStep, Step or
  // Checkpoint while a step is open, the others while none is, the same tensor twice, and
  // FinishStep while gradients are missing, of which it names one. Other errors as those of Step.
  //
  // A step that begins with a freeze of the variance, or a look at it, waits for the GPU.
  absl::Status BeginStep(absl::Span<const GroupRates> rates);
  // `gradient` must stay valid, and what it is, until FinishStep returns. Does not wait for
  // answers, nor for a GPU, unless a rank that comes back is to have a chunk's state; and to find
  // out why an exchange has failed may take seconds. The exchange timeout counts anew from each
  // call.
  absl::Status GradientReady(size_t tensor, Gradient gradient);
  // What GradientReady does beside: sends what may be sent of an open step, and takes what has
  // come. WorkerOptions::on_news says when there is something. Without an open step it does
  // nothing.
  absl::Status AdvanceStep();
  absl::StatusOr<StepReport> FinishStep();

  // Saves the job as it is after the last step. All ranks must call it after the same step, with
  // the same directory, which all of them see (a shared file system). Returns OK once the
  // checkpoint is committed, on every rank; the newest two in the directory are kept, and those
  // that an interrupted run has left go.
  //
  // On error the checkpoints before stay, and training may go on, but after DATA_LOSS, which is as
  // Step's. FAILED_PRECONDITION after a step that failed, where another run has saved since this
  // one did, so that each would take the other's away, and where the newest checkpoint has other
  // tensors: its job would lose what it has saved. DEADLINE_EXCEEDED names the ranks that were
  // waited for, for the exchange timeout; ABORTED, after half of it, one that is in its next step,
  // where it waits for this one as long. What keeps one rank from saving its part is the error of
  // all, and names it. In a job with a round deadline, ABORTED: at once when a rank has left, after
  // two such deadlines when one is absent or the others have gone on, and ten seconds later when
  // the process of one seems to have ended; which is named. Otherwise the disk's error, or an
  // aggregator's. Not after JoinReduction, and INVALID_ARGUMENT after Leave.
  absl::Status Checkpoint(Disk& directory);

  // This rank's share of what Checkpoint saves, by itself: parameters and optimizer, this worker's
  // error, and those aggregators' errors that it is to give back; 16 bytes for each parameter, 24
  // between 0/1 Adam's synchronisations, and 4 / n more with n workers. Ranks need not call it at
  // the same time, but a job goes on only from states that all ranks have saved after the same
  // step. Errors as Checkpoint's; no rank is waited for. Not after JoinReduction.
  absl::StatusOr<std::string> SaveState();

  // Ends this worker's membership. Returns once every aggregator has all of its rounds for good.
  absl::Status Leave();

  // Whether the next step would fail because other ranks have left, or have begun anew: between
  // steps nothing else tells. May take seconds.
  JobOutlook Outlook() const { return shards_.Outlook(); }
  // As Shards', of all of them.
  absl::Status CheckEpochStands() { return shards_.CheckEpochsStand(shards_.size()); }

  uint64_t steps() const { return steps_; }
  // Whether all ranks have the same parameters: always, but between 0/1 Adam's synchronisations.
  bool is_synchronised() const { return steps_ == optimizer_.StepsBefore(round_); }
  const Layout& layout() const { return layout_; }
  const OneBitAdam& optimizer() const { return *adam_; }                 // not after JoinReduction
  const Reduction& reduction() const { return *reduction_; }             // only after it
  const Resumed& resumed() const { return resumed_; }                    // empty if it started anew
  const std::optional<Returned>& returned() const { return returned_; }  // none if it began the job

  // CRC-32C over all parameters in order: equal on all workers after every step, if
  // is_synchronised. Of nothing, once a GPU has failed.
  uint32_t ParametersCrc32c() const;

 private:
  // When nothing has come for this long, an aggregator that owes us nothing may have been started
  // again, and what others wait for may be frames of ours that it has lost.
  static constexpr absl::Duration kOfferInterval = absl::Milliseconds(500);

  // Its first block that was not packed, or their number.
  struct Packed {
    absl::StatusOr<uint32_t> bad_block;
  };
  using WorkerInbox = Inbox<std::variant<absl::StatusOr<Answer>, Packed>>;

  struct ChunkState;

  // One of `optimizer` and `reduction` is null.
  Worker(const WorkerOptions& options, const OptimizerOptions* optimizer,
         const ReductionOptions* reduction, std::vector<Parameter> parameters,
         std::vector<std::unique_ptr<Channel>> channels, Layout layout);

  // Joins the shards, and gets where the job is.
  absl::Status JoinShards(const JobOptions& job_options, std::optional<ResumeState> state);

  absl::Status JoinShard(uint32_t shard, const JobOptions& job_options, absl::Time deadline,
                         Channel::CheckMayWait check_may_wait);
  // Gets what the others have, once the shards are joined.
  absl::Status ComeBack();
  // Sends the chunk's state, for a rank that comes back.
  void GiveState(uint32_t chunk);
  // Calls what takes a part of a step. That it failed is remembered, as is that an exception ended
  // it: what it leaves behind is neither a whole step nor none.
  absl::Status TakePart(absl::FunctionRef<absl::Status()> part);
  // Begins the open step. Errors as Optimizer::CheckBegun's.
  absl::Status BeginAt(absl::Span<const GroupRates> rates);
  // Of a step that the optimizer has begun.
  void OpenStepWith(absl::Span<const GroupRates> rates);
  // Sends what may be sent of the open step, and takes what has come.
  absl::Status Advance();
  // What is left of the open step, of which all gradients are there; and then the steps that the
  // others have taken meanwhile.
  absl::Status Finish(StepReport& report);
  // Of the open step, which is none any more unless it fails. Adds what happened to `report`.
  absl::Status ExchangeOpenStep(StepReport& report);
  // Once all its answers have been applied.
  absl::Status EndOpenStep(StepReport& report);
  // Takes the open step, which is local.
  absl::Status StepLocally(StepReport& report);
  absl::Status CatchUp(StepReport& report);
  absl::Status CheckStepArguments(absl::Span<const Gradient> gradients,
                                  absl::Span<const GroupRates> rates) const;
  absl::Status CheckGradient(size_t tensor, const Gradient& gradient) const;
  absl::Status CheckRates(absl::Span<const GroupRates> rates) const;
  absl::Status CheckHasNotLeft() const;
  absl::Status CheckNoStepFailed() const;
  // What a call is refused with after a step that failed: marked to be tried again if that is what
  // the failure asks for.
  absl::Status AfterFailure(const std::string& message) const;
  absl::Status CheckNoStepIsOpen() const;
  absl::Status CheckMayWait();  // CANCELLED when it was interrupted
  // DEADLINE_EXCEEDED when a GPU lets this step wait.
  absl::Status CheckGpuIsInTime() const;
  absl::Status CheckCanBeSaved() const;
  bool HoldsAnswers() const;  // of the open step
  enum class Until { kNothingIsThere, kAllAreAnswered };
  // Calls `send` for each chunk that is ready, as the queue allows, and receives answers: those
  // that are there, or all.
  absl::Status ExchangeChunks(ChunkQueue& queue, absl::FunctionRef<void(uint32_t chunk)> send,
                              Until until, StepReport& report);
  // Of a frame of this step.
  FrameHeader HeaderOf(uint32_t chunk, Codec codec) const;
  // DATA_LOSS or FAILED_PRECONDITION if what was saved does not fit the optimizer.
  absl::Status CheckCanResume(const ResumeState& state) const;
  // Goes on from a checkpoint, once the shards are joined.
  absl::Status Resume(ResumeState state);
  // Sends the chunk's frame of the round that restores the aggregators' errors.
  void SendRestore(uint32_t chunk, const ChunkErrors& errors);
  // Of the chunks that this rank saves.
  absl::StatusOr<ChunkErrors> ReadErrors();
  absl::StatusOr<std::vector<float>> ReadError(uint32_t chunk);
  uint32_t CommonCrc32c() const;  // of the values that all ranks have alike
  CheckpointManifest Manifest() const;
  // Without a round deadline, or an answer, an empty one.
  JobStatus AskAboutJob() const;
  // What Checkpoint writes.
  absl::Status SaveRank(CheckpointDir& dir, const CheckpointId& id);
  absl::StatusOr<CheckpointFile> SaveParameters(CheckpointDir& dir, const CheckpointId& id) const;
  // Returns when all ranks' parts are there, on rank 0, and on others when they are committed.
  // Meanwhile others get what they may need of this worker.
  absl::Status AwaitRanks(const CheckpointDir& dir, const CheckpointId& id);
  // Compresses the chunk's contribution to the open step, and sends it; or a GPU compresses it, and
  // the inbox will have it.
  void Pack(uint32_t chunk);
  // Sends the frame of what was packed; `bad_block` is the first that was not, or their number.
  void Send(uint32_t chunk, uint32_t bad_block);
  // Whether it was the answer to a frame of this step.
  absl::StatusOr<bool> Receive(WorkerInbox::Item item, StepReport& report);
  void ApplyAnswer(uint32_t chunk, Answer answer, StepReport& report);
  // Offers the frames of a shard that has lost some, and waits until no exchange is under way, or
  // for a while. After a step that `had_failed`, errors count that say that there is no hope.
  absl::Status OfferAll(uint32_t shard, bool had_failed);
  uint64_t StepsAt(uint32_t shard) const;  // that this worker has had answers of
  absl::Status LeaveShard(uint32_t shard, bool had_failed);
  // Of the current call's exchanges, and of what it waits for.
  void SetDeadline(absl::Duration timeout);
  // For the trace: of the current round, or the current step as a whole.
  trace::Event EventOf(trace::Kind kind, uint32_t chunk) const;
  trace::Event StepEvent(trace::Kind kind) const;

  const WorkerOptions options_;
  const std::vector<Parameter> parameters_;
  const Layout layout_;
  const uint32_t window_;                       // most chunks under way at once
  const std::unique_ptr<OneBitAdam> adam_;      // null after JoinReduction
  const std::unique_ptr<Reduction> reduction_;  // null otherwise
  Optimizer& optimizer_;                        // the one of them that is there
  uint64_t round_ = 0;                          // the next one
  uint64_t steps_ = 0;                          // that were taken
  uint64_t first_step_ = 0;                     // that this worker takes
  Resumed resumed_;
  std::optional<Returned> returned_;
  std::set<std::string> damaged_checkpoints_;  // found when resuming
  bool has_left_ = false;
  absl::Status failure_;                       // of the first step that failed, or DATA_LOSS
  bool was_interrupted_ = false;               // the last step or checkpoint
  uint64_t checkpoint_step_ = 0;               // that Checkpoint was last called after
  uint32_t checkpoint_calls_ = 0;              // so often
  uint32_t rates_crc32c_ = 0;                  // of the current step
  StepRates rates_;                            // likewise; empty in a job without a round deadline
  uint64_t newest_step_ = 0;                   // that another worker has reached
  std::map<uint64_t, StepRates> later_rates_;  // of steps before that
  std::vector<ChunkState> chunks_;
  uint64_t steps_skipped_ = 0;           // in a row, with a skipped round each
  uint64_t sent_bytes_ = 0;              // of payloads, since it joined
  std::unique_ptr<OpenStep> open_step_;  // null between steps
  // Shared with what may still be under way when a failed Step returns.
  std::shared_ptr<WorkerInbox> inbox_;
  Shards shards_;
  ChunkExchanges exchanges_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_WORKER_H_
