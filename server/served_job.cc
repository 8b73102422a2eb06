#include "server/served_job.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "failpoint/failpoint.h"
#include "proto/try_again.h"

namespace signpost {
namespace {

// Of attempts to save: its error is out of range, or its codec failed. No later one can do better.
bool IsOfTheJobItself(const absl::Status& status) {
  return absl::IsOutOfRange(status) || absl::IsInternal(status);
}

absl::Status TakesPartError(uint32_t rank) {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", rank, " is held by another process, which takes part in the job"));
}

bool AllReached(const OpenSteps& steps, const OpenSteps& wanted) {
  return absl::c_all_of(wanted, [&](const auto& step) {
    const auto found = steps.find(step.first);
    return found != steps.end() && found->second >= step.second;
  });
}

// The least of them.
uint64_t LeastOf(const OpenSteps& steps) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const auto& [chunk, step] : steps) least = std::min(least, step);
  return least;
}

}  // namespace

absl::Status LeftError(uint32_t rank, absl::string_view job) {
  return TryAgain(
      absl::FailedPreconditionError(absl::StrFormat("rank %d has left job '%s'", rank, job)));
}

JoinResponse ServedJob::WelcomeTo(const Job& job, uint64_t generation) {
  JoinResponse welcome;
  welcome.set_generation(generation);
  welcome.set_epoch(job.id().epoch);
  welcome.set_layout_fingerprint(job.layout().Fingerprint());
  return welcome;
}

ServedJob::ServedJob(std::shared_ptr<Job> job, uint64_t generation, Bells bells,
                     const Membership::Connections& connections)
    : job_(std::move(job)),
      generation_(generation),
      bells_(bells),
      membership_(job_->world_size(), job_->min_workers(), WelcomeTo(*job_, generation),
                  connections) {}

ServedJob::ServedJob(std::shared_ptr<Job> job, uint64_t generation, Bells bells,
                     Membership membership, OpenSteps saved_steps)
    : has_room(true),
      job_(std::move(job)),
      generation_(generation),
      bells_(bells),
      membership_(std::move(membership)),
      has_welcomed_(true),
      is_saved_(true),
      saved_steps_(std::move(saved_steps)) {}

bool ServedJob::Returns(const Membership::Claim& claim) const {
  if (!membership_.complete() || !job_->takes_back()) return false;
  if (!membership_.Holds(claim)) return true;
  // One that holds the rank already did not get the answer to its first Join, and the others went
  // on; or it was given the rank before, perhaps when no round had closed, and the aggregator was
  // started again while it waited.
  const RollEntry entry = job_->entry(claim.rank);
  return !entry.was_heard && (job_->has_begun() || entry.may_come_back());
}

bool ServedJob::IsDeserted() const {
  return membership_.Deserted() || (membership_.complete() && !has_welcomed_ && !HasWaitingJoins());
}

bool ServedJob::HasWaitingJoins() const {
  const bool somebody_returns = absl::c_any_of(
      returning_, [](const auto& returning) { return returning.second.done != nullptr; });
  return !joins_.empty() || somebody_returns;
}

bool ServedJob::NobodyIsThere(absl::Time now) const {
  return IsDeserted() || (membership_.complete() && !HasWaitingJoins() && membership_.AllGone(now));
}

bool ServedJob::IsAbandoned(absl::Time now) const {
  return IsDeserted() || (membership_.complete() && membership_.IsSilent(now) && HasHeardOfAll() &&
                          membership_.AllGone(now));
}

bool ServedJob::HasHeardOfAll() const {
  for (uint32_t rank = 0; rank < job_->world_size(); ++rank) {
    const bool may_be_there = !membership_.has_left(rank) && !job_->entry(rank).has_given_up;
    if (may_be_there && !membership_.HasHeardOf(rank)) return false;
  }
  return true;
}

bool ServedJob::GivesWay(absl::Time now) const {
  return IsAbandoned(now) || membership_.TooFewAreLeft() ||
         (membership_.complete() && membership_.IsIdle(now));
}

bool ServedJob::IsSucceeded(const Membership::Claim& claim, absl::Time now) const {
  if (!membership_.complete() || membership_.Holds(claim)) return false;
  if (claim.rank >= job_->world_size()) return membership_.AllGone(now);
  return GoesOnWithoutSome() ? IsLost(claim.rank, now) : IsGoneOrHasLeft(claim.rank, now);
}

