#include "proto/processors.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "gtest/gtest.h"

// A machine of so many processors, in place of this one; 0: this one.
namespace {
size_t simulated = 0;
}  // namespace

extern "C" int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t* set) noexcept {
  CPU_ZERO_S(bytes, set);
  if (simulated == 0) return syscall(SYS_sched_getaffinity, process, bytes, set) < 0 ? -1 : 0;
  errno = EINVAL;
  if (8 * bytes < simulated) return -1;
  for (size_t processor = 0; processor < simulated; ++processor) CPU_SET_S(processor, bytes, set);
  return 0;
}

namespace signpost {
namespace {

TEST(ProcessorCount, IsOfThoseThatThisThreadMayRunOn) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  EXPECT_EQ(ProcessorCount(), CPU_COUNT(&all));
  int first = 0;
  while (!CPU_ISSET(first, &all)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(ProcessorCount(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

TEST(ProcessorCount, IsOfMoreToo) {
  for (const size_t processors : {1024, 1025, 8192}) {
    simulated = processors;
    EXPECT_EQ(ProcessorCount(), processors);
  }
  simulated = 1 << 24;  // more than anybody has
  EXPECT_EQ(ProcessorCount(), 0);
  simulated = 0;
}

}  // namespace
}  // namespace signpost
