// A job as its aggregator serves it: rounds, members, and the calls that wait until what they did
// is written down.

#ifndef SIGNPOST_SERVER_SERVED_JOB_H_
#define SIGNPOST_SERVER_SERVED_JOB_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/aggregator.pb.h"
#include "server/bell.h"
#include "server/job.h"
#include "server/membership.h"
#include "server/metrics.h"

namespace signpost {

// What is to be called when no lock is held any more.
using Callbacks = std::vector<absl::AnyInvocable<void()>>;

// done(result) is.
template <class Done, class Result>
void Finish(Done done, Result result, Callbacks& callbacks) {
  callbacks.push_back(
      [done = std::move(done), result = std::move(result)]() mutable { done(std::move(result)); });
}

// A job as it is to be written down, but for its chunks.
struct DueSnapshot {
  std::shared_ptr<Job> job;
  std::vector<uint64_t> incarnations;
  std::vector<uint32_t> left_ranks;
  std::vector<uint32_t> given_up_ranks;
  std::vector<uint32_t> returning_ranks;
  bool with_answers = false;
};

// Not thread-safe, but for the job itself, which calls share that are inside it when it is
// forgotten. Calls that it ends are added to `callbacks`.
class ServedJob {
 public:
  using JoinDone = Membership::JoinDone;
  using LeaveDone = absl::AnyInvocable<void(absl::Status)>;

  struct Bells {
    Bell& snapshots;  // rung when one is due that a call waits for
    Bell& late;       // rung when CloseLateRounds may have something to do
  };

  // A new one. In the process of that generation; 0: nothing is written down.
  ServedJob(std::shared_ptr<Job> job, uint64_t generation, Bells bells,
            const Membership::Connections& connections);
  // One that goes on from what was written down.
  ServedJob(std::shared_ptr<Job> job, uint64_t generation, Bells bells, Membership membership,
            OpenSteps saved_steps);

  // The answer to a Join of a job.
  static JoinResponse WelcomeTo(const Job& job, uint64_t generation);

  const std::shared_ptr<Job>& job() const { return job_; }
  const Membership& membership() const { return membership_; }
  // A member sent something.
  void Hear(const Membership::Claim& claim, absl::Time now) { membership_.Hear(claim, now); }

  // Whether the claim is that of a process that comes back in a rank.
  bool Returns(const Membership::Claim& claim) const;
  // Nobody waits in it, or for it to begin, and nobody was told that it had.
  bool IsDeserted() const;
  // Or it has been silent for a while, and all of its workers, of which it had heard, are gone.
  bool IsAbandoned(absl::Time now) const;
  // As far as it is known: no process of it has a connection, nor waits.
  bool NobodyIsThere(absl::Time now) const;
  // It cannot go on, and the claim is one to begin it anew: the rank's process is gone, and with it
  // what the others would need of it; or, of a job that could do without it, IsLost with the claim;
  // or the job has no such rank, and all processes are gone. Before it has trained, no job can do
  // without a rank: others may wait for it.
  bool IsSucceeded(const Membership::Claim& claim, absl::Time now) const;
  // A rank whose process was found to be gone, before the job has trained, when another waited
  // already to come back in it.
  std::optional<uint32_t> FindSucceededRank(absl::Time now) const;
  // Nobody would miss it: it is abandoned, cannot go on, or has been silent for long.
  bool GivesWay(absl::Time now) const;

  // As Aggregator::Join, of a claim that may: the call waits for the other ranks, for the rank, or
  // for a snapshot. Returns whether the job begins with it.
  bool Join(const Membership::Claim& claim, uint64_t call, JoinDone done, absl::Time now,
            Callbacks& callbacks);
  // As Aggregator::CancelJoin, if the call is here.
  void CancelJoin(uint64_t call, const absl::Status& reason, Callbacks& callbacks);
  void RecordRefusal(uint32_t rank, const absl::Status& status) {
    membership_.RecordRefusal(rank, std::string(status.message()));
  }
  // Gives those their ranks who come back and can have them, and refuses those who can't.
  void AdmitReturning(absl::Time now, Callbacks& callbacks);

  // Of a member. Ends its membership, at once or when that is written down; but one that comes back
  // and has contributed nothing yet stays a member, and gives up, if the job would end without it.
  void Leave(const LeaveRequest& request, LeaveDone done, Callbacks& callbacks);
  bool AllLeft() const;  // or gave up; and no call waits for it

  bool is_saved() const { return is_saved_; }  // at least once
  bool IsSnapshotDue() const;
  DueSnapshot Snapshot() const;
  // What became of it, and how long it took. Returns the steps before which workers need not keep
  // frames.
  OpenSteps SetSaved(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                     absl::Duration duration, Callbacks& callbacks);
  void SetLateRoundsSaved(const absl::Status& status) { late_error_ = status; }
  // Of the last attempts to write down.
  absl::Status state_error() const;
  const SnapshotMetrics& snapshots() const { return snapshots_; }
  // Since when Joins of all ranks have waited for the first snapshot; infinite: none do.
  absl::Time joins_held_since() const {
    return joins_.empty() ? absl::InfiniteFuture() : joins_held_since_;
  }

