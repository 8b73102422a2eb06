// A job as one shard sees it: its layout, and the chunks of it that the shard owns.

#ifndef SIGNPOST_SERVER_JOB_H_
#define SIGNPOST_SERVER_JOB_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "server/metrics.h"
#include "server/owned_chunk.h"
#include "server/room.h"
#include "server/state_desk.h"

namespace signpost {

struct JobId {
  std::string name;
  uint64_t epoch = 0;
};

struct ShardId {
  uint32_t shard = 0;  // less than shard_count
  uint32_t shard_count = 1;
};

// What a restarted aggregator needs to go on with a job.
struct JobState {
  JobId id;
  ShardId shard;
  JobOptions options;
  std::vector<Tensor> tensors;
  std::vector<uint64_t> incarnations;  // by rank
  std::vector<uint32_t> left_ranks;
  std::vector<uint32_t> given_up_ranks;   // that have not left
  std::vector<uint32_t> returning_ranks;  // that have not given up either
  std::vector<ChunkState> chunks;         // those that the shard owns, in order
};

// By chunk: of its rounds that close without some rank.
using LateRounds = std::map<uint32_t, LateRanks>;

// In bytes, whatever its codec.
uint64_t LargestPayload(const Layout& layout, uint32_t chunk);

// The memory that a job needs to go on, in bytes. Of its chunks that the shard owns: their errors,
// an answer of each, and of the largest of them a frame of each rank, the answer that is being made
// and a copy for a snapshot.
uint64_t ReservedBytes(uint32_t world_size, const Layout& layout, ShardId shard);

// Of the chunks that a shard owns, by chunk.
using OpenSteps = std::map<uint32_t, uint64_t>;
OpenSteps OpenStepsOf(const JobState& state);

// What is known of a rank, as those who wait for it see it.
struct RollEntry {
  bool is_absent = false;  // a round closed without it, and nothing has come from it since
  absl::Time absent_since = absl::InfinitePast();
  bool has_left = false;
  bool was_heard = false;  // a frame came from it since the start, or its return
  // Its process has come back, and no frame of it has come since that counts.
  bool comes_back = false;
  // It did when an earlier process of the aggregator wrote it down, and no frame of it has come
  // here.
  bool came_back = false;
  // That process was not given any state here either, and has nothing to go on from. False if that
  // is not certain, as of those who came to an earlier process.
  bool lacks_state = false;
  bool has_given_up = false;  // it had come back
  uint32_t returns = 0;       // how many processes have come back as the rank
  uint64_t newest_step = 0;   // heard of
  uint64_t first_step = 0;    // it contributes to no round before

  bool may_come_back() const { return comes_back || came_back; }
};

// Whom a job waits for. Thread-safe.
class Roll {
 public:
  explicit Roll(uint32_t world_size) : ranks_(world_size) {}

  RollEntry entry(uint32_t rank) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<RollEntry> entries() const ABSL_LOCKS_EXCLUDED(mutex_);      // by rank
  std::vector<uint32_t> absent_ranks() const ABSL_LOCKS_EXCLUDED(mutex_);  // and who has left
  // Those that come back, and have not given up, nor left.
  std::vector<uint32_t> returning_ranks() const ABSL_LOCKS_EXCLUDED(mutex_);
  // And those that came back to an earlier process, which may have had frames of them since.
  std::vector<uint32_t> maybe_returning_ranks() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<uint32_t> given_up_ranks() const ABSL_LOCKS_EXCLUDED(mutex_);  // that have not left

