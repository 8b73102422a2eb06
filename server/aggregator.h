// The aggregator: the jobs that one shard serves, their members and their rounds. No gRPC in here;
// the service (service.h) translates, and tests call it directly.

#ifndef SIGNPOST_SERVER_AGGREGATOR_H_
#define SIGNPOST_SERVER_AGGREGATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "log/log.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/steady_time.h"
#include "server/applicant.h"
#include "server/bell.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/owned_chunk.h"
#include "server/room.h"
#include "server/served_job.h"
#include "server/state_dir.h"

namespace signpost {

struct AggregatorOptions {
  uint32_t shard = 0;  // less than shard_count
  uint32_t shard_count = 1;
  AggregatorLimits limits;
  // A job whose members have sent nothing for this long gives way to a new one.
  absl::Duration idle_timeout = absl::Minutes(10);
  // How long a restarted aggregator waits for all ranks of a job before a round may close without
  // some: one of them may have had the answer of that round with all ranks in it.
  absl::Duration restart_grace = absl::Seconds(30);
  // A job is forgotten when nothing has come from it for this long, and none of its processes has a
  // connection, or waits.
  absl::Duration forget_after = absl::Hours(24);
  // Whether a connection is still there. Null: it is not known of any. May be called with locks
  // held.
  std::function<bool(const std::string& peer)> is_connected;
  std::function<absl::Time()> now = SteadyNow;
};

// Thread-safe. Callbacks are called exactly once, with no lock held, either before the call returns
// or later by the thread whose call ended their wait.
class Aggregator {
 public:
  using Reply = OwnedChunk::Reply;
  using JoinDone = ServedJob::JoinDone;
  using ExchangeDone = OwnedChunk::Done;
  using LeaveDone = ServedJob::LeaveDone;

  // With a state directory, which it borrows, what it promises survives it, if TakeSnapshots is
  // called as often as AwaitSnapshotDue returns: a Join is answered once the job is on disk, and a
  // Leave once all of that worker's rounds are.
  explicit Aggregator(const AggregatorOptions& options, StateDir* state_dir = nullptr);
  ~Aggregator();  // Drains.

  // Goes on with the jobs that the state directory had. Before anything else. DATA_LOSS for a state
  // that cannot be right.
  absl::Status Restore(StateDir::Recovered recovered) ABSL_LOCKS_EXCLUDED(mutex_);

  uint32_t shard() const { return options_.shard; }

  // Waits until the Joins of all ranks of the job wait, and answers them all. Afterwards a Join of
  // the same rank and incarnation is answered at once. Before, a later Join of the same rank takes
  // the place of the one that waits, which ends with ABORTED.
  //
  // Of a complete job that can do without some ranks, the Join of another incarnation waits until
  // the rank is absent (see CloseLateRounds), or its process has had no connection for 2/3 of
  // `restart_grace`; and its process, if that came back and gets its state, has no connection; and
  // then has the rank: what the process before sends is refused. It is answered, with `returning`,
  // once two snapshots have it and all that the process before contributed, so that no frame of
  // that process is needed again. What the options say of the job's start is not compared of those
  // who do not begin it.
  //
  // Gives way to a Join that does not belong to it: a job that nobody waits to begin, that a rank
  // has left, that was idle for `idle_timeout`, or, without a connection to any of its processes,
  // all of which it has heard since it was started, for twice `restart_grace`; of the same name, or
  // of any when there are as many jobs as the limits allow. And at once to a Join of a rank that it
  // cannot do without (at shard 0 none can before a frame of a round that trains has come, or the
  // job was restored) whose process is gone; or, where it can, if all of its processes are, and
  // others claim all of their ranks: if they are not connected, or have not been heard of for twice
  // `restart_grace` after a restart. Who waited to come back then joins the job anew. And before it
  // has begun to a Join with a later first_step, or later local_steps of it. Calls that wait in it
  // end with FAILED_PRECONDITION.
  //
  // Refusals change nothing, and Status shows the last one of each rank:
  //   INVALID_ARGUMENT     malformed name, rank, tensors or options; a job without chunks here
  //   FAILED_PRECONDITION  another shard, world size, layout or option than the job's, named; with
  //                        TryAgain's mark where it goes on from what was saved earlier
  //   ALREADY_EXISTS       the job is complete, and another incarnation holds the rank and, if the
  //                        job can do without it, takes part in rounds that opened since
  //   RESOURCE_EXHAUSTED   a limit; with TryAgain's mark where it passes when other programs' jobs
  //                        have ended, and those that nobody is in have given way
  //   UNAVAILABLE          after Drain; for a new job after StopAdmitting
  //
  // Returns the call's number, for CancelJoin. `peer` is the connection that it came by, as
  // options.is_connected takes it; empty: that is not known.
  uint64_t Join(const JoinRequest& request, JoinDone done, std::string peer = {})
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The caller of a Join is no longer there. If it still waits it ends with `reason`: when that is
  // DEADLINE_EXCEEDED, or when all ranks had joined, Status still counts the rank as one that had.
  void CancelJoin(uint64_t call, const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // Contributes a frame and waits for its round to close: see OwnedChunk::Exchange. In addition:
  //   INVALID_ARGUMENT     the frame does not pass CheckFrame, or its chunk belongs to another
  //                        shard, which is named
  //   FAILED_PRECONDITION  there is no such job any more, it has another epoch, which is named, or
  //                        is not complete; or another process has replaced this one, or the
  //                        sender in its rank; or the wait ended because a rank left, which is
  //                        named, or because the job gave way to another
  //   DATA_LOSS            an earlier process served the job, and what it wrote down is not here,
  //                        not even that the job was there
  //   UNAVAILABLE          after Drain, and for calls that it found waiting
  // `peer` as in Join.
  void Exchange(Frame frame, ExchangeDone done, std::string peer = {}) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends a rank's membership. No round can close without it, so waiting calls of the job end with
  // FAILED_PRECONDITION; but not in a job that can do without as many ranks (min_workers). A rank
  // that has come back, and leaves before its first frame, is absent as before, and has not left,
  // if the others are too few without it: it gives up. When all ranks have left, or gave up, the
  // job is forgotten. Idempotent: OK for a job, or epoch of it, that is over. INVALID_ARGUMENT for
  // a rank that the job does not have. FAILED_PRECONDITION before the job is complete. ABORTED when
  // rounds that the rank has completed are not known here, as after a crash: its frames must be
  // offered first. UNAVAILABLE after Drain.
  void Leave(const LeaveRequest& request, LeaveDone done) ABSL_LOCKS_EXCLUDED(mutex_);

  // This aggregator's error of a chunk: see OwnedChunk::ReadError and, for errors that concern the
  // job, Exchange. `peer` as in Join.
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              std::string peer = {}) ABSL_LOCKS_EXCLUDED(mutex_);

