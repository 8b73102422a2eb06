// In the steady state a step takes no memory of a payload's size: not from malloc, not from the
// system, and not from the pool without giving it back. What this program asks them for is counted
// here, which sanitizers do not allow.

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/payload.h"
#include "proto/payload_pool.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "worker/worker.h"

#if !defined(ABSL_HAVE_ADDRESS_SANITIZER) && !defined(ABSL_HAVE_THREAD_SANITIZER)
#define SIGNPOST_COUNTS_ALLOCATIONS 1
#endif

namespace {

// More than gRPC's own pieces of what it receives, which malloc keeps.
constexpr size_t kLargeBytes = size_t{96} << 10;

std::atomic<bool> counting = false;
std::atomic<uint64_t> large_allocations = 0;

[[maybe_unused]] void Count(size_t bytes) {
  if (bytes >= kLargeBytes && counting) ++large_allocations;
}

}  // namespace

#ifdef SIGNPOST_COUNTS_ALLOCATIONS

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  Count(bytes);
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  Count(count * bytes);
  return __libc_calloc(count, bytes);
}

void* realloc(void* memory, size_t bytes) {
  Count(bytes);
  return __libc_realloc(memory, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  Count(bytes);
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  Count(bytes);
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  Count(bytes);
  const long result = syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
  return reinterpret_cast<void*>(result);
}

}  // extern "C"

#endif  // SIGNPOST_COUNTS_ALLOCATIONS

namespace signpost::testing {
namespace {

constexpr uint32_t kWorkers = 2;
constexpr size_t kElements = size_t{2} << 20;
constexpr uint32_t kChunkElements = 1 << 20;  // 128 KiB in one bit
constexpr uint32_t kChunks = kElements / kChunkElements;
// Whole intervals, of refreshes and of local steps, and calls of the pool for several of its looks.
constexpr int kSteps = 128;
constexpr int kStepsBefore = 128;
constexpr int kInterval = 8;

// The pool's, of what all threads use.
struct PoolBytes {
  uint64_t used;
  uint64_t mapped;

  static PoolBytes Now() {
    const PayloadPool& pool = PayloadPool::Global();
    return {.used = pool.used_bytes(), .mapped = pool.mapped_bytes()};
  }
};

// Two ranks of one job, and its two aggregators.
class Job {
 public:
  Job(Transport transport, const OptimizerOptions& optimizer)
      : cluster_({.transport = transport, .aggregators = 2}) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      gradients_.push_back(GradientOf(rank, /*step=*/0, kElements));
    }
    OnEachRank(kWorkers, [&](uint32_t rank) {
      const WorkerOptions options = {.job = "test",
                                     .rank = rank,
                                     .world_size = kWorkers,
                                     .block_elements = 4096,
                                     .chunk_elements = kChunkElements};
      auto worker = Worker::Join(options, optimizer,
                                 {{"weights", {kElements}, absl::MakeSpan(values_[rank])}},
                                 cluster_.Connect());
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers_[rank] = *std::move(worker);
    });
  }

  ~Job() {
    OnEachRank(kWorkers, [&](uint32_t rank) { EXPECT_TRUE(workers_[rank]->Leave().ok()); });
  }

  // Of all ranks, one part after the other. The window has room for all chunks, so that no part
  // waits for the other rank.
  void Step() {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      const absl::Status begun = workers_[rank]->BeginStep({{.learning_rate = 0.01}});
      ASSERT_TRUE(begun.ok()) << begun;
      const absl::Status sent = workers_[rank]->GradientReady(0, gradients_[rank]);
      ASSERT_TRUE(sent.ok()) << sent;
    }
    for (const auto& worker : workers_) {
      const auto report = worker->FinishStep();
      ASSERT_TRUE(report.ok()) << report.status();
    }
  }

  // Of one rank, which waits for the other.
  void StepOf(uint32_t rank) {
    const auto report = workers_[rank]->Step({gradients_[rank]}, {{.learning_rate = 0.01}});
    ASSERT_TRUE(report.ok()) << report.status();
  }

 private:
  Cluster cluster_;
  std::vector<std::vector<float>> values_{kWorkers, std::vector<float>(kElements, 1.0f)};
  std::vector<std::vector<float>> gradients_;
  std::vector<std::unique_ptr<Worker>> workers_{kWorkers};
};

// What threads that look for calls that have expired have from malloc at a time. Steps that kept as
// little as malloc gives, 32 bytes each, would come to more.
constexpr size_t kInPassing = 1024;
static_assert(kInPassing < kSteps * 32 / 2);  // malloc counts some that it has ready as in use

// On loopback all happens on one thread, in the same order in each step; so what steps take once
// the first ones are over is known exactly: of the pool and of malloc nothing, and of the system
// the pages of so many dense momenta of a chunk, which it has back.
void ExpectNoMemoryIsTaken(const OptimizerOptions& optimizer, uint64_t momenta = 0) {
  Job job(Transport::kLoopback, optimizer);
  for (int step = 0; step < kStepsBefore; ++step) job.Step();
  const PoolBytes before = PoolBytes::Now();
  const size_t allocated_before = mallinfo2().uordblks;
  large_allocations = 0;
  counting = true;
  for (int step = 0; step < kSteps; ++step) job.Step();
  counting = false;
  const size_t allocated = mallinfo2().uordblks;
  EXPECT_EQ(large_allocations, momenta);
  EXPECT_EQ(PoolBytes::Now().used, before.used);
  EXPECT_EQ(PoolBytes::Now().mapped, before.mapped);
  EXPECT_LT(allocated, allocated_before + kInPassing);
}

