// The ranks of a job: which process holds each, whose Join still waits, who has left. Pure: time is
// an argument.
//
// A job is complete once the Joins of all its ranks waited at the same time. Until then a rank is
// held by whoever claimed it last; from then on by that process, because its parameters are the
// only ones that match, until another is let in (Return) that gets them from the others, or until
// its connection is gone, which nobody keeps open but a process that is alive.

#ifndef SIGNPOST_SERVER_MEMBERSHIP_H_
#define SIGNPOST_SERVER_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/aggregator.pb.h"

namespace signpost {

// Not thread-safe. Calls that it ends are handed to its caller, to be finished without locks held.
class Membership {
 public:
  using JoinDone = absl::AnyInvocable<void(absl::StatusOr<JoinResponse>)>;
  struct Claim {
    uint32_t rank = 0;  // less than the world size
    uint64_t incarnation = 0;
    std::string peer = {};  // the connection that it came by; empty: that is not known
  };
  // How it is known that a process is gone.
  struct Connections {
    std::function<bool(const std::string& peer)> has;  // null: of none it is known
    // How long after Restore the processes of the ranks have to be heard of; and for how long a job
    // must be silent without a connection before another's need counts for more. One that is there
    // connects again as soon as its network lets it.
    absl::Duration grace = absl::InfiniteDuration();
    absl::Duration idle_timeout = absl::InfiniteDuration();  // see IsIdle
  };
  struct EndedJoin {
    uint64_t call = 0;
    JoinDone done;
    absl::StatusOr<JoinResponse> result;
  };

  // The job can go on while at least `min_workers` ranks have not left. `welcome` answers each
  // rank's Join. `connections` must outlive it.
  Membership(uint32_t world_size, uint32_t min_workers, JoinResponse welcome,
             const Connections& connections)
      : world_size_(world_size),
        min_workers_(min_workers),
        welcome_(std::move(welcome)),
        connections_(connections) {}

  // Of a complete job that goes on in another process. incarnations.size() is the world size.
  static Membership Restore(const std::vector<uint64_t>& incarnations,
                            const std::vector<uint32_t>& left_ranks, uint32_t min_workers,
                            JoinResponse welcome, const Connections& connections, absl::Time now);

  bool complete() const { return complete_; }
  std::vector<uint64_t> incarnations() const;  // by rank; requires complete()
  std::vector<uint32_t> left_ranks() const;
  bool Holds(const Claim& claim) const;

  // Whether a Join of this claim may wait, or be answered. ALREADY_EXISTS when the job is complete
  // and another incarnation holds the rank; FAILED_PRECONDITION when the rank has left.
  absl::Status CheckClaim(const Claim& claim, absl::Time now) const;

  // `call` waits until the job is complete; when it is, all waiting calls end with the welcome. A
  // call that waits for the same rank ends with ABORTED. Requires CheckClaim(claim).
  std::vector<EndedJoin> Join(const Claim& claim, uint64_t call, JoinDone done, absl::Time now);

  // Ends the waiting call of that number, if it is here, with `reason`. A rank whose process ran
  // out of time (DEADLINE_EXCEEDED) still counts as one that joined: others, who ask whom they
  // waited for, must not be told of it. For any other reason the process is gone.
  std::vector<EndedJoin> Cancel(uint64_t call, const absl::Status& reason);
  std::vector<EndedJoin> CancelAll(const absl::Status& reason);

  // Whether the rank's process is there no more: none of its connections is, or, after Restore, it
  // has not been heard of for `grace`; and whether none of those is that have not left. Both
  // require complete().
  bool IsGone(uint32_t rank, absl::Time now) const;
  bool AllGone(absl::Time now) const;
  std::set<uint32_t> GoneRanks(absl::Time now) const;  // requires complete()
  // For certain. Requires complete().
  bool IsConnected(uint32_t rank) const;
  bool has_left(uint32_t rank) const { return members_.at(rank).left; }  // requires complete()
  // It had been told a connection of the rank. Requires complete().
  bool HasHeardOf(uint32_t rank) const { return !members_.at(rank).peers.empty(); }
  // Nothing has come from any member for the connections' idle_timeout, or their grace.
  bool IsIdle(absl::Time now) const { return now - last_heard_ >= connections_.idle_timeout; }
  bool IsSilent(absl::Time now) const { return now - last_heard_ >= grace(); }
  absl::Duration grace() const { return connections_.grace; }
  // So many have left that no round can close.
  bool TooFewAreLeft() const { return world_size_ - left_ < min_workers_; }

  // Another process has the rank, whether it has left or not. Requires complete().
  void Return(const Claim& claim);

  // Requires complete().
  void Leave(uint32_t rank);
  bool AllLeft() const;

  // A member sent something.
  void Hear(const Claim& claim, absl::Time now);
  absl::Time last_heard() const { return last_heard_; }

  // Nobody waits for the job to begin any more. Not before the first Join.
  bool Deserted() const { return !complete_ && waiting_ == 0; }

  // Also of a rank that the job does not have, as of a larger world: so many of those.
  static constexpr size_t kMostForeignRefusals = 64;
  void RecordRefusal(uint32_t rank, std::string reason);

  // Sets joined_ranks, disconnected_ranks, refused_joins and, before the job is complete,
  // waiting_for_ranks and joining_us.
  void FillStatus(absl::Time now, JobStatus& status) const;

 private:
  struct Member {
    uint64_t incarnation = 0;
    std::vector<std::string> peers = {};  // its connections, the newest last
    uint64_t call = 0;
    JoinDone done;  // null: no Join waits
    bool left = false;
  };

  EndedJoin EndWait(Member& member, absl::StatusOr<JoinResponse> result);

  const uint32_t world_size_;
  const uint32_t min_workers_;
  const JoinResponse welcome_;
  const Connections& connections_;
  bool complete_ = false;
  std::map<uint32_t, Member> members_;  // by rank
  uint32_t waiting_ = 0;                // members whose Join waits
  uint32_t left_ = 0;                   // members that have left
  absl::Time first_join_;               // with waiting_ > 0: of those that wait
  absl::Time last_heard_ = absl::InfinitePast();
  absl::Time restored_ = absl::InfiniteFuture();
  std::map<uint32_t, std::string> refused_;  // by rank
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_MEMBERSHIP_H_