bool ServedJob::IsLost(std::optional<uint32_t> claimed, absl::Time now) const {
  for (uint32_t rank = 0; rank < job_->world_size(); ++rank) {
    const RollEntry entry = job_->entry(rank);
    if (membership_.has_left(rank) || entry.has_given_up || entry.lacks_state) continue;
    if (rank != claimed && !IsClaimed(rank)) return false;
    if (!membership_.IsGone(rank, now)) return false;
  }
  return true;
}

bool ServedJob::IsClaimed(uint32_t rank) const {
  const auto returning = returning_.find(rank);
  return returning != returning_.end() && returning->second.done != nullptr;
}

std::optional<uint32_t> ServedJob::FindSucceededRank(absl::Time now) const {
  if (GoesOnWithoutSome()) return std::nullopt;
  for (const auto& [rank, returning] : returning_) {
    if (returning.done && !returning.has_rank && IsSucceeded(returning.claim, now)) return rank;
  }
  return std::nullopt;
}

bool ServedJob::Join(const Membership::Claim& claim, uint64_t call, JoinDone done, absl::Time now,
                     Callbacks& callbacks) {
  if (Returns(claim)) {
    if (membership_.Holds(claim)) Hear(claim, now);
    AddReturning({claim, call, std::move(done)}, callbacks);
    bells_.late.Ring();
    return false;
  }
  const bool was_complete = membership_.complete();
  const bool must_wait = is_durable() && !is_saved_;
  for (Membership::EndedJoin& join : membership_.Join(claim, call, std::move(done), now)) {
    if (must_wait && join.result.ok()) {
      if (joins_.empty()) joins_held_since_ = now;
      joins_.push_back(std::move(join));
      bells_.snapshots.Ring();
    } else {
      if (join.result.ok()) has_welcomed_ = true;
      Finish(std::move(join.done), std::move(join.result), callbacks);
    }
  }
  return !was_complete && membership_.complete();
}

void ServedJob::CancelJoin(uint64_t call, const absl::Status& reason, Callbacks& callbacks) {
  for (Membership::EndedJoin& join : membership_.Cancel(call, reason)) {
    Finish(std::move(join.done), std::move(join.result), callbacks);
  }
  const auto join = absl::c_find_if(joins_, [&](const auto& join) { return join.call == call; });
  if (join != joins_.end()) {
    Finish(std::move(join->done), reason, callbacks);
    joins_.erase(join);
  }
  const auto returning = absl::c_find_if(returning_, [&](const auto& returning) {
    return returning.second.call == call && returning.second.done;
  });
  if (returning != returning_.end()) {
    Finish(std::exchange(returning->second.done, nullptr), reason, callbacks);
    // One that has the rank may call again.
    if (!returning->second.has_rank) returning_.erase(returning);
  }
}

void ServedJob::AddReturning(Returning returning, Callbacks& callbacks) {
  // Frames of later steps than these are sent by a process that is alive.
  returning.newest_step = job_->entry(returning.claim.rank).newest_step;
  for (const auto& [chunk, step] : job_->open_steps()) {
    returning.newest_step = std::max(returning.newest_step, step);
  }
  const auto [found, is_new] = returning_.try_emplace(returning.claim.rank);
  Returning& waiting = found->second;
  const bool is_same = !is_new && waiting.claim.incarnation == returning.claim.incarnation;
  if (!is_same && waiting.has_rank && membership_.IsConnected(returning.claim.rank)) {
    return Finish(std::move(returning.done), TakesPartError(returning.claim.rank), callbacks);
  }
  if (waiting.done) {
    Finish(std::move(waiting.done), absl::AbortedError("another call claimed the rank"), callbacks);
  }
  if (is_same) {
    waiting.claim = returning.claim;
    waiting.call = returning.call;
    waiting.done = std::move(returning.done);
  } else {
    waiting = std::move(returning);
  }
}

void ServedJob::AdmitReturning(absl::Time now, Callbacks& callbacks) {
  for (auto returning = returning_.begin(); returning != returning_.end();) {
    const bool stays = Admit(returning->second, now, callbacks);
    returning = stays ? std::next(returning) : returning_.erase(returning);
  }
  // What others have contributed since may have been missing. After an error the next attempt comes
  // by itself.
  if (state_error_.ok() && IsAwaited()) bells_.snapshots.Ring();
}

