#include "worker/chunk_crew.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "proto/aggregator.pb.h"
#include "worker/crew_threads.h"

namespace signpost {
namespace {

constexpr uint32_t kPiece = ChunkCrew::kPieceElements;

Layout LayoutOf(const std::vector<uint64_t>& sizes, uint32_t block_elements = 4096) {
  std::vector<Tensor> tensors;
  for (const uint64_t size : sizes) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name("tensor " + std::to_string(tensors.size()));
    tensor.add_shape(size);
  }
  JobOptions options;
  options.set_block_elements(block_elements);
  options.set_chunk_elements(4 * kPiece);
  options.set_gamma(1.35f);
  return *Layout::Create(tensors, options);
}

// Parts by where they begin in their chunk.
using Parts = std::map<uint32_t, Segment>;

Parts PartsOf(ChunkCrew& crew, uint32_t chunk) {
  absl::Mutex mutex;
  Parts parts;
  crew.ForEachPart(chunk, [&](const Segment& part) {
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(parts.emplace(part.chunk_offset, part).second);
  });
  return parts;
}

TEST(ChunkCrew, PartsMakeUpEachSegmentOfTheChunk) {
  for (const uint32_t block_elements : {8u, 4096u, 65536u}) {
    // Tensors that span chunks, that are cut, and many that are not; whose last blocks are short.
    const Layout layout =
        LayoutOf({7 * kPiece + 13, 1, 100, 4096, 5000, 2 * kPiece, 3, 9 * kPiece}, block_elements);
    for (const uint32_t threads : {1u, 4u}) {
      ChunkCrew crew(layout, threads);
      for (uint32_t c = 0; c < layout.chunks().size(); ++c) {
        const Chunk& chunk = layout.chunks()[c];
        const Parts parts = PartsOf(crew, c);
        auto part = parts.begin();
        for (const Segment& segment : chunk.segments) {
          for (uint32_t begin = 0; begin < segment.elements; ++part) {
            ASSERT_NE(part, parts.end());
            const Segment& got = part->second;
            EXPECT_LE(got.elements, kPiece);
            EXPECT_EQ(begin % block_elements, 0);
            EXPECT_EQ(got.tensor, segment.tensor);
            EXPECT_EQ(got.tensor_offset, segment.tensor_offset + begin);
            EXPECT_EQ(got.chunk_offset, segment.chunk_offset + begin);
            EXPECT_EQ(got.first_block, segment.first_block + begin / block_elements);
            EXPECT_EQ(got.bits_offset, segment.bits_offset + begin / 8);
            begin += got.elements;
          }
        }
        EXPECT_EQ(part, parts.end());
      }
    }
  }
}

TEST(ChunkCrew, WithOneThreadAllIsDoneInOrderWhereItIsAskedFor) {
  const Layout layout = LayoutOf({4 * kPiece});
  ChunkCrew crew(layout, 1);
  uint32_t next = 0;
  crew.ForEachPart(0, [&](const Segment& part) {
    EXPECT_EQ(part.chunk_offset, next);
    next += part.elements;
  });
  EXPECT_EQ(next, 4 * kPiece);
}

TEST(ChunkCrew, HasNoMoreThreadsThanAChunkHasPieces) {
  for (const auto& [elements, wanted] :
       {std::pair(10u, 0), {kPiece, 0}, {kPiece + 1, 1}, {20 * kPiece, 2}}) {
    const Layout layout = LayoutOf({elements});
    const ChunkCrew crew(layout, 3);
    EXPECT_EQ(CrewThreads(), wanted) << elements;
  }
  EXPECT_EQ(CrewThreads(), 0);
}

TEST(ChunkCrew, CompressReturnsTheFirstBlockThatIsNotPacked) {
  const Layout layout = LayoutOf({3 * kPiece, 10, kPiece - 4096});
  const uint32_t blocks = layout.chunks()[0].blocks;
  for (const uint32_t threads : {1u, 4u}) {
    ChunkCrew crew(layout, threads);
    for (const std::set<uint32_t>& bad :
         std::vector<std::set<uint32_t>>{{}, {0}, {blocks - 1}, {40, 41, blocks - 1}, {31, 70}}) {
      const uint32_t first = crew.Compress(0, [&](const Segment& part) {
        const size_t part_blocks = (part.elements + 4095) / 4096;
        for (size_t block = 0; block < part_blocks; ++block) {
          if (bad.contains(part.first_block + block)) return block;
        }
        return part_blocks;
      });
      EXPECT_EQ(first, bad.empty() ? blocks : *bad.begin());
    }
  }
}

}  // namespace
}  // namespace signpost
