#include "tests/simulation/arrivals.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"

namespace signpost::simulation {

void Arrivals::AddJoin(uint32_t rank, uint64_t rank_incarnation) {
  claims_[rank] = rank_incarnation;
  there_since_.erase(rank);
  for (auto& [key, round] : open_) round->is_in_time.erase(rank);
}

void Arrivals::Begin(uint64_t incarnation) {
  if (incarnation == incarnation_) return;
  incarnation_ = incarnation;
  open_.clear();
  there_since_.clear();
}

bool Arrivals::IsInTime(uint32_t rank, const Round& round, absl::Time now) const {
  const auto there_since = there_since_.find(rank);
  return there_since != there_since_.end() && there_since->second < round.since &&
         now < round.since + round_deadline_;
}

bool Arrivals::MayBeLeftOut(uint32_t rank, absl::Time now) const {
  return absl::c_any_of(open_, [&](const auto& entry) {
    const Round& round = *entry.second;
    const auto arrival = round.is_in_time.find(rank);
    return arrival == round.is_in_time.end() ? !IsInTime(rank, round, now) : !arrival->second;
  });
}

bool Arrivals::AddFrame(uint64_t incarnation, const FrameHeader& header, absl::Time now) {
  Begin(incarnation);
  const uint32_t rank = header.rank();
  const auto claim = claims_.find(rank);
  const bool has_rank = claim != claims_.end() && claim->second == header.incarnation();
  const Key key = {header.epoch(), header.chunk(), header.step()};
  const auto [round, is_first] = rounds_[key].try_emplace(incarnation, Round{now});
  if (is_first) open_[key] = &round->second;
  const bool is_new = !round->second.is_in_time.contains(rank);
  if (is_new) {
    // A round does not close before it has a frame.
    const bool is_in_time =
        has_rank && (is_first || (IsInTime(rank, round->second, now) && !MayBeLeftOut(rank, now)));
    round->second.is_in_time[rank] = is_in_time;
  }
  if (has_rank) there_since_.try_emplace(rank, now);
  return is_new;
}

void Arrivals::RemoveFrame(uint64_t incarnation, const FrameHeader& header, bool is_first) {
  Begin(incarnation);
  Round& round = rounds_[{header.epoch(), header.chunk(), header.step()}][incarnation];
  if (is_first) round.is_in_time.erase(header.rank());
  there_since_.erase(header.rank());
}

void Arrivals::AddAnswer(uint64_t incarnation, const FrameHeader& header,
                         const AnswerHeader& answer, absl::Time now) {
  Begin(incarnation);
  const Key key = {header.epoch(), answer.chunk(), answer.step()};
  std::map<uint64_t, Round>& rounds = rounds_[key];
  Round& here = rounds[incarnation];
  if (here.is_answered) return;
  here.is_answered = true;
  // After a restart it closes as the process before may have closed it.
  const bool is_first = rounds.size() == 1;
  std::vector<uint32_t> have_time;
  for (const uint32_t rank : answer.late_ranks()) {
    if (is_first && IsInTime(rank, here, now) && !MayBeLeftOut(rank, now))
      have_time.push_back(rank);
  }
  open_.erase(key);
  for (const uint32_t rank : answer.late_ranks()) {
    there_since_.erase(rank);
    const bool may_be_late = round_deadline_ < absl::InfiniteDuration() &&
                             absl::c_any_of(rounds, [rank](const auto& entry) {
                               const auto arrival = entry.second.is_in_time.find(rank);
                               return arrival == entry.second.is_in_time.end() || !arrival->second;
                             });
    if (may_be_late) continue;
    report_(absl::StrFormat("rank %d is called late for step %d, chunk %d, but was in time", rank,
                            answer.step(), answer.chunk()));
  }
  for (const uint32_t rank : have_time) {
    report_(absl::StrFormat("rank %d is called late for step %d, chunk %d, but still has time",
                            rank, answer.step(), answer.chunk()));
  }
}

}  // namespace signpost::simulation
