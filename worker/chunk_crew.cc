#include "worker/chunk_crew.h"

#include <algorithm>
#include <atomic>

#include "kernels/block.h"
#include "worker/helper_threads.h"

namespace signpost {

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
  const size_t useful = std::min<size_t>(threads, most_pieces);
  if (useful > 1) helpers_ = HelperThreads::AtLeast(useful - 1);
}

ChunkCrew::~ChunkCrew() = default;

void ChunkCrew::ForEachPart(uint32_t chunk, absl::FunctionRef<void(const Segment& part)> work) {
  const std::vector<Piece>& pieces = pieces_of_chunk_[chunk];
  const auto work_on_piece = [&](size_t i) {
    for (const Segment& part : pieces[i]) work(part);
  };
  if (helpers_ != nullptr) return helpers_->Share(pieces.size(), work_on_piece);
  for (size_t i = 0; i < pieces.size(); ++i) work_on_piece(i);
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

}  // namespace signpost
