#include "server/state_desk.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

// A rank that was asked and has not given may be gone.
constexpr absl::Duration kPatience = absl::Seconds(5);
constexpr double kSlowBytesPerSecond = 1e6;

// At once, of one rank: it makes a copy of each.
constexpr size_t kMostAsked = 16;

OwnedChunk::Reply ReplyOf(const FrameHeader& header, Codec codec, Payload payload) {
  auto answer = std::make_shared<Answer>();
  answer->header.set_step(header.step());
  answer->header.set_chunk(header.chunk());
  answer->header.set_codec(codec);
  answer->header.set_payload_crc32c(payload.size() == 0 ? 0 : header.payload_crc32c());
  answer->payload = std::move(payload);
  return {std::move(answer)};
}

}  // namespace

void StateDesk::Fetch(const FrameHeader& header, Done done) {
  absl::Status status = absl::AbortedError(
      absl::StrCat("rank ", header.rank(), " asked again for the state of chunk ", header.chunk()));
  {
    absl::MutexLock lock(&mutex_);
    if (end_.ok()) {
      Wish& wish = wishes_[header.chunk()];
      Waiting& fetch = wish.fetches[header.rank()];
      fetch.least_step = header.step();
      std::swap(done, fetch.done);  // what is left is what it takes the place of
    } else {
      status = end_;
    }
  }
  if (done) done(status);
}

std::vector<uint32_t> StateDesk::TakeWanted(const FrameHeader& header, absl::Time now,
                                            const std::set<uint32_t>& gone) {
  const uint32_t rank = header.rank();
  const AskedFrame frame = {rank, header.step(), header.chunk(), header.next_fetch()};
  // Of other chunks it may have had the answer of that step, and of none after it.
  const uint64_t newest_state = std::max(header.step(), header.answered_steps()) + 1;
  absl::MutexLock lock(&mutex_);
  std::vector<uint32_t> chunks;
  uint64_t bytes = 0;
  for (auto& [chunk, wish] : wishes_) {
    const bool is_too_old = absl::c_all_of(wish.fetches, [newest_state](const auto& fetch) {
      return newest_state < fetch.second.least_step;
    });
    if (is_too_old) continue;
    const bool is_lost = frame.next_fetch != 0 && wish.last == frame;
    const bool comes = !is_lost && !absl::c_includes(gone, wish.asked);
    const absl::Duration patience =
        comes ? wish.patience * (wish.asked.contains(rank) ? 2 : 1) : absl::ZeroDuration();
    if (now < wish.asked_at + patience || chunks.size() == kMostAsked) continue;
    chunks.push_back(chunk);
    bytes += layout_.PayloadBytes(STATE, chunk);
  }
  for (const uint32_t chunk : chunks) {
    Wish& wish = wishes_[chunk];
    wish.asked_at = now;
    wish.last = frame;
    wish.patience = kPatience + absl::Seconds(1) * (bytes / kSlowBytesPerSecond);
    wish.asked.insert(rank);
    for (auto& [waiting, fetch] : wish.fetches) fetch.asked_at = std::min(fetch.asked_at, now);
  }
  return chunks;
}

std::set<uint32_t> StateDesk::WaitingRanks() const {
  absl::MutexLock lock(&mutex_);
  std::set<uint32_t> ranks;
  for (const auto& [chunk, wish] : wishes_) {
    for (const auto& [rank, fetch] : wish.fetches) ranks.insert(rank);
  }
  return ranks;
}

std::set<uint32_t> StateDesk::RanksInVain(absl::Time now) const {
  absl::MutexLock lock(&mutex_);
  std::set<uint32_t> ranks;
  for (const auto& [chunk, wish] : wishes_) {
    for (const auto& [rank, fetch] : wish.fetches) {
      if (now >= fetch.asked_at + kInVain) ranks.insert(rank);
    }
  }
  return ranks;
}

void StateDesk::Withdraw(uint32_t rank, const absl::Status& reason) {
  std::vector<Done> ended;
  {
    absl::MutexLock lock(&mutex_);
    for (auto wish = wishes_.begin(); wish != wishes_.end();) {
      auto& fetches = wish->second.fetches;
      if (const auto fetch = fetches.find(rank); fetch != fetches.end()) {
        ended.push_back(std::move(fetch->second.done));
        fetches.erase(fetch);
      }
      wish = fetches.empty() ? wishes_.erase(wish) : std::next(wish);
    }
  }
  for (Done& done : ended) done(reason);
}

OwnedChunk::Reply StateDesk::Ask(const FrameHeader& header, const std::vector<uint32_t>& chunks) {
  auto answer = std::make_shared<Answer>();
  answer->header.set_step(header.step());
  answer->header.set_chunk(header.chunk());
  answer->header.set_codec(FETCH);
  answer->header.mutable_wanted_chunks()->Add(chunks.begin(), chunks.end());
  return {std::move(answer)};
}

OwnedChunk::Reply StateDesk::Receipt(const FrameHeader& header) {
  return ReplyOf(header, STATE, Payload());
}

OwnedChunk::Reply StateDesk::Give(Frame frame, uint64_t generation) {
  OwnedChunk::Reply receipt = Receipt(frame.header);
  const FrameHeader header = frame.header;
  OwnedChunk::Reply state = ReplyOf(header, STATE, std::move(frame.payload));
  state.later_rates.push_back(header.rates());
  state.generation = generation;
  Wish wish;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = wishes_.find(header.chunk());
    if (found == wishes_.end()) return receipt;
    wish = std::move(found->second);
    wishes_.erase(found);
  }
  for (auto& [rank, fetch] : wish.fetches) fetch.done(state);
  return receipt;
}

void StateDesk::End(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    end_.Update(reason);
  }
  Cancel(reason);
}

void StateDesk::Cancel(const absl::Status& reason) {
  std::map<uint32_t, Wish> wishes;
  {
    absl::MutexLock lock(&mutex_);
    wishes.swap(wishes_);
  }
  for (auto& [chunk, wish] : wishes) {
    for (auto& [rank, fetch] : wish.fetches) fetch.done(reason);
  }
}

}  // namespace signpost
