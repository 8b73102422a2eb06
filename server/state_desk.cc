#include "server/state_desk.h"

#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

// A rank that was asked and has not given may be gone.
constexpr absl::Duration kAskAgain = absl::Seconds(5);

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
      if (wish.fetches.empty()) wish.ask_at = absl::InfinitePast();
      // What is left is what it takes the place of.
      std::swap(done, wish.fetches[header.rank()].done);
    } else {
      status = end_;
    }
  }
  if (done) done(status);
}

std::vector<uint32_t> StateDesk::TakeWanted(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  std::vector<uint32_t> chunks;
  for (auto& [chunk, wish] : wishes_) {
    if (now < wish.ask_at || chunks.size() == kMostAsked) continue;
    chunks.push_back(chunk);
    wish.ask_at = now + kAskAgain;
    for (auto& [rank, fetch] : wish.fetches) ++fetch.asked;
  }
  return chunks;
}

void StateDesk::PutBack(const std::vector<uint32_t>& chunks) {
  absl::MutexLock lock(&mutex_);
  for (const uint32_t chunk : chunks) {
    const auto wish = wishes_.find(chunk);
    if (wish == wishes_.end()) continue;
    wish->second.ask_at = absl::InfinitePast();
    for (auto& [rank, fetch] : wish->second.fetches) fetch.asked -= fetch.asked > 0 ? 1 : 0;
  }
}

std::set<uint32_t> StateDesk::WaitingRanks() const {
  absl::MutexLock lock(&mutex_);
  std::set<uint32_t> ranks;
  for (const auto& [chunk, wish] : wishes_) {
    for (const auto& [rank, fetch] : wish.fetches) ranks.insert(rank);
  }
  return ranks;
}

std::set<uint32_t> StateDesk::RanksInVain() const {
  absl::MutexLock lock(&mutex_);
  std::set<uint32_t> ranks;
  for (const auto& [chunk, wish] : wishes_) {
    for (const auto& [rank, fetch] : wish.fetches) {
      if (fetch.asked > 2) ranks.insert(rank);  // the third time is put when the second is over
    }
  }
  return ranks;
}

OwnedChunk::Reply StateDesk::Ask(const FrameHeader& header, const std::vector<uint32_t>& chunks) {
  auto answer = std::make_shared<Answer>();
  answer->header.set_step(header.step());
  answer->header.set_chunk(header.chunk());
  answer->header.set_codec(FETCH);
  answer->header.mutable_wanted_chunks()->Add(chunks.begin(), chunks.end());
  return {std::move(answer)};
}

OwnedChunk::Reply StateDesk::Give(Frame frame) {
  OwnedChunk::Reply receipt = ReplyOf(frame.header, STATE, Payload());
  const FrameHeader header = frame.header;
  OwnedChunk::Reply state = ReplyOf(header, STATE, std::move(frame.payload));
  state.later_rates.push_back(header.rates());
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
