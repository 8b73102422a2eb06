// The system's clock is set forward by an hour while a job runs and an aggregator is killed. Only
// this process's clock: it has functions of its own in place of the C library's. Setting it back is
// not tried: gRPC's timers are Abseil's waits, and those end by the system's clock.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/job.h"

namespace {

std::atomic<int64_t> clock_offset_s = 0;

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) {
  static const auto original =
      reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = original(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += clock_offset_s;
  return result;
}

// Abseil waits until a moment of the system's clock; the kernel does not know of ours.
extern "C" long syscall(long number, ...) {
  static const auto original = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  timespec until;
  const bool is_timed =
      number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 && arguments[3] != 0;
  if (is_timed) {
    until = *reinterpret_cast<const timespec*>(arguments[3]);
    until.tv_sec -= clock_offset_s;
    arguments[3] = reinterpret_cast<long>(&until);
  }
  return original(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                  arguments[5]);
}

namespace signpost::testing {
namespace {

TEST(Clock, SetForwardByAnHourWhileAShardIsAwayChangesNothing) {
  JobOptionsForTest job;
  job.steps = 24;
  job.optimizer.freeze_step = 6;
  Cluster undisturbed({.aggregators = 2});
  const auto expected = Train(undisturbed, job);

  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/clock");
  std::filesystem::remove_all(state_dir);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir});
  const auto results = Train(cluster, job, [&](uint32_t rank, int step, const Replica&, Worker&) {
    if (rank != 0 || (step != 3 && step != 10 && step != 17)) return;
    const auto before = std::chrono::system_clock::now();
    // The others wait for our frames of the next step.
    cluster.Kill(step % 2, [&] { clock_offset_s += 3600; });
    EXPECT_GT(std::chrono::system_clock::now() - before, std::chrono::minutes(59));
  });
  EXPECT_EQ(results, expected);
}

}  // namespace
}  // namespace signpost::testing