  // Nobody can go on with it, because all ranks have left, are gone, or came back and wait for the
  // state of another. Those that wait never get it; or nobody waits, and some have left, as at the
  // job's end. It has been so in each call for the connections' grace, or IsLost. Requires a job
  // that is complete.
  enum class Halt { kNo, kWithThoseWhoWait, kAtItsEnd };
  Halt FindHalt(absl::Time now);

  // Somebody waits to come back, or for what it needs to; or it may have halted. What becomes of
  // these nobody tells: it is to be looked for, by what comes next of CloseLateRounds.
  bool IsToBeWatched() const;

  // Ends all calls, and the rounds. With no lock held.
  void End(const absl::Status& reason);
  // The same for calls of processes that come back to a job that is over.
  void EndReturning(const absl::Status& reason, Callbacks& callbacks);

  bool has_room = false;  // nobody else uses what it reserves

 private:
  struct WaitingLeave {
    LeaveRequest request;
    LeaveDone done;
    bool stays = false;     // a member, which has given up
    OpenSteps needed = {};  // what snapshots must have
  };
  // A process that comes back in a rank.
  struct Returning {
    Membership::Claim claim;
    uint64_t call = 0;
    JoinDone done;             // null, with has_rank: its caller is gone, and may come again
    uint64_t newest_step = 0;  // that was known when it came
    // Since when, while it has waited, the process that has the rank has been gone.
    absl::Time gone_since = absl::InfiniteFuture();
    bool has_rank = false;
    // With it:
    OpenSteps needed;        // what snapshots must have
    uint32_t snapshots = 0;  // that have it
    JoinResponse welcome = {};
  };

  // Nobody has the state, for certain: each rank has left or given up, waits for it, or is gone and
  // another process waits for the rank, or is to wait for the one that is claimed. That one is not
  // connected says less: it connects again as soon as its network lets it.
  bool IsLost(std::optional<uint32_t> claimed, absl::Time now) const;
  bool HasWaitingJoins() const;  // of a job that is complete
  // A process waits to come back as the rank.
  bool IsClaimed(uint32_t rank) const;
  // The process that has the rank takes part no more: a round has missed it; or, as there need not
  // be one here while the others wait elsewhere for those that come back, it has been gone for a
  // third of the connections' grace: the others wait for their exchange timeout at most, and one
  // that is there has connected again by then.
  bool IsMissed(Returning& returning, absl::Time now) const;
  bool is_durable() const { return generation_ != 0; }
  // Whether it goes on when a rank's process is gone, which another may then take the place of. The
  // first shard knows: who joins anew comes there first, and to the others when that has let it in.
  bool GoesOnWithoutSome() const {
    return job_->takes_back() && (job_->has_trained() || job_->shard() > 0);
  }
  bool IsGoneOrHasLeft(uint32_t rank, absl::Time now) const {
    return membership_.has_left(rank) || job_->entry(rank).has_given_up ||
           membership_.IsGone(rank, now);
  }
  // Of all ranks' processes, but those that have left or given up.
  bool HasHeardOfAll() const;
  // As FindHalt, whether or not it is certain.
  Halt HaltAt(absl::Time now) const;
  bool IsTaken(const WaitingLeave& leave) const;  // its rank, by another process meanwhile
  // What came of the snapshots has all that the leave waits for.
  bool IsIn(const DueSnapshot& due, const WaitingLeave& leave, const OpenSteps& saved,
            const OpenSteps& durable) const;
  // The others would be too few when the rank has left, and those whose Leave waits.
  bool WouldEndWithout(uint32_t rank) const;
  // Whether a snapshot would bring a call further that waits for one.
  bool IsAwaited() const;
  void AddReturning(Returning returning, Callbacks& callbacks);
  // What is left to do for it; false when it is to be forgotten.
  bool Admit(Returning& returning, absl::Time now, Callbacks& callbacks);
  void GiveRank(Returning& returning, Callbacks& callbacks);
  // A snapshot was written.
  void Welcome(Callbacks& callbacks);
  void WelcomeReturning(const DueSnapshot& due, const OpenSteps& saved, Callbacks& callbacks);
  void EndLeaves(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                 const OpenSteps& durable, Callbacks& callbacks);
  // The rank leaves the job now.
  void EndMembership(WaitingLeave leave, Callbacks& callbacks);

  std::shared_ptr<Job> job_;
  uint64_t generation_;
  Bells bells_;
  Membership membership_;
  std::map<uint32_t, Returning> returning_;  // by rank
  bool has_welcomed_ = false;                // some process was told that it had joined
  absl::Time halted_since_ = absl::InfiniteFuture();

  // If it is durable:
  bool is_saved_ = false;
  OpenSteps saved_steps_;                     // by the newest snapshot
  std::vector<Membership::EndedJoin> joins_;  // that end when the job is saved
  absl::Time joins_held_since_;               // the first of them
  std::vector<WaitingLeave> leaves_;          // likewise
  absl::Status state_error_;                  // of the last attempt to save
  absl::Status late_error_;                   // likewise, to save late rounds
  SnapshotMetrics snapshots_;
};

// That the rank has left, to who waits for it; TryAgain's mark.
absl::Status LeftError(uint32_t rank, absl::string_view job);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SERVED_JOB_H_
