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
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "log/log.h"
#include "proto/checkpoint.pb.h"
#include "proto/layout.h"
#include "storage/disk.h"
#include "trace/event.h"
#include "worker/channel.h"
#include "worker/checkpoint_file.h"
#include "worker/chunk_crew.h"
#include "worker/chunk_queue.h"
#include "worker/clock.h"
#include "worker/gradient.h"
#include "worker/inbox.h"
#include "worker/onebit_adam.h"
#include "worker/optimizer.h"
#include "worker/reduction.h"
#include "worker/resume_state.h"

namespace signpost {

struct WorkerOptions {
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t block_elements = 4096;
  uint32_t chunk_elements = 0;  // 0: SuitableChunkElements
  float gamma = 1.35f;
  // That compress and apply, whoever calls included; at most ChunkCrew::kMostThreads. Changes no
  // bit.
  uint32_t threads = 1;
  absl::Duration join_timeout = absl::Minutes(5);
  // For each step's exchange, and each wait of a Checkpoint for the other ranks.
  absl::Duration exchange_timeout = absl::Minutes(1);
  // Rounds close without the workers whose frames are not there so long after the first one's, if
  // at least min_workers' are. Both zero: they wait for all, until the exchange timeout.
  absl::Duration round_deadline;
  uint32_t min_workers = 0;
  // Lets a job resume from a checkpoint of another number of workers: each then takes the mean of
  // all errors in it. Their mean over the workers, and so what training sees, stays what it was;
  // which bits follow does not.
  bool resume_with_other_world_size = false;
  // Lets ranks join whose parameters have different values. Whoever sets it makes them equal before
  // the first step, unless the job resumes or the worker comes back.
  bool parameters_may_differ = false;
  // Where parameters and gradients are, and the optimizer's state will be; must outlive the worker.
  // Null: on the host.
  kernels::cuda::Gpu* gpu = nullptr;
  // What CUSTOM is, where it is the codec of a stage or a reduction: the shared object
  // (signpost_codec.h), which the aggregators need too, and the codec's own options.
  std::string codec_library;
  std::string codec_options;
  Clock* clock = &Clock::Real();
};

// A round that all workers skipped because one worker's input was not finite. Or, of this rank, a
// block that its local step left alone (0/1 Adam): a GPU's may come with a later step's report, at
// the latest with that of the round that ends the interval.
struct SkippedRound {
  uint32_t rank = 0;  // the lowest rank at fault
  std::string block;  // Layout::DescribeBlock
};

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

struct StepReport {
  uint64_t step = 0;  // the last one that was taken
  // Steps that were taken before it in the same call, without a gradient, because the others had
  // gone on without this worker.
  uint64_t steps_caught_up = 0;
  // Rounds, of one chunk each, that closed without this worker's frame. What was in it is in this
  // worker's error, for later rounds.
  uint32_t late_rounds = 0;
  std::vector<uint32_t> late_ranks;  // without whose frame some round closed, ascending
  Codec codec = CODEC_UNSPECIFIED;   // none: it was a local step
  absl::Duration kernels;  // compressing and applying; on a GPU what the worker waits for of it
  absl::Duration wire;     // blocked on transfer and aggregation
  absl::Duration wait;     // blocked because another worker's frame was late
  std::vector<SkippedRound> skipped;
  uint32_t restarted_aggregators = 0;  // that were found to have gone back to an earlier state
  uint64_t replayed_frames = 0;        // sent again to them
  uint64_t kept_bytes = 0;             // of frames that aggregators may ask for, after the step
  // Of payloads that this worker has sent, once each, by parameter and step since it joined.
  double sent_bits = 0;
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
  // Joins the job at every shard; blocks until all ranks have. `channels[s]` leads to shard s.
  // Errors name the aggregator, rank, tensor or option at fault; DEADLINE_EXCEEDED names the ranks
  // that did not come.
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
  // Errors as Step; the tensors are then partly reduced, but for INVALID_ARGUMENT.
  absl::StatusOr<StepReport> Reduce(absl::Span<const absl::Span<float>> values);

