// In the steady state a step takes no memory of a payload's size: not from malloc, not from the
// system. What this program asks them for is counted here, which sanitizers do not allow.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "absl/types/span.h"
#include "proto/payload.h"
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
constexpr int kStepsBefore = 12;
constexpr int kSteps = 12;

// Has had more payloads than there are frames and answers at a time, copies included: how many are
// in use at once depends on how far the ranks are apart.
void HavePayloads() {
  constexpr int kMost = 60;
  for (size_t bytes : {kChunkElements / 8 + kChunkElements / 4096 * sizeof(float),
                       kChunkElements * sizeof(float)}) {
    EXPECT_GE(bytes, kLargeBytes) << "or they would not be counted";
    std::vector<Payload> payloads;
    for (int i = 0; i < kMost; ++i) {
      std::memset(payloads.emplace_back(bytes).data(), 0, bytes);
    }
  }
}

// Of all threads, both workers' and the aggregators', while the last steps were taken.
uint64_t AllocationsInSteadyState(Transport transport, const OptimizerOptions& optimizer) {
  Cluster cluster({.transport = transport, .aggregators = 2});
  std::vector<std::vector<float>> values(kWorkers, std::vector<float>(kElements, 1.0f));
  std::vector<std::unique_ptr<Worker>> workers(kWorkers);
  std::vector<std::vector<float>> gradients;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    gradients.push_back(GradientOf(rank, /*step=*/0, kElements));
  }
  OnEachRank(kWorkers, [&](uint32_t rank) {
    const WorkerOptions options = {.job = "test",
                                   .rank = rank,
                                   .world_size = kWorkers,
                                   .block_elements = 4096,
                                   .chunk_elements = kChunkElements};
    auto worker =
        Worker::Join(options, optimizer, {{"weights", {kElements}, absl::MakeSpan(values[rank])}},
                     cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    workers[rank] = *std::move(worker);
  });
  if (::testing::Test::HasFatalFailure()) return 0;
  OnEachRank(kWorkers, [&](uint32_t rank) {
    for (int step = 0; step < kStepsBefore + kSteps; ++step) {
      if (rank == 0 && step == kStepsBefore) {
        HavePayloads();
        large_allocations = 0;
        counting = true;
      }
      const auto report = workers[rank]->Step({gradients[rank]}, {{.learning_rate = 0.01}});
      ASSERT_TRUE(report.ok()) << report.status();
    }
    counting = false;
    EXPECT_TRUE(workers[rank]->Leave().ok());
  });
  return large_allocations;
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

TEST_F(Allocation, AOneBitStepTakesNoMemoryOfAPayloadsSize) {
  EXPECT_EQ(AllocationsInSteadyState(Transport::kLoopback,
                                     {.freeze_step = 2, .variance_refresh_interval = 0}),
            0u);
}

TEST_F(Allocation, ADenseStepTakesNoMemoryOfAPayloadsSize) {
  EXPECT_EQ(
      AllocationsInSteadyState(Transport::kLoopback, {.freeze_step = OptimizerOptions::kNever}),
      0u);
}

TEST_F(Allocation, NorDoesAnIntervalOfLocalSteps) {
  EXPECT_EQ(AllocationsInSteadyState(
                Transport::kLoopback,
                {.freeze_step = 1,
                 .zero_one = ZeroOneOptions{.local_step_scaler = 1, .local_step_clipper = 2}}),
            0u);
}

TEST_F(Allocation, NorDoesAStepOverGrpc) {
  EXPECT_EQ(AllocationsInSteadyState(Transport::kGrpc,
                                     {.freeze_step = 2, .variance_refresh_interval = 0}),
            0u);
}

}  // namespace
}  // namespace signpost::testing
