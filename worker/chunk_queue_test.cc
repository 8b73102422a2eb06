#include "worker/chunk_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace signpost {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<uint32_t> TakeAll(ChunkQueue& queue) {
  std::vector<uint32_t> chunks;
  while (const std::optional<uint32_t> chunk = queue.TakeNext()) chunks.push_back(*chunk);
  return chunks;
}

TEST(ChunkQueue, SendsInTheOrderOfReadinessAsFarAsTheWindowAllows) {
  ChunkQueue queue(/*chunks=*/10, /*window=*/3);
  for (const uint32_t chunk : {9, 5, 8, 7, 6}) queue.SetReady(chunk);
  EXPECT_THAT(TakeAll(queue), ElementsAre(9, 5, 8));
  queue.SetAnswered(5);
  EXPECT_THAT(TakeAll(queue), ElementsAre(7));
}

TEST(ChunkQueue, SendsNothingThatIsNotReady) {
  ChunkQueue queue(/*chunks=*/2, /*window=*/3);
  EXPECT_THAT(TakeAll(queue), IsEmpty());
  queue.SetReady(1);
  EXPECT_THAT(TakeAll(queue), ElementsAre(1));
  EXPECT_THAT(TakeAll(queue), IsEmpty());
}

TEST(ChunkQueue, AscendingChunksNeverExceedTheWindow) {
  ChunkQueue queue(/*chunks=*/9, /*window=*/3);
  for (uint32_t chunk = 0; chunk < 9; ++chunk) queue.SetReady(chunk);
  EXPECT_THAT(TakeAll(queue), ElementsAre(0, 1, 2));
  queue.SetAnswered(2);
  EXPECT_THAT(TakeAll(queue), ElementsAre(3));
  queue.SetAnswered(0);
  EXPECT_THAT(TakeAll(queue), ElementsAre(4));
}

TEST(ChunkQueue, TheFirstUnansweredChunksAreSentWhateverIsUnderWay) {
  ChunkQueue queue(/*chunks=*/10, /*window=*/3);
  for (const uint32_t chunk : {9, 8, 7, 6, 5, 4}) queue.SetReady(chunk);
  EXPECT_THAT(TakeAll(queue), ElementsAre(9, 8, 7));
  for (const uint32_t chunk : {3, 2, 0, 1}) queue.SetReady(chunk);
  EXPECT_THAT(TakeAll(queue), ElementsAre(0, 1, 2));
  queue.SetAnswered(0);
  EXPECT_THAT(TakeAll(queue), ElementsAre(3));
}

TEST(ChunkQueue, IsDoneWhenAllAreAnswered) {
  ChunkQueue queue(/*chunks=*/2, /*window=*/1);
  for (const uint32_t chunk : {1, 0}) {
    EXPECT_FALSE(queue.all_answered());
    queue.SetReady(chunk);
    EXPECT_THAT(TakeAll(queue), ElementsAre(chunk));
    queue.SetAnswered(chunk);
  }
  EXPECT_TRUE(queue.all_answered());
}

// A chunk is answered once all ranks have sent it.
TEST(ChunkQueue, RanksWithAnyOrdersComeToAnEnd) {
  constexpr uint32_t kChunks = 60, kRanks = 3, kWindow = 4;
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<ChunkQueue> queues(kRanks, ChunkQueue(kChunks, kWindow));
    std::vector<uint32_t> sent(kChunks), order(kChunks);
    for (ChunkQueue& queue : queues) {
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const uint32_t chunk : order) queue.SetReady(chunk);
    }
    for (bool moves = true; moves;) {
      moves = false;
      for (ChunkQueue& sender : queues) {
        for (const uint32_t chunk : TakeAll(sender)) {
          moves = true;
          if (++sent[chunk] < kRanks) continue;
          for (ChunkQueue& queue : queues) queue.SetAnswered(chunk);
        }
      }
    }
    for (const ChunkQueue& queue : queues) ASSERT_TRUE(queue.all_answered()) << trial;
  }
}

}  // namespace
}  // namespace signpost
