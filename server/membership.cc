#include "server/membership.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost {
namespace {

// More than a worker may have connections.
constexpr size_t kMostPeers = 64;

}  // namespace

Membership Membership::Restore(const std::vector<uint64_t>& incarnations,
                               const std::vector<uint32_t>& left_ranks, uint32_t min_workers,
                               JoinResponse welcome, const Connections& connections,
                               absl::Time now) {
  Membership membership(incarnations.size(), min_workers, std::move(welcome), connections);
  for (uint32_t rank = 0; rank < incarnations.size(); ++rank) {
    membership.members_[rank].incarnation = incarnations[rank];
  }
  membership.complete_ = true;
  for (const uint32_t rank : left_ranks) membership.Leave(rank);
  membership.last_heard_ = membership.restored_ = now;
  return membership;
}

std::vector<uint64_t> Membership::incarnations() const {
  std::vector<uint64_t> incarnations;
  for (const auto& [rank, member] : members_) incarnations.push_back(member.incarnation);
  return incarnations;
}

std::vector<uint32_t> Membership::left_ranks() const {
  std::vector<uint32_t> ranks;
  for (const auto& [rank, member] : members_) {
    if (member.left) ranks.push_back(rank);
  }
  return ranks;
}

bool Membership::Holds(const Claim& claim) const {
  const auto member = members_.find(claim.rank);
  return member != members_.end() && member->second.incarnation == claim.incarnation;
}

absl::Status Membership::CheckClaim(const Claim& claim, absl::Time now) const {
  if (!complete_) return absl::OkStatus();
  if (!Holds(claim)) {
    const std::vector<std::string>& peers = members_.at(claim.rank).peers;
    return absl::AlreadyExistsError(absl::StrFormat(
        "rank %d is held by another process%s, and the job was last heard of %s ago. End that "
        "process first, or take another name for this job (SIGNPOST_JOB, or torchrun's --rdzv_id)",
        claim.rank, peers.empty() ? "" : absl::StrCat(", connected from ", peers.back()),
        absl::FormatDuration(absl::Trunc(now - last_heard_, absl::Milliseconds(1)))));
  }
  if (members_.at(claim.rank).left) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", claim.rank, " has left, and a rank cannot come back"));
  }
  return absl::OkStatus();
}

std::vector<Membership::EndedJoin> Membership::Join(const Claim& claim, uint64_t call,
                                                    JoinDone done, absl::Time now) {
  std::vector<EndedJoin> ended;
  if (complete_) {
    Hear(claim, now);
    ended.push_back({call, std::move(done), welcome_});
    return ended;
  }
  if (waiting_ == 0) first_join_ = now;
  Member& member = members_[claim.rank];
  if (member.done) {
    const absl::string_view by = member.incarnation == claim.incarnation
                                     ? "the same process called again"
                                     : "another process claimed the rank";
    ended.push_back(EndWait(member, absl::AbortedError(absl::StrCat(
                                        "rank ", claim.rank, " no longer waits here: ", by))));
  }
  if (member.incarnation != claim.incarnation) member.peers.clear();
  member.incarnation = claim.incarnation;
  Hear(claim, now);
  member.call = call;
  member.done = std::move(done);
  ++waiting_;
  if (waiting_ < world_size_) return ended;

  complete_ = true;
  for (auto& [rank, waiting] : members_) ended.push_back(EndWait(waiting, welcome_));
  return ended;
}

std::vector<Membership::EndedJoin> Membership::Cancel(uint64_t call, const absl::Status& reason) {
  std::vector<EndedJoin> ended;
  for (auto member = members_.begin(); member != members_.end(); ++member) {
    if (!member->second.done || member->second.call != call) continue;
    ended.push_back(EndWait(member->second, reason));
    if (!absl::IsDeadlineExceeded(reason)) members_.erase(member);
    break;
  }
  return ended;
}

std::vector<Membership::EndedJoin> Membership::CancelAll(const absl::Status& reason) {
  std::vector<EndedJoin> ended;
  for (auto& [rank, member] : members_) {
    if (member.done) ended.push_back(EndWait(member, reason));
  }
  return ended;
}

Membership::EndedJoin Membership::EndWait(Member& member, absl::StatusOr<JoinResponse> result) {
  --waiting_;
  return {member.call, std::exchange(member.done, nullptr), std::move(result)};
}

void Membership::Return(const Claim& claim) {
  Member& member = members_.at(claim.rank);
  if (member.left) --left_;
  member.left = false;
  member.incarnation = claim.incarnation;
  member.peers.clear();
  if (!claim.peer.empty()) member.peers.push_back(claim.peer);
}

void Membership::Leave(uint32_t rank) {
  bool& left = members_.at(rank).left;
  if (!left) ++left_;
  left = true;
}

void Membership::Hear(const Claim& claim, absl::Time now) {
  last_heard_ = now;
  const auto member = members_.find(claim.rank);
  if (member == members_.end() || claim.peer.empty()) return;
  std::vector<std::string>& peers = member->second.peers;
  if (absl::c_linear_search(peers, claim.peer)) return;
  if (connections_.has != nullptr) {
    std::erase_if(peers, [&](const std::string& peer) { return !connections_.has(peer); });
  }
  if (peers.size() == kMostPeers) peers.erase(peers.begin());
  peers.push_back(claim.peer);
}

bool Membership::IsGone(uint32_t rank, absl::Time now) const {
  if (connections_.has == nullptr) return false;
  const std::vector<std::string>& peers = members_.at(rank).peers;
  return peers.empty() ? now - restored_ >= connections_.grace
                       : absl::c_none_of(peers, connections_.has);
}

std::set<uint32_t> Membership::GoneRanks(absl::Time now) const {
  std::set<uint32_t> gone;
  for (const auto& [rank, member] : members_) {
    if (IsGone(rank, now)) gone.insert(rank);
  }
  return gone;
}

bool Membership::IsConnected(uint32_t rank) const {
  return connections_.has != nullptr && absl::c_any_of(members_.at(rank).peers, connections_.has);
}

bool Membership::AllGone(absl::Time now) const {
  return absl::c_all_of(members_, [&](const auto& member) {
    return member.second.left || IsGone(member.first, now);
  });
}

bool Membership::AllLeft() const { return left_ == world_size_; }

void Membership::RecordRefusal(uint32_t rank, std::string reason) {
  const auto first_foreign = refused_.lower_bound(world_size_);
  const size_t foreign = std::distance(first_foreign, refused_.end());
  if (rank >= world_size_ && foreign >= kMostForeignRefusals && !refused_.contains(rank)) return;
  refused_[rank] = std::move(reason);
}

void Membership::FillStatus(absl::Time now, JobStatus& status) const {
  if (!complete_ && waiting_ > 0) {
    const absl::Duration joining = std::max(now - first_join_, absl::ZeroDuration());
    status.set_joining_us(absl::ToInt64Microseconds(joining));
  }
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    const auto member = members_.find(rank);
    if (member == members_.end()) {
      status.add_waiting_for_ranks(rank);
    } else if (!member->second.left) {
      status.add_joined_ranks(rank);
      if (complete_ && IsGone(rank, now)) status.add_disconnected_ranks(rank);
    }
  }
  for (const auto& [rank, reason] : refused_) {
    RefusedJoin& refused = *status.add_refused_joins();
    refused.set_rank(rank);
    refused.set_reason(reason);
  }
}

}  // namespace signpost