  // With a GPU: calls put their work on this stream of it from now on, behind all that is on the
  // one before, which must be there until then. A step has read all gradients when it returns, but
  // for 0/1 Adam's local ones, which read them in the stream's order; parameters are written in
  // that order, perhaps later. The default one at first.
  void SetStream(kernels::cuda::Stream stream) { optimizer_.SetStream(stream); }

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
  // dense steps as much memory as the parameters', and parameters do not change until then. The
  // exchange timeout, and a round deadline, must be longer than the ranks' ways through a step are
  // apart: a frame that is sent first may wait for one that another rank sends last.
  //
  // A step that has begun can only be finished: there is no way back once something was sent.
  // FAILED_PRECONDITION, with nothing changed, for a call out of order: BeginStep, Step or
  // Checkpoint while a step is open, the others while none is, the same tensor twice, and
  // FinishStep while gradients are missing, of which it names one. Other errors as those of Step.
  //
  // A step that begins with a freeze of the variance, or a look at it, waits for the GPU.
  absl::Status BeginStep(absl::Span<const GroupRates> rates);
  // `gradient` must stay valid, and what it is, until FinishStep returns. Does not wait for
  // answers, nor for a GPU; only to find out why an exchange has failed may take seconds. The
  // step's exchange timeout counts from the sending of each chunk, and anew from FinishStep for
  // those that are sent there.
  absl::Status GradientReady(size_t tensor, Gradient gradient);
  absl::StatusOr<StepReport> FinishStep();

  // Saves the job as it is after the last step. All ranks must call it after the same step, with
  // the same directory, which all of them see (a shared file system). Returns OK once the
  // checkpoint is committed, on every rank; the newest two in the directory are kept, and those
  // that an interrupted run has left go.
  //
  // On error the checkpoints before stay, and training may go on. FAILED_PRECONDITION after a step
  // that failed. DEADLINE_EXCEEDED names the ranks that are waited for. In a job with a round
  // deadline, ABORTED: at once when a rank has left, and after two such deadlines when one is
  // absent or the others have gone on; which is named. Otherwise the disk's error, or an
  // aggregator's. Not after JoinReduction.
  absl::Status Checkpoint(Disk& directory);

  // This rank's share of what Checkpoint saves, by itself: parameters and optimizer, this worker's
  // error, and those aggregators' errors that it is to give back; 16 bytes for each parameter, 24
  // between 0/1 Adam's synchronisations, and 4 / n more with n workers. Ranks need not call it at
  // the same time, but a job goes on only from states that all ranks have saved after the same
  // step. Errors as Checkpoint's; no rank is waited for. Not after JoinReduction.
  absl::StatusOr<std::string> SaveState();

  // Ends this worker's membership. Returns once every aggregator has all of its rounds for good.
  absl::Status Leave();

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
  // How long a failed call may take to find out whom the aggregator waits for.
  static constexpr absl::Duration kStatusTimeout = absl::Seconds(3);

  // Its first block that was not packed, or their number.
  struct Packed {
    absl::StatusOr<uint32_t> bad_block;
  };
  using WorkerInbox = Inbox<std::variant<absl::StatusOr<Answer>, Packed>>;

  struct ChunkExchange;
  struct OpenStep;

  // One of `optimizer` and `reduction` is null.
  Worker(const WorkerOptions& options, const OptimizerOptions* optimizer,
         const ReductionOptions* reduction, std::vector<Parameter> parameters,
         std::vector<std::unique_ptr<Channel>> channels, Layout layout);

  // Joins all shards, and gets where the job is.
  absl::Status JoinShards(const JobOptions& job_options, std::optional<ResumeState> state);