class Allocation : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef SIGNPOST_COUNTS_ALLOCATIONS
    GTEST_SKIP() << "sanitizers have a malloc of their own";
#endif
  }
};

TEST_F(Allocation, WhatIsCountedIsCounted) {
  const Payload first(kLargeBytes);  // a mutex's first use takes memory too
  large_allocations = 0;
  counting = true;
  const std::vector<float> vector(1 << 20);
  const auto payload = std::make_unique<Payload>(77 << 20);  // of a size that nobody has had
  counting = false;
  EXPECT_EQ(large_allocations, 2u);
}

TEST_F(Allocation, OneBitStepsTakeNone) { ExpectNoMemoryIsTaken({.freeze_step = 2}); }

TEST_F(Allocation, DenseStepsTakeNone) {
  ExpectNoMemoryIsTaken({.freeze_step = OptimizerOptions::kNever});
}

TEST_F(Allocation, StepsInIntegersTakeNone) {
  ExpectNoMemoryIsTaken({.freeze_step = 2, .warm_up_codec = INT8, .codec = INT8});
}

TEST_F(Allocation, StepsInIntegersOfFourBitsTakeNone) {
  ExpectNoMemoryIsTaken({.freeze_step = 2, .warm_up_codec = INT4, .codec = INT4});
}

TEST_F(Allocation, StepsInBf16TakeNone) {
  ExpectNoMemoryIsTaken({.freeze_step = 2, .warm_up_codec = BFLOAT16, .codec = BFLOAT16});
}

TEST_F(Allocation, StepsInFp16TakeNone) {
  ExpectNoMemoryIsTaken({.freeze_step = 2, .warm_up_codec = FLOAT16, .codec = FLOAT16});
}

// Dense momenta, while one-bit rounds have none.
constexpr uint64_t kMomentaOfRefreshes = kSteps / kInterval * kChunks * kWorkers;

TEST_F(Allocation, RefreshesTakeTheirMomentaOnly) {
  ExpectNoMemoryIsTaken({.freeze_step = 2, .variance_refresh_interval = kInterval},
                        kMomentaOfRefreshes);
}

TEST_F(Allocation, RefreshesInInt8TakeTheirMomentaOnly) {
  ExpectNoMemoryIsTaken(
      {.freeze_step = 2, .variance_codec = INT8, .variance_refresh_interval = kInterval},
      kMomentaOfRefreshes);
}

TEST_F(Allocation, RefreshesOfOneBitLambTakeTheirMomentaOnly) {
  ExpectNoMemoryIsTaken(
      {.freeze_step = 2, .variance_refresh_interval = kInterval, .lamb = LambOptions()},
      kMomentaOfRefreshes);
}

TEST_F(Allocation, IntervalsOfLocalStepsTakeNone) {
  ExpectNoMemoryIsTaken(
      {.freeze_step = 1,
       .zero_one = ZeroOneOptions{.local_step_scaler = 1, .local_step_clipper = 2}});
}

// As many payloads as a step can have at once, of which each is of the larger size: of each chunk
// what a rank has kept, and what it sends; that at the aggregator; the answer, the one before, and
// both at each rank.
void HaveAsManyAsAStep() {
  constexpr int kMost = kChunks * (kWorkers * (2 + 1 + 2) + 2);
  constexpr size_t kBytes = kChunkElements / 8 + kChunkElements / 4096 * sizeof(float);
  static_assert(kBytes >= kLargeBytes);
  std::vector<Payload> payloads;
  for (int i = 0; i < kMost; ++i) std::memset(payloads.emplace_back(kBytes).data(), 0, kBytes);
}

// Over gRPC threads decide how many payloads there are at the same time, so steps before cannot
// have had the most that there will be: the pool has had it. That hides none that is not given
// back, which is in use after the last step and was not before the first. gRPC may hold the last
// frames a little longer than the step takes.
TEST_F(Allocation, StepsOverGrpcTakeNone) {
  Job job(Transport::kGrpc, {.freeze_step = 2});
  const auto take_steps = [&job](int steps) {
    OnEachRank(kWorkers, [&](uint32_t rank) {
      for (int step = 0; step < steps; ++step) job.StepOf(rank);
    });
  };
  take_steps(kStepsBefore);
  HaveAsManyAsAStep();
  const PoolBytes before = PoolBytes::Now();
  large_allocations = 0;
  counting = true;
  take_steps(kSteps);
  counting = false;
  EXPECT_EQ(large_allocations, 0u);
  EXPECT_EQ(PoolBytes::Now().mapped, before.mapped);
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (PoolBytes::Now().used > before.used && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_LE(PoolBytes::Now().used, before.used);
}

}  // namespace
}  // namespace signpost::testing
