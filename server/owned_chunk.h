// A chunk that this shard owns, for one job: its open round, the calls that wait for the round to
// close, the error, and the last answer.

#ifndef SIGNPOST_SERVER_OWNED_CHUNK_H_
#define SIGNPOST_SERVER_OWNED_CHUNK_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "server/bell.h"
#include "server/earlier_process.h"
#include "server/metrics.h"
#include "server/room.h"
#include "server/round.h"
#include "server/round_trace.h"
#include "server/undurable_rounds.h"
#include "storage/block_vector.h"

namespace signpost {

// What is left of a round whose answer some rank may still need.
struct ClosedRound {
  std::shared_ptr<const Answer> answer;
  std::vector<Contribution> contributions;  // by rank
  StepRates rates;
};

// By step: the ranks without which its round closes, ascending.
using LateRanks = std::map<uint64_t, std::vector<uint32_t>>;

// A chunk between two rounds: what a restarted aggregator goes on from.
struct ChunkState {
  uint32_t chunk = 0;
  uint64_t open_step = 0;
  BlockVector<float> error;  // by element; empty: all zero
  // The last of them is of step open_step - 1. None when all ranks are known to have the answer.
  std::deque<ClosedRound> closed;
  LateRanks late_ranks;  // of steps from open_step on; written down apart from the rest
};

// How long a job's rounds wait, from their first frame on; infinite: for all ranks.
absl::Duration RoundDeadlineOf(const JobOptions& options);
// How many ranks' frames a round needs.
uint32_t MinWorkersOf(const JobOptions& options, uint32_t world_size);

// Whom a job's rounds wait for.
struct Attendance {
  // By rank: a round closed without it, and nothing came from it since.
  std::vector<bool> is_absent;
  std::vector<absl::Time> absent_since;  // by rank, of those that are
  std::vector<bool> has_left;            // by rank
  // By rank: rounds of earlier steps can do without it, however few are left.
  std::vector<uint64_t> first_step;
  // Who waits for a state that nobody gives before rounds have closed.
  std::set<uint32_t> waits_in_vain;
  std::set<uint32_t> gone;  // whose processes have no connection
  // How long a restarted aggregator waits until it has heard from every rank.
  absl::Duration restart_grace;
};

// For how long a rank waits, for a state or a round's answer, until it is taken for one that cannot
// come to a round before that has closed.
inline constexpr absl::Duration kInVain = absl::Seconds(10);

// Thread-safe. Callbacks are called exactly once, with no lock held, either before the call returns
// or later by the thread whose call ended their wait. Every wait must have ended (End) before the
// destructor.
class OwnedChunk {
 public:
  // To one rank: the answer is shared by all of them, the rest belongs into its copy of the header.
  struct Reply {
    std::shared_ptr<const Answer> answer;
    absl::Duration waited = absl::ZeroDuration();
    uint64_t durable_step = 0;
    uint64_t open_step = 0;
    std::vector<StepRates> later_rates = {};  // of the steps between the answer's and the open one
    uint64_t generation = 0;  // of a REPLAY and, if the chunk was restored, to a LISTEN or FETCH
  };
  // The header that the rank gets.
  static AnswerHeader HeaderOf(const Reply& reply);

  using Done = absl::AnyInvocable<void(absl::StatusOr<Reply>)>;

  // The first open step is 0, or the one before the options' first_step. `layout` and `bell` must
  // outlive the chunk. A null bell: what happens is not made durable, and workers need not keep any
  // frames.
  OwnedChunk(const Layout& layout, uint32_t chunk, uint32_t world_size, Bell* bell);