bool ServedJob::IsMissed(Returning& returning, absl::Time now) const {
  const uint32_t rank = returning.claim.rank;
  const bool is_gone = membership_.IsGone(rank, now);
  returning.gone_since = is_gone ? std::min(returning.gone_since, now) : absl::InfiniteFuture();
  return job_->is_absent(rank, now) || now - returning.gone_since >= membership_.grace() / 3;
}

bool ServedJob::Admit(Returning& returning, absl::Time now, Callbacks& callbacks) {
  const uint32_t rank = returning.claim.rank;
  if (!returning.has_rank) {
    const RollEntry entry = job_->entry(rank);
    // Who came back is absent until its first frame, and may be getting its state.
    const bool comes_back =
        entry.comes_back && !entry.has_given_up && membership_.IsConnected(rank);
    const bool may_have_rank = membership_.Holds(returning.claim) ||
                               (GoesOnWithoutSome() && IsMissed(returning, now) && !comes_back);
    if (!may_have_rank && entry.newest_step > returning.newest_step) {
      const absl::Status refusal = TakesPartError(rank);
      RecordRefusal(rank, refusal);
      Finish(std::move(returning.done), refusal, callbacks);
      return false;
    }
    // Without anybody who could give it the state it waits, too.
    if (!may_have_rank || membership_.AllGone(now)) return true;
    GiveRank(returning, callbacks);
  }
  if (is_durable()) return true;
  if (returning.done) Finish(std::move(returning.done), returning.welcome, callbacks);
  return false;
}

void ServedJob::GiveRank(Returning& returning, Callbacks& callbacks) {
  const uint32_t rank = returning.claim.rank;
  returning.welcome = WelcomeTo(*job_, generation_);
  returning.welcome.set_returning(true);
  if (const std::optional<double> lost = job_->MostErrorSquared(rank)) {
    returning.welcome.set_lost_error_squared(*lost);
  }
  returning.has_rank = true;
  const uint64_t before = membership_.incarnations()[rank];
  membership_.Return(returning.claim);
  const bool is_same_process = before == returning.claim.incarnation;
  returning.needed = job_->Withdraw(rank, is_same_process ? 0 : before);
  if (!is_same_process) {
    callbacks.push_back([job = job_, rank] { job->EndCallsOf(rank); });
  }
  uint64_t first_step = 0;
  for (const auto& [chunk, step] : returning.needed) first_step = std::max(first_step, step);
  returning.welcome.set_first_step(first_step);
  job_->Return(rank, first_step, is_same_process);
}

bool ServedJob::IsAwaited() const {
  if (!joins_.empty()) return true;
  if (returning_.empty() && leaves_.empty()) return false;
  const OpenSteps steps = job_->open_steps();
  return absl::c_any_of(returning_,
                        [&](const auto& returning) {
                          return returning.second.has_rank &&
                                 AllReached(steps, returning.second.needed);
                        }) ||
         absl::c_any_of(leaves_,
                        [&](const WaitingLeave& leave) { return AllReached(steps, leave.needed); });
}

bool ServedJob::IsSnapshotDue() const {
  if (!membership_.complete() || IsDeserted()) return false;
  // After an error of the job itself there is nothing left to save: only to tell those who leave.
  if (IsOfTheJobItself(state_error_)) return !leaves_.empty();
  return !is_saved_ || !state_error_.ok() || job_->snapshot_due() || IsAwaited();
}

DueSnapshot ServedJob::Snapshot() const {
  DueSnapshot due = {job_,
                     membership_.incarnations(),
                     membership_.left_ranks(),
                     job_->given_up_ranks(),
                     job_->maybe_returning_ranks(),
                     /*with_answers=*/!leaves_.empty() || IsAwaited()};
  // Once it is written they have left, whether or not they are told.
  for (const WaitingLeave& leave : leaves_) {
    if (!leave.stays && !IsTaken(leave)) due.left_ranks.push_back(leave.request.rank());
  }
  return due;
}

// Workers may forget what is before the snapshot before this one: if this one cannot be read when
// it is needed, that one still can be gone on from.
OpenSteps ServedJob::SetSaved(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                              absl::Duration duration, Callbacks& callbacks) {
  OpenSteps durable;
  state_error_ = saved.status();
  snapshots_.Add(saved.status(), duration);
  if (saved.ok()) {
    durable = std::exchange(saved_steps_, *saved);
    is_saved_ = true;
    Welcome(callbacks);
    WelcomeReturning(due, *saved, callbacks);
  }
  EndLeaves(due, saved, durable, callbacks);
  if (saved.ok() && IsAwaited()) bells_.snapshots.Ring();
  return durable;
}

