#include "worker/chunk_crew.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>

#include "hwy/cache_control.h"
#include "kernels/block.h"

namespace signpost {

namespace {

// A thread that sleeps takes tens of microseconds to wake up, and the next chunk, or the end of
// this one, is seldom further away. So long a thread looks out for it first.
constexpr auto kWatch = std::chrono::microseconds(20);

template <class Condition>
void WatchFor(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kWatch;
  while (!condition() && std::chrono::steady_clock::now() < end) hwy::Pause();
}

}  // namespace

ChunkCrew::ChunkCrew(const Layout& layout, uint32_t threads)
    : block_elements_(layout.options().block_elements()) {
  const uint32_t piece_elements =
      std::max(block_elements_, kPieceElements / block_elements_ * block_elements_);
  size_t most_pieces = 0;
  for (const Chunk& chunk : layout.chunks()) {
    blocks_of_chunk_.push_back(chunk.blocks);
    std::vector<Piece>& pieces = pieces_of_chunk_.emplace_back();
    uint32_t room = 0;
    for (const Segment& segment : chunk.segments) {
      for (uint32_t begin = 0; begin < segment.elements; begin += piece_elements) {
        const uint32_t end = std::min(segment.elements - begin, piece_elements) + begin;
        if (end - begin > room) {
          pieces.emplace_back();
          room = piece_elements;
        }
        pieces.back().push_back(segment.Part(begin, end, block_elements_));
        room -= end - begin;
      }
    }
    most_pieces = std::max(most_pieces, pieces.size());
  }
  try {
    for (size_t thread = 1; thread < std::min<size_t>(threads, most_pieces); ++thread) {
      helpers_.emplace_back([this] { Help(); });
      pthread_setname_np(helpers_.back().native_handle(), "signpost-crew");
    }
  } catch (const std::system_error&) {
    // As many as there are do the same.
  }
}

ChunkCrew::~ChunkCrew() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
  }
  for (std::thread& helper : helpers_) helper.join();
}

void ChunkCrew::ForEachPart(uint32_t chunk, absl::FunctionRef<void(const Segment& part)> work) {
  {
    absl::MutexLock lock(&mutex_);
    pieces_ = pieces_of_chunk_[chunk];
    work_ = &work;
    next_ = 0;
    unfinished_ = pieces_.size();
    ++calls_;
    TakePieces();
  }
  WatchFor([this] { return IsDone(); });
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ChunkCrew::IsDone));
}

uint32_t ChunkCrew::Compress(uint32_t chunk,
                             absl::FunctionRef<size_t(const Segment& part)> compress) {
  std::atomic<uint32_t> first_not_packed = blocks_of_chunk_[chunk];
  ForEachPart(chunk, [&](const Segment& part) {
    const size_t packed = compress(part);
    if (packed == kernels::BlockCount(part.elements, block_elements_)) return;
    const uint32_t block = part.first_block + packed;
    uint32_t first = first_not_packed;
    while (block < first && !first_not_packed.compare_exchange_weak(first, block)) continue;
  });
  return first_not_packed;
}

void ChunkCrew::TakePieces() {
  while (HasPiece()) {
    const Piece& piece = pieces_[next_++];
    const auto& work = *work_;
    mutex_.Unlock();
    for (const Segment& part : piece) work(part);
    mutex_.Lock();
    --unfinished_;
  }
}

void ChunkCrew::Help() {
  while (true) {
    uint64_t calls;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &ChunkCrew::HasPieceOrStops));
      if (stops_) return;
      TakePieces();
      calls = calls_;
    }
    WatchFor([this, calls] { return calls_ != calls; });
  }
}

}  // namespace signpost
