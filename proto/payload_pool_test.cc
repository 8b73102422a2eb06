#include "proto/payload_pool.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "absl/base/config.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

constexpr size_t kMi = size_t{1} << 20;

#ifdef ABSL_HAVE_ADDRESS_SANITIZER
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

bool IsMapped(void* memory) {
  FILE* const maps = fopen("/proc/self/maps", "r");
  const auto address = reinterpret_cast<uintptr_t>(memory);
  uintptr_t begin, end;
  bool found = false;
  for (char line[512]; fgets(line, sizeof line, maps) != nullptr;) {
    if (sscanf(line, "%lx-%lx", &begin, &end) == 2) found |= begin <= address && address < end;
  }
  fclose(maps);
  return found;
}

TEST(PayloadPool, GivesTheSameMemoryAgain) {
  if (!kKeeps) GTEST_SKIP();
  PayloadPool pool;
  void* const first = pool.Take(kMi);
  std::memset(first, 1, kMi);
  void* const second = pool.Take(kMi);
  EXPECT_NE(first, second);
  pool.Give(first, kMi);
  EXPECT_EQ(pool.Take(kMi - 100), first) << "nearly that size will do";
  EXPECT_EQ(pool.mapped_bytes(), 2 * kMi);
  pool.Give(first, kMi - 100);
  pool.Give(second, kMi);
}

TEST(PayloadPool, LetsGoOfWhatIsIdleRatherThanTakeMore) {
  if (!kKeeps) GTEST_SKIP();
  PayloadPool pool;
  pool.KeepWithin(3 * kMi);
  void* const first = pool.Take(kMi);
  void* const second = pool.Take(kMi);
  EXPECT_EQ(pool.used_bytes(), 2 * kMi);
  pool.Give(first, kMi);
  pool.Give(second, kMi);
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_EQ(pool.idle_bytes(), 2 * kMi);
  void* const large = pool.Take(2 * kMi);
  EXPECT_EQ(pool.idle_bytes(), kMi);
  void* const larger = pool.Take(4 * kMi);
  EXPECT_EQ(pool.idle_bytes(), 0u) << "it gives what is asked for all the same";
  pool.Give(larger, 4 * kMi);
  EXPECT_EQ(pool.idle_bytes(), 0u);
  pool.Give(large, 2 * kMi);
  EXPECT_EQ(pool.idle_bytes(), 2 * kMi);
}

TEST(PayloadPool, IsAlignedToPagesAndLargeOnes) {
  PayloadPool pool;
  for (size_t bytes : {PayloadPool::kLeastBytes, kMi + 1, 2 * kMi, 5 * kMi + 7}) {
    void* const memory = pool.Take(bytes);
    const size_t alignment = bytes < 2 * kMi ? 4096 : 2 * kMi;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % alignment, 0u) << bytes;
    std::memset(memory, 1, bytes);
    pool.Give(memory, bytes);
  }
}

TEST(PayloadPool, SizesThatNobodyTakesGoBackToTheSystem) {
  if (!kKeeps) GTEST_SKIP();
  PayloadPool pool;
  void* const dense = pool.Take(32 * kMi);
  std::memset(dense, 1, 32 * kMi);
  pool.Give(dense, 32 * kMi);
  void* const one_bit = pool.Take(kMi);
  pool.Give(one_bit, kMi);
  EXPECT_TRUE(IsMapped(dense));
  for (uint32_t call = 0; call < PayloadPool::kCallsBetweenLooks; ++call) {
    pool.Give(pool.Take(kMi), kMi);
  }
  EXPECT_FALSE(IsMapped(dense));
  EXPECT_EQ(pool.Take(kMi), one_bit) << "what is taken all the time stays";
  EXPECT_EQ(pool.mapped_bytes(), 33 * kMi);
  pool.Give(one_bit, kMi);
}

TEST(PayloadPool, KeepsNoMoreThanTwiceWhatWasInUseWhateverSizesAreAskedFor) {
  PayloadPool pool;
  for (size_t bytes = kMi; bytes < 64 * kMi; bytes += kMi / 8) pool.Give(pool.Take(bytes), bytes);
  EXPECT_LE(pool.idle_bytes(), 2 * 64 * kMi);
}

TEST(PayloadPool, LeavesNothingBehind) {
  void* memory;
  {
    PayloadPool pool;
    memory = pool.Take(8 * kMi);
    pool.Give(memory, 8 * kMi);
    EXPECT_EQ(pool.idle_bytes(), kKeeps ? 8 * kMi : 0);
  }
  EXPECT_FALSE(IsMapped(memory) && kKeeps);
}

TEST(PayloadPool, RefusesWhatCannotBe) {
  PayloadPool pool;
  EXPECT_THROW(pool.Take(std::numeric_limits<size_t>::max()), std::bad_alloc);
  EXPECT_THROW(pool.Take(size_t{1} << 46), std::bad_alloc);
}

TEST(PayloadPool, IsForManyThreads) {
  PayloadPool pool;
  std::vector<std::thread> threads;
  for (uint8_t id = 1; id <= 4; ++id) {
    threads.emplace_back([&pool, id] {
      for (int i = 0; i < 1000; ++i) {
        const size_t bytes = (1 + i % 3) * (size_t{64} << 10);
        auto* const memory = static_cast<uint8_t*>(pool.Take(bytes));
        std::memset(memory, id, 64);
        memory[bytes - 1] = id;
        EXPECT_EQ(memory[63], id);
        pool.Give(memory, bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.used_bytes(), 0u);
  // At most one piece of each thread's is in use at once. How often they are at the same time, and
  // so how much is kept, is for the scheduler to say.
  EXPECT_LE(pool.idle_bytes(), 2 * 4 * 3 * (uint64_t{64} << 10));
}

}  // namespace
}  // namespace signpost