void ServedJob::Welcome(Callbacks& callbacks) {
  if (joins_.empty()) return;
  Reach(Failpoint::kJoinDurable);
  has_welcomed_ = true;
  for (Membership::EndedJoin& join : std::exchange(joins_, {})) {
    Finish(std::move(join.done), std::move(join.result), callbacks);
  }
}

void ServedJob::WelcomeReturning(const DueSnapshot& due, const OpenSteps& saved,
                                 Callbacks& callbacks) {
  for (auto found = returning_.begin(); found != returning_.end();) {
    Returning& returning = found->second;
    const bool is_in_it = returning.has_rank && AllReached(saved, returning.needed) &&
                          due.incarnations[found->first] == returning.claim.incarnation;
    if (is_in_it) ++returning.snapshots;
    if (returning.snapshots < 2) {
      ++found;
      continue;
    }
    if (returning.done) {
      Finish(std::move(returning.done), std::move(returning.welcome), callbacks);
    }
    found = returning_.erase(found);
  }
}

void ServedJob::Leave(const LeaveRequest& request, LeaveDone done, Callbacks& callbacks) {
  const uint32_t rank = request.rank();
  // Who comes back and has contributed nothing yet is no loss to the others: they wait for another
  // in its place. Whether it was told to stop, or has come to the job's end, is not known; nor, of
  // one that came back to an earlier process, whether that has had frames of it: if so, all rounds
  // that it has had the answers of are here.
  const RollEntry entry = job_->entry(rank);
  const bool gives_up =
      (entry.may_come_back() || entry.has_given_up) && !membership_.has_left(rank);
  if (gives_up) {
    job_->GiveUp(rank, request.incarnation());
    callbacks.push_back([job = job_, rank] {
      job->EndCallsOf(rank);
      job->EndReturnsIfAlone();
    });
    bells_.late.Ring();
  }
  const bool stays = gives_up && WouldEndWithout(rank);
  if (!is_durable()) return EndMembership({request, std::move(done), stays}, callbacks);
  const bool others_go_on = !stays && job_->takes_back();
  leaves_.push_back({request, std::move(done), stays,
                     others_go_on ? job_->Withdraw(rank, request.incarnation()) : OpenSteps()});
  bells_.snapshots.Ring();
}

bool ServedJob::WouldEndWithout(uint32_t rank) const {
  std::set<uint32_t> left = {rank};
  for (const uint32_t other : membership_.left_ranks()) left.insert(other);
  for (const WaitingLeave& leave : leaves_) {
    if (!leave.stays) left.insert(leave.request.rank());
  }
  const size_t others = job_->world_size() - left.size();
  return 0 < others && others < job_->min_workers();
}

bool ServedJob::AllLeft() const {
  if (!leaves_.empty()) return false;
  for (uint32_t rank = 0; rank < job_->world_size(); ++rank) {
    if (!membership_.has_left(rank) && !job_->entry(rank).has_given_up) return false;
  }
  return true;
}

// Leaves that came meanwhile ring for themselves. After an error of the job itself there is nothing
// left to save.
void ServedJob::EndLeaves(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                          const OpenSteps& durable, Callbacks& callbacks) {
  for (WaitingLeave& leave : std::exchange(leaves_, {})) {
    const bool is_safe = saved.ok() && IsIn(due, leave, *saved, durable);
    if (is_safe || IsTaken(leave) || IsOfTheJobItself(saved.status())) {
      Reach(Failpoint::kLeaveDurable);
      EndMembership(std::move(leave), callbacks);
    } else {
      leaves_.push_back(std::move(leave));
    }
  }
}

bool ServedJob::IsIn(const DueSnapshot& due, const WaitingLeave& leave, const OpenSteps& saved,
                     const OpenSteps& durable) const {
  const uint32_t rank = leave.request.rank();
  if (leave.stays) return absl::c_linear_search(due.given_up_ranks, rank);
  // Others may go on without it, and its frames go with it: both snapshots must do without them.
  const OpenSteps& reached = job_->takes_back() ? durable : saved;
  return leave.request.steps() <= LeastOf(reached) && AllReached(durable, leave.needed) &&
         absl::c_linear_search(due.left_ranks, rank);
}