  // A frame of that step came from the rank. Returns how many are absent or have left.
  uint32_t Hear(uint32_t rank, uint64_t step) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetAbsent(absl::Span<const uint32_t> ranks, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns how many have.
  uint32_t SetLeft(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // It is absent, and has not left any more; and contributes to no round before that step. Another
  // process that has the rank has no state yet.
  void Return(uint32_t rank, uint64_t first_step, bool is_same_process) ABSL_LOCKS_EXCLUDED(mutex_);
  // State is on its way to that one of the processes that came back as the rank.
  void GiveState(uint32_t rank, uint32_t returns) ABSL_LOCKS_EXCLUDED(mutex_);
  // A FETCH or LISTEN of it has come, which an aggregator that was started again may hear of first;
  // it contributes to no round before that step.
  void HearReturning(uint32_t rank, uint64_t first_step) ABSL_LOCKS_EXCLUDED(mutex_);
  // It had come back to an earlier process.
  void SetCameBack(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // It has come back, and gives up.
  void GiveUp(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // All ranks have left or given up but for these, from which no frame has come since they are
  // back.
  bool HaveLeftBut(const std::set<uint32_t>& ranks) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable absl::Mutex mutex_;
  std::vector<RollEntry> ranks_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe: everything is constant but the roll and what happens within a chunk, and chunks do
// not share it.
class Job {
 public:
  // The bell as OwnedChunk's.
  Job(JobId id, uint32_t world_size, Layout layout, ShardId shard, Bell* bell);

  // A job that goes on from a saved state, in the process of that generation. DATA_LOSS when the
  // state does not fit its own layout, or this shard; FAILED_PRECONDITION when its codec from
  // outside is not loaded here.
  static absl::StatusOr<std::unique_ptr<Job>> Restore(JobState state, ShardId shard, Bell* bell,
                                                      uint64_t generation, absl::Time now);

  const JobId& id() const { return id_; }
  uint32_t world_size() const { return world_size_; }
  uint32_t shard() const { return shard_.shard; }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  const Layout& layout() const { return layout_; }

  // Judges the frame (CheckFrame) and gives it to its chunk: see OwnedChunk. A frame for which the
  // offered room is too small does not need it when no other chunk is further behind than its own:
  // at an earlier step, or a lower one. Every rank comes to that chunk, in whatever order it sends
  // others (worker/chunk_queue.h), so a job goes on that has no room at all. INVALID_ARGUMENT for
  // a frame that does not pass, or whose chunk another shard owns, which is named.
  // Returns whether its round may be one now that need not wait any longer, because all others have
  // contributed to it but those that are absent or have left: see LeaveOut, which is not cheap.
  bool Exchange(Frame frame, absl::Time now, OwnedChunk::Done done, Room::Offer offer = {});

  // As OwnedChunk::GiveRoomBack, for all chunks.
  void GiveRoomBack(const absl::Status& reason);

  // Infinite: rounds wait for all ranks.
  absl::Duration round_deadline() const;
  uint32_t min_workers() const;

  // Rounds close without late ranks: those that OwnedChunk::LeaveOut decides on close once
  // SetLateRoundsDurable says that late_rounds() survives a crash. Whether there are any. What
  // ranks whose processes are `gone` wait for counts for nothing.
  bool LeaveOut(absl::Duration restart_grace, std::set<uint32_t> gone, absl::Time now);
  LateRounds late_rounds() const;
  void SetLateRoundsDurable(absl::Time now);

  // The rank has left. Whether rounds can do without it; if not, End is to follow.
  bool Leave(uint32_t rank);
  // The rank, which comes back, goes again, and is as absent as before.
  void GiveUp(uint32_t rank, uint64_t incarnation);
  // The rank had come back, when this was written down that the job goes on from.
  void SetCameBack(uint32_t rank) { roll_.SetCameBack(rank); }
  // Ends the calls of ranks that come back and that nobody can help any more.
  void EndReturnsIfAlone();

  // Whether a rank whose process is gone may come back.
  bool takes_back() const { return min_workers() < world_size_; }
  bool has_begun() const;  // some round has closed
  // A frame of a round that trains has come, or may have to an earlier process. Before, ranks may
  // still wait for each other elsewhere: at another shard, for the values of rank 0.
  bool has_trained() const { return has_trained_; }
  // Rounds go on without it, or can't.
  bool is_absent(uint32_t rank, absl::Time now) const;
  RollEntry entry(uint32_t rank) const { return roll_.entry(rank); }
  std::vector<uint32_t> given_up_ranks() const { return roll_.given_up_ranks(); }
  std::vector<uint32_t> maybe_returning_ranks() const { return roll_.maybe_returning_ranks(); }
  // Ends the calls of the rank's process, which was withdrawn: before another has the rank.
  void EndCallsOf(uint32_t rank);
  // Nothing more comes from the rank's process. Returns the steps from which on no frame of it can
  // be needed: see OwnedChunk::Withdraw.
  OpenSteps Withdraw(uint32_t rank, uint64_t incarnation);
  // Another process has the rank from now on, and contributes to no earlier round; or the same one,
  // from which nothing has come yet. That may have had the answer to an earlier Join, be about to
  // begin where it is, and need the answers since.
  void Return(uint32_t rank, uint64_t first_step, bool is_same_process);
  // Asks a rank whose call waits, but one that is gone, for the state of chunks, if another rank
  // needs them.
  void AskForStates(const std::set<uint32_t>& gone, absl::Time now);
  // Over all chunks; none if it is not known of one.
  std::optional<double> MostErrorSquared(uint32_t rank) const;

  // The error of a chunk that this shard owns: see OwnedChunk. INVALID_ARGUMENT for another chunk.
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request) const;

  bool snapshot_due() const;     // for any chunk
  bool waits_with_room() const;  // likewise
  // INTERNAL when the error of a chunk is spoilt, with what was wrong.
  absl::Status CheckCanBeSaved() const;
  // Everything but the members, which are not known here, and the chunks.
  JobState Describe() const;
  std::vector<uint32_t> owned_chunks() const;
  // See OwnedChunk::Save; of a chunk that this shard owns.
  absl::Status SaveChunk(uint32_t chunk, bool with_answer, ChunkState& state) {
    return chunks_.at(chunk).Save(with_answer, state);
  }
  // Frames of chunk c of steps before steps[c] will not be asked for again.
  void SetDurable(const OpenSteps& steps, absl::Time now);
  OpenSteps open_steps() const;
  uint64_t open_step() const;  // the least of them

  // As OwnedChunk::End, for all chunks.
  void End(const absl::Status& reason);

  // Sets what the chunks have counted, and everything in the status of a complete job but
  // joined_ranks and refused_joins.
  void FillMetrics(absl::Time now, JobMetrics& metrics) const;

 private:
  // All of it that is not in metrics as well.
  void FillStatus(absl::Time now, JobStatus& status) const;
  // What Exchange does, once the frame is judged: with one of a rank that comes back, and with a
  // contribution.
  bool HelpBack(Frame frame, absl::Time now, OwnedChunk::Done done);
  bool Contribute(Frame frame, absl::Time now, OwnedChunk::Done done, Room::Offer offer);
  absl::Status CheckAccepts(const Frame& frame) const;
  absl::Status CheckOwnership(uint32_t rank, uint32_t chunk) const;
  bool IsFurthestBehind(uint64_t step, uint32_t chunk) const;

  const JobId id_;
  const uint32_t world_size_;
  const Layout layout_;
  const ShardId shard_;
  const std::vector<uint32_t> shard_of_chunk_;
  const uint64_t reserved_bytes_;
  Roll roll_;
  StateDesk state_desk_;
  std::atomic<uint32_t> asked_rank_ = 0;  // the last of AskForStates
  std::atomic<bool> has_trained_ = false;
  std::map<uint32_t, OwnedChunk> chunks_;  // by chunk: those that this shard owns
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_JOB_H_