  // Goes on from a saved state, as the process of that generation does. Before anything else.
  void Restore(ChunkState state, uint64_t generation, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // Contributes a frame for this chunk that passed CheckFrame, and waits for its round to close.
  //   step == open step: as Round::Contribute. A duplicate takes the place of the call that waits
  //     for its rank, which ends with ABORTED.
  //   an earlier step: answered from its stored answer, or ALREADY_EXISTS if the rank contributed
  //     something else to it. Answers are stored while a rank may need them, within the limit
  //     below or, if that is more, of 64 KiB; and those of 16 rounds at most.
  //   In a restored chunk, for a later step than the open one, and for any frame whose sender does
  //     not know of the restart: answered at once with REPLAY from the open step, or the frame's if
  //     that is earlier.
  //   LISTEN, which contributes nothing: waits for the round of its step, or is answered from its
  //     stored answer; with the rates of that step. REPLAY as to others if it has a generation: its
  //     rank has come back since, and tells what it knows of the round.
  // FAILED_PRECONDITION, naming the open step, for any other step. INVALID_ARGUMENT, in a restored
  // chunk, when the rank says that it has had answers of rounds which cannot have closed, and
  // DATA_LOSS when one of them has closed otherwise since. INTERNAL when the round's sum is out of
  // range: from then on for the open step's frames.
  //
  // A frame that would be kept, and is not here yet, takes its memory from the offered room:
  // RESOURCE_EXHAUSTED, with TryAgain's mark, if there is no more.
  //
  // A complete round stays open while workers would otherwise have to keep too much: the frames
  // that are not durable, this round's included, may have half the size of the parameters in fp32,
  // or of four rounds, the largest of them, if that is more; and they may be of 64 rounds.
  void Exchange(Frame frame, absl::Time now, Done done, Room::Offer offer = {})
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether the open round is to close without the ranks that are missing: min_workers have
  // contributed, and those missing are absent, or it is past the deadline. Their frames no longer
  // count, whenever they come. Returns their ranks, and those that an earlier process left out of
  // it, until SetLateRanksDurable. Nothing when it is not, or when this is a round that an earlier
  // process may have closed with them.
  std::vector<uint32_t> LeaveOut(const Attendance& attendance, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // How many ranks the open round waits for; 0 when no frame of it is there.
  uint32_t missing() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Of all steps of which it can still matter.
  LateRanks late_ranks() const ABSL_LOCKS_EXCLUDED(mutex_);

  // What LeaveOut returned survives a crash: the round may close.
  void SetLateRanksDurable(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // The open round waits for this rank, for longer than rounds do.
  bool IsOverdue(uint32_t rank, absl::Time now) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Nothing more is taken from the rank's process of that incarnation. What it contributed to the
  // open round is dropped, unless it is decided that the round closes with it. Returns the step
  // from which on no frame of it can be needed.
  uint64_t Withdraw(uint32_t rank, uint64_t incarnation) ABSL_LOCKS_EXCLUDED(mutex_);
  // FAILED_PRECONDITION, with TryAgain's mark, of a process that was withdrawn.
  absl::Status CheckSender(const FrameHeader& header) const ABSL_LOCKS_EXCLUDED(mutex_);
  // To those whose calls wait.
  static absl::Status WithdrawnError(uint32_t rank);
  // Ends the rank's calls with it: to follow Withdraw, before another process has the rank.
  void EndCallsOf(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);

  // Another process has taken the rank. It needs the answers from now on.
  void Return(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);

  // The rank gets its state from the others: it has had no answers of its own that rounds could
  // have closed with otherwise since. With `has_state` it may have one of who had.
  void SetReturning(uint32_t rank, bool has_state) ABSL_LOCKS_EXCLUDED(mutex_);

  // Before the rank is asked for states in answer to its frame: takes to heart what that says of an
  // earlier process. False when its answer is REPLAY, or an error, or it has had answers of rounds
  // that are still to close here.
  bool Meet(const FrameHeader& header) ABSL_LOCKS_EXCLUDED(mutex_);
  // Which process the rank's state before the header's step is to be passed on as one of, 0 in a
  // chunk that was not restored. Nothing if a round that it has come of has closed otherwise here,
  // or may yet: it has still to close, and the rank may die with its frame; or the rank's process
  // was withdrawn, and what it has had is not waited for.
  std::optional<uint64_t> GenerationOfState(const FrameHeader& header) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // A call that waits in the open round, which keeps its frame, and that `is_one` says; those of
  // ranks above `after` are asked first. Nothing if there is none.
  struct TakenCall {
    FrameHeader header;  // rank, step, chunk and next_fetch only
    Done done;
  };
  std::optional<TakenCall> TakeWaitingCall(
      uint32_t after, absl::FunctionRef<bool(const FrameHeader& header)> is_one)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The most that the square of the norm of the rank's error can be, judged by the last frame that
  // came from it: what it was to keep is compress's error of the input u, at most (1 + gamma^2)
  // ||u||^2, and the scales gamma ||u_block|| / sqrt(len) tell ||u||. None when no frame has come
  // in this process, or when that frame tells nothing: its codec is neither one-bit nor lossless,
  // or it is one-bit and apart from the errors. One that is lossless and apart leaves them as they
  // were.
  std::optional<double> MostErrorSquared(uint32_t rank) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The error before the round of `step`, by element; empty: all zero. ABORTED when rounds before
  // that one have not closed yet, as after a restart; FAILED_PRECONDITION, naming the open step,
  // when it has closed.
  absl::StatusOr<BlockVector<float>> ReadError(uint64_t step) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Gives back what the open round has of the room, unless its frames may be decided on: forgets
  // all of them, and ends their calls with `reason`, so that they are sent again.
  void GiveRoomBack(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the waiting LISTEN with `reason`.
  void EndListeners(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // No round closes any more: ends the waiting calls with `reason`, and the open step's later ones.
  // The first reason stays.
  void End(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // Rings the bell when it is time for it: when the frames since the last one have 3/16 of the size
  // of the parameters in fp32, that is after 6 one-bit rounds or a dense one; when a complete round
  // stays open; and after the second round in a row without some rank, whose frames may be gone.
  bool snapshot_due() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether frames of a round that still lacks some have room.
  bool waits_with_room() const ABSL_LOCKS_EXCLUDED(mutex_);
  // INTERNAL when the error is spoilt, as after a sum that was out of range.
  absl::Status CheckError() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Overwrites `state` with what to go on from; its memory is used again. Unless `with_answer`, it
  // may be the state before the last round, when that is shorter to write: all ranks have
  // contributed to that round, so they have what came before. INTERNAL when the error is spoilt, as
  // Exchange says.
  absl::Status Save(bool with_answer, ChunkState& state) ABSL_LOCKS_EXCLUDED(mutex_);

  // Frames of earlier steps will not be asked for again.
  void SetDurable(uint64_t step, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // For status: what has happened, and whom the open round waits for.
  struct Progress {
    uint64_t open_step = 0;
    uint64_t durable_step = 0;
    std::vector<uint32_t> missing_ranks;  // none unless a frame of the open step is there
    absl::Time waiting_since = absl::InfiniteFuture();  // the first such frame's arrival
    // Since when the open round, which waits for no rank, has been held for what must be durable.
    absl::Time held_since = absl::InfiniteFuture();
    uint64_t rounds_closed = 0;
    uint64_t rounds_skipped = 0;      // of those closed
    uint64_t rounds_closed_late = 0;  // of those closed: without some rank
  };
  Progress progress() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t open_step() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Adds what has happened in this process, and what is here now, to those of other chunks. Reads
  // at most 32 blocks of the error.
  void AddMetrics(RoundMetrics& rounds, RetainedBytes& retained, NormMetrics& norms) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct WaitingCall {
    Done done;  // null: no call waits for this rank
    absl::Time since;
    uint32_t next_fetch = 0;  // of the frame's header
  };
  struct OpenRound {
    OpenRound(uint32_t world_size, const FrameHeader& first, absl::Time now)
        : since(now),
          newest_arrival(now),
          arrivals(world_size, now),
          round(world_size),
          calls(world_size),
          trace(first) {}
    absl::Time since;
    absl::Time newest_arrival;
    FrameArrivals arrivals;
    std::optional<absl::Time> completed;
    Round round;
    bool is_late_durable = true;     // what the round leaves out
    std::vector<WaitingCall> calls;  // by rank
    uint64_t largest_payload = 0;    // in bytes
    Room::Share room;
    absl::Time last_refused = absl::InfinitePast();  // a frame, for which there was no room
    RoundTrace trace;

    // Who is told to send again is not late.
    bool IsPast(absl::Duration deadline, absl::Time now) const {
      return now >= std::max(since, last_refused) + deadline;
    }
  };
  // What has come of one.
  struct Rank {
    // The step of the newest frame that came in this process. It has the answers of the steps
    // before.
    std::optional<uint64_t> heard;
    uint64_t withdrawn = 0;                    // the incarnation whose frames are refused; 0: none
    std::optional<double> most_error_squared;  // see MostErrorSquared

    void Hear(uint64_t step) { heard = std::max(heard.value_or(0), step); }
  };
  // That waits for the answer of a round it has no part in.
  struct Listener {
    Done done;
    uint64_t step = 0;
    absl::Time since;
  };
  // Calls that were taken out of the tables under the lock. They are finished when it goes: it is
  // to be made before the lock is taken.
  class EndedCalls {
   public:
    ~EndedCalls() {
      for (auto& [done, result] : calls_) done(std::move(result));
    }
    void Add(Done done, absl::StatusOr<Reply> result) {
      calls_.emplace_back(std::move(done), std::move(result));
    }

   private:
    std::vector<std::pair<Done, absl::StatusOr<Reply>>> calls_;
  };

  // A reply counts as sent.
  void Finish(Done done, absl::StatusOr<Reply> result, EndedCalls& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Each adds the calls that it ends.
  void Contribute(Frame frame, absl::Time now, Done done, const Room::Offer& offer,
                  EndedCalls& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Listen(const FrameHeader& header, absl::Time now, Done done, EndedCalls& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the round that has just closed.
  void AnswerListeners(EndedCalls& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseRound(absl::Time now, EndedCalls& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Those that wait in the open round, which is none any more.
  void EndOpenRound(const absl::Status& reason, EndedCalls& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndListeners(const absl::Status& reason, EndedCalls& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndRounds(const absl::Status& reason, EndedCalls& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the open round, when nothing of it is here any more.
  void ForgetIfEmpty() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The open round closes with that answer, after that much arithmetic.
  void CountRound(const Answer& answer, absl::Time now, absl::Duration averaging)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  double SampleErrorSquared() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  // Closes the open round if it is complete and may; else asks for the snapshot that it waits for.
  void CloseIfComplete(absl::Time now, EndedCalls& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<double> MostErrorOf(const Frame& frame) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Hear(const Frame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts a frame into the open round, which its first one opens; one of a rank that the round
  // leaves out is dropped. `header` is a copy of the frame's. Errors as Exchange's.
  absl::Status Add(const FrameHeader& header, Frame frame, absl::Time now, const Room::Offer& offer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first step that has a stored answer; open_step_ if none has.
  uint64_t oldest_answer() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return open_step_ - closed_.size();
  }
  // Whether the open round closes, or may have closed before a crash, with the frames that it has.
  bool IsDecided() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // From a rank that has had the open round's answer: without whom it closed.
  void LearnLateRanks(const FrameHeader& header, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As an earlier process did: the open round closes without these.
  void LeaveOutAsBefore(const std::vector<uint32_t>& ranks, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The open round gives back the errors of a checkpoint: what each rank has is needed.
  bool Restores() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return open_step_ < layout_.options().first_step();
  }
  bool MayLeaveOut(const Attendance& attendance, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsWithdrawn(const FrameHeader& header) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return header.incarnation() != 0 && header.incarnation() == ranks_[header.rank()].withdrawn;
  }
  // Whether as many as min_workers have contributed, or would if they could.
  void LeaveOutMissing(const Attendance& attendance, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasEnough(const Attendance& attendance, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ListensInVain(uint32_t rank, absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the last round was the second in a row without some rank.
  bool SomebodySeemsGone() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetAnswers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RequestSnapshot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Reply ReplyToListener(size_t closed) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Reply> Recall(const FrameHeader& header) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Reply ReplyWith(std::shared_ptr<const Answer> answer, absl::Duration waited) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Reply AskForReplay(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Layout& layout_;
  const uint32_t chunk_;
  const uint32_t world_size_;
  const absl::Duration round_deadline_;
  const uint32_t min_workers_;
  Bell* const bell_;  // null: nothing is made durable

  mutable absl::Mutex mutex_;
  uint64_t open_step_ ABSL_GUARDED_BY(mutex_);
  std::optional<OpenRound> open_ ABSL_GUARDED_BY(mutex_);  // from its first frame on
  BlockVector<float> error_ ABSL_GUARDED_BY(mutex_);       // from the first close on that can lose
  bool error_is_zero_ ABSL_GUARDED_BY(mutex_) = true;
  bool error_was_zero_ ABSL_GUARDED_BY(mutex_) = false;  // before the last round; false: none yet
  // Of the steps before open_step_. Answers are shared with the replies that still travel.
  std::deque<ClosedRound> closed_ ABSL_GUARDED_BY(mutex_);
  LateRanks late_ranks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, Listener> listeners_ ABSL_GUARDED_BY(mutex_);  // by rank
  std::optional<EarlierProcess> earlier_ ABSL_GUARDED_BY(mutex_);   // this chunk was restored
  absl::Status end_ ABSL_GUARDED_BY(mutex_);                        // OK: rounds go on
  absl::Status spoilt_ ABSL_GUARDED_BY(mutex_);  // not OK: the error must not be used

  uint64_t saved_step_ ABSL_GUARDED_BY(mutex_) = 0;    // the open step of the newest Save
  UndurableRounds undurable_ ABSL_GUARDED_BY(mutex_);  // empty without a bell
  bool snapshot_due_ ABSL_GUARDED_BY(mutex_) = false;

  RoundMetrics metrics_ ABSL_GUARDED_BY(mutex_);
  uint64_t rounds_closed_late_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_OWNED_CHUNK_H_