bool ServedJob::IsTaken(const WaitingLeave& leave) const {
  return !membership_.Holds({leave.request.rank(), leave.request.incarnation()});
}

void ServedJob::EndMembership(WaitingLeave leave, Callbacks& callbacks) {
  if (leave.stays || IsTaken(leave)) {
    return Finish(std::move(leave.done), absl::OkStatus(), callbacks);
  }
  membership_.Leave(leave.request.rank());
  const bool goes_on = job_->Leave(leave.request.rank());
  callbacks.push_back(
      [job = job_, &bell = bells_.late, goes_on, leave = std::move(leave)]() mutable {
        if (!goes_on) job->End(LeftError(leave.request.rank(), leave.request.job()));
        job->EndReturnsIfAlone();
        bell.Ring();
        leave.done(absl::OkStatus());
      });
}

absl::Status ServedJob::state_error() const {
  absl::Status error = state_error_;
  error.Update(late_error_);
  return error;
}

ServedJob::Halt ServedJob::FindHalt(absl::Time now) {
  const Halt halt = HaltAt(now);
  if (halt == Halt::kWithThoseWhoWait && IsLost(/*claimed=*/{}, now)) return halt;
  // Of an aggregator that was started again a rank hears with its next frame; and at the job's end
  // those that are cut off may come again, and go on if they are enough.
  const bool is_known = HasHeardOfAll() && (halt != Halt::kAtItsEnd || membership_.TooFewAreLeft());
  const bool seems_over = halt != Halt::kNo && (is_known || membership_.IsIdle(now));
  halted_since_ = seems_over ? std::min(halted_since_, now) : absl::InfiniteFuture();
  return now - halted_since_ >= membership_.grace() ? halt : Halt::kNo;
}

ServedJob::Halt ServedJob::HaltAt(absl::Time now) const {
  if (!job_->takes_back()) return Halt::kNo;
  bool somebody_waits = false;
  for (uint32_t rank = 0; rank < job_->world_size(); ++rank) {
    somebody_waits = somebody_waits || IsClaimed(rank);
    if (IsGoneOrHasLeft(rank, now)) continue;
    if (!job_->entry(rank).lacks_state) return Halt::kNo;
    somebody_waits = true;
  }
  if (somebody_waits) return Halt::kWithThoseWhoWait;
  return membership_.left_ranks().empty() ? Halt::kNo : Halt::kAtItsEnd;
}

bool ServedJob::IsToBeWatched() const {
  if (!membership_.complete() || !job_->takes_back()) return false;
  if (!returning_.empty() || halted_since_ < absl::InfiniteFuture()) return true;
  // At its end the last connection goes after the last Leave.
  if (!membership_.left_ranks().empty()) return true;
  for (uint32_t rank = 0; rank < job_->world_size(); ++rank) {
    if (job_->entry(rank).comes_back) return true;
  }
  return false;
}

void ServedJob::End(const absl::Status& reason) {
  Callbacks callbacks;
  for (Membership::EndedJoin& join : membership_.CancelAll(reason)) {
    Finish(std::move(join.done), std::move(join.result), callbacks);
  }
  for (Membership::EndedJoin& join : joins_) Finish(std::move(join.done), reason, callbacks);
  // Who would have come back joins the job that comes after this one; not where this came to its
  // end. Those that leave one that nobody has trained do so to begin it anew.
  const bool is_awaited = membership_.left_ranks().empty() || !job_->has_trained();
  EndReturning(is_awaited
                   ? absl::UnavailableError(absl::StrCat("the job begins anew, since its epoch ",
                                                         job_->id().epoch, " is over"))
                   : reason,
               callbacks);
  // Who leaves a job that is over has left it; in a process that ends it must ask the next.
  const absl::Status left = absl::IsUnavailable(reason) ? reason : absl::OkStatus();
  for (WaitingLeave& leave : leaves_) Finish(std::move(leave.done), left, callbacks);
  for (auto& callback : callbacks) callback();
  job_->End(reason);
}

void ServedJob::EndReturning(const absl::Status& reason, Callbacks& callbacks) {
  for (auto& [rank, returning] : returning_) {
    if (returning.done) Finish(std::move(returning.done), reason, callbacks);
  }
}

}  // namespace signpost