  // Both take some tens of microseconds for each chunk, and hold up frames of that chunk meanwhile.
  StatusResponse Status(const StatusRequest& request) const ABSL_LOCKS_EXCLUDED(mutex_);
  AggregatorMetrics Metrics() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Refuses new jobs from now on (UNAVAILABLE); jobs that are running, or waiting to, go on.
  void StopAdmitting() ABSL_LOCKS_EXCLUDED(mutex_);

  // Blocks until no job is running or waiting to, but for those whose processes are all gone, and
  // returns true; false after `timeout`.
  bool AwaitNoJobs(absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends all waiting calls with UNAVAILABLE, forgets all jobs, and refuses all calls but Status
  // from now on. Idempotent. What the state directory has stays there, and is as old as it is.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);

  // Drains, after writing down where all jobs are, so that the next process goes on from there and
  // no frame has to be sent twice. Requires a state directory. The first error, if any; the jobs
  // are then recovered as after a crash.
  absl::Status Suspend() ABSL_LOCKS_EXCLUDED(mutex_, state_mutex_);

  // Blocks until there is something to write down, or for `timeout`.
  void AwaitSnapshotDue(absl::Duration timeout) { bell_.Await(timeout); }
  // Makes AwaitSnapshotDue return.
  void RingSnapshotBell() { bell_.Ring(); }
  // Blocks until a round may be due that closes without some rank, or for `timeout`.
  void AwaitLateRounds(absl::Duration timeout) { late_bell_.Await(timeout); }
  void RingLateBell() { late_bell_.Ring(); }
  // Closes rounds without ranks that are late (JobOptions.round_deadline_us), after writing down
  // which: what was answered must come out the same after a crash. Lets processes in that come back
  // in the place of absent ones. Ends jobs that can do without some ranks and of which nobody has
  // the state any more, for twice `restart_grace`, or for certain: all ranks have left, are gone,
  // or came back and were given none. And forgets jobs that nobody has been in for `forget_after`.
  // To be called as often as AwaitLateRounds returns, which may block for as long as this returns,
  // by one thread at a time: an eighth of the shortest deadline, or of `forget_after`, or a second
  // if that is less and somebody comes back or has left.
  absl::Duration CloseLateRounds() ABSL_LOCKS_EXCLUDED(mutex_);

  // Writes down what is due, and removes what is over. The first error; Status shows those of jobs
  // that go on. The next call tries again.
  absl::Status TakeSnapshots() ABSL_LOCKS_EXCLUDED(mutex_, state_mutex_);
  // Logs, once, that the snapshot that is under way has been for more than 10 s; that one's end is
  // logged as well. To be called each second or so while snapshots are taken.
  void TellOfSlowSnapshot() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Jobs = std::map<std::string, ServedJob>;  // by name

  // The snapshot that is under way.
  struct Writing {
    JobId job;
    absl::Time since;
    bool is_told = false;  // that it is slow
  };

  // Why the job's name goes to one that the applicant begins. OK: it does not.
  absl::Status WhyOver(const Applicant& applicant, const ServedJob& served, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OK if it may join the job, or come back to it.
  absl::Status CheckMayJoin(const Applicant& applicant, const ServedJob& served,
                            absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job that it may join, new if need be. On error nothing has changed.
  absl::StatusOr<ServedJob*> Admit(Applicant applicant, absl::Time now, Callbacks& callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED for one more, that needs `reserved` bytes, than the jobs there are, without
  // those that are `leaving`.
  absl::Status CheckRoom(const Applicant& applicant, uint64_t reserved,
                         absl::Span<const Jobs::iterator> leaving)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job that has been silent for longest, of those that give way but `others`; end() if none
  // does.
  Jobs::iterator FindGivingWay(absl::Time now, absl::Span<const Jobs::iterator> others)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The one that has been silent for longest of these; end() if there is none.
  Jobs::iterator FindSilent(absl::FunctionRef<bool(const ServedJob& job)> is_one)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A job whose workers are all gone gives way to those that cannot be written down any more.
  void MakeRoomOnDisk() ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets the job, and has it ended without the lock.
  void LetGo(Jobs::iterator job, absl::Status why, Callbacks& callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If nobody can go on with it.
  void LetGoIfHalted(Jobs::iterator job, absl::Time now, Callbacks& over)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If nobody has been there for `forget_after`. Whether it did.
  bool LetGoIfLongGone(Jobs::iterator job, absl::Time now, Callbacks& over)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ServedJob& AddJob(Applicant applicant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<bool> IsMember(Jobs::iterator served, const LeaveRequest& request) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void ForgetIfAllLeft(Jobs::iterator job, Callbacks& callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RecordRefusal(const JoinRequest& request, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<ServedJob*> FindRunningJob(const FrameHeader& header, absl::Time now,
                                            std::string peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frames that could wait give back what jobs need; if that is not enough, a job
  // that has some gives way.
  void MakeRoom() ABSL_LOCKS_EXCLUDED(mutex_);
  // RESOURCE_EXHAUSTED, with TryAgain's mark, when frames have taken what jobs need.
  absl::Status CheckRoomIsLeft() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  uint64_t ReservedByJobs() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // To a frame of the job; RESOURCE_EXHAUSTED, with TryAgain's mark, if it must not have any.
  absl::StatusOr<Room::Offer> OfferRoom(ServedJob& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotHereError(const FrameHeader& header) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // 0 without a state directory.
  uint64_t generation() const { return state_dir_ == nullptr ? 0 : state_dir_->generation(); }
  bool HasNoJobs() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  Jobs TakeJobs() ABSL_LOCKS_EXCLUDED(mutex_);

  void Forget(uint64_t epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RemoveForgotten() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  absl::StatusOr<OpenSteps> Save(const DueSnapshot& due)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  void Log(log::Level level, const Writing& writing, absl::string_view what) const;
  absl::StatusOr<OpenSteps> Write(const DueSnapshot& due)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  void SetSaved(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                absl::Duration duration) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of the job with that name, if there is one, or of all.
  std::vector<JobMetrics> MetricsOf(absl::string_view name) const ABSL_LOCKS_EXCLUDED(mutex_);
  // What is known without asking its rounds.
  void FillStatus(const ServedJob& job, absl::Time now, JobStatus& status) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const AggregatorOptions options_;
  const Membership::Connections connections_;
  StateDir* const state_dir_;   // or null
  const uint64_t first_epoch_;  // jobs of this process come after it
  Bell bell_;
  Bell late_bell_;
  Room room_;  // outlives the jobs

  absl::Mutex state_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // held while the directory is written to
  mutable absl::Mutex mutex_;
  Jobs jobs_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> warnings_ ABSL_GUARDED_BY(mutex_);      // from when it was started
  std::vector<uint64_t> given_up_epochs_ ABSL_GUARDED_BY(mutex_);  // likewise
  // Likewise: of jobs that the state directory had a snapshot of, then or before.
  std::vector<uint64_t> known_epochs_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_epoch_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Writing> writing_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> forgotten_epochs_ ABSL_GUARDED_BY(mutex_);  // still in the directory
  bool admitting_ ABSL_GUARDED_BY(mutex_) = true;
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_AGGREGATOR_H_