  absl::Status JoinShard(uint32_t shard, const JobOptions& job_options, absl::Time deadline);
  // Gets what the others have, once all shards are joined.
  absl::Status ComeBack();
  // Sends the chunk's state, for a rank that comes back.
  void GiveState(uint32_t chunk);
  // Of a step that the optimizer has begun.
  void OpenStepWith(absl::Span<const GroupRates> rates);
  void AddGradient(size_t tensor, Gradient gradient);
  // What is left of the open step, of which all gradients are there; and then the steps that the
  // others have taken meanwhile.
  absl::StatusOr<StepReport> Finish();
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
  absl::Status CheckNoStepFailed() const;
  absl::Status CheckNoStepIsOpen() const;
  // DEADLINE_EXCEEDED when a GPU lets this step wait.
  absl::Status CheckGpuIsInTime() const;
  absl::Status CheckCanBeSaved() const;
  enum class Until { kNothingIsThere, kAllAreAnswered };
  // Calls `send` for each chunk that is ready, as the queue allows, and receives answers: those
  // that are there, or all.
  absl::Status ExchangeChunks(ChunkQueue& queue, absl::FunctionRef<void(uint32_t chunk)> send,
                              Until until, StepReport& report);
  // Of a frame of this step.
  FrameHeader HeaderOf(uint32_t chunk, Codec codec) const;
  // DATA_LOSS or FAILED_PRECONDITION if what was saved does not fit the optimizer.
  absl::Status CheckCanResume(const ResumeState& state) const;
  // Goes on from a checkpoint, once all shards are joined.
  absl::Status Resume(ResumeState state);
  // Sends the chunk's frame of the round that restores the aggregators' errors.
  void SendRestore(uint32_t chunk, const ChunkErrors& errors);
  // Of the chunks that this rank saves.
  absl::StatusOr<ChunkErrors> ReadErrors();
  absl::StatusOr<std::vector<float>> ReadError(uint32_t chunk);
  CheckpointManifest Manifest() const;
  // ABORTED when a checkpoint is not to be waited for, as Checkpoint says. What cannot be found out
  // is no reason.
  absl::Status CheckNobodyHasLeft() const;
  absl::Status CheckNobodyIsGone(absl::Span<const uint32_t> missing_ranks) const;
  // Of this job at the first shard; without a round deadline, or an answer, an empty one.
  JobStatus AskAboutJob() const;
  // Returns when `missing_ranks` finds none. Meanwhile others get what they may need of this
  // worker.
  absl::Status AwaitRanks(absl::FunctionRef<absl::StatusOr<std::vector<uint32_t>>()> missing_ranks);
  // Compresses the chunk's contribution to the open step, and sends it; or a GPU compresses it, and
  // the inbox will have it.
  void Pack(uint32_t chunk);
  // Sends the frame of what was packed; `bad_block` is the first that was not, or their number.
  void Send(uint32_t chunk, uint32_t bad_block);
  // Whether it was the answer to a frame of this step.
  absl::StatusOr<bool> Receive(WorkerInbox::Item item, StepReport& report);
  // Takes what became of the chunk's exchange, and sends what is to come next. Whether it was the
  // answer to this step's frame.
  absl::StatusOr<bool> ReceiveAnswer(uint32_t chunk, absl::StatusOr<Answer> answer,
                                     StepReport& report);
  void ApplyAnswer(uint32_t chunk, Answer answer, StepReport& report);
  absl::Status Replay(uint32_t chunk, const AnswerHeader& wanted, StepReport& report);
  // Sends the newest frame of the chunk again, unless an exchange is under way.
  void Offer(uint32_t chunk);
  // Offers a frame to every shard that could have been started again without our knowing.
  void OfferToIdleShards();
  // Sends the frame of that step, if there is one.
  void Exchange(uint32_t chunk, uint64_t step);
  // Until no exchange is under way, or for a while.
  absl::Status AwaitOffers();
  // Offers the frames of a shard that has lost some, and waits for their answers.
  absl::Status OfferAll(uint32_t shard);
  uint64_t StepsAt(uint32_t shard) const;  // that this worker has had answers of
  absl::Status LeaveShard(uint32_t shard);
  absl::Status Explain(const absl::Status& status, uint32_t shard, absl::string_view what) const;
  // For the trace: of the current round, or the current step as a whole.
  trace::Event EventOf(trace::Kind kind, uint32_t chunk) const;
  trace::Event StepEvent(trace::Kind kind) const;
  // For a line about an exchange.
  log::About AboutOf(uint32_t chunk, uint64_t step) const;

  const WorkerOptions options_;
  const std::vector<Parameter> parameters_;
  const Layout layout_;
  const std::vector<uint32_t> shard_of_chunk_;
  const std::vector<uint32_t> first_chunk_of_tensor_;
  const uint32_t window_;                   // most chunks under way at once
  const uint64_t incarnation_;              // tells this process from another that claims the rank
  const uint16_t trace_job_;                // the job's label in the trace
  const std::unique_ptr<OneBitAdam> adam_;  // null after JoinReduction
  const std::unique_ptr<Reduction> reduction_;  // null otherwise
  Optimizer& optimizer_;                        // the one of them that is there
  uint64_t round_ = 0;                          // the next one
  uint64_t steps_ = 0;                          // that were taken
  uint64_t first_step_ = 0;                     // that this worker takes
  Resumed resumed_;
  std::optional<Returned> returned_;
  std::set<std::string> damaged_checkpoints_;  // found when resuming
  absl::Status failure_;                       // of the first step that failed
  uint32_t rates_crc32c_ = 0;                  // of the current step
  StepRates rates_;                            // likewise; empty in a job without a round deadline
  uint64_t newest_step_ = 0;                   // that another worker has reached
  std::map<uint64_t, StepRates> later_rates_;  // of steps before that
  absl::Time deadline_;                        // of the current call's exchanges
  std::vector<uint64_t> epochs_;               // by shard
  std::vector<uint64_t> generations_;          // by shard: of its process, as far as is known
  std::vector<ChunkExchange> exchanges_;       // by chunk
  uint64_t sent_bytes_ = 0;                    // of payloads, since it joined
  std::unique_ptr<OpenStep> open_step_;        // null between steps
  // Shared with what may still be under way when a failed Step returns.
  std::shared_ptr<WorkerInbox> inbox_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by shard; destroyed first
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_WORKER_H_
