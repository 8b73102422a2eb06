#include "node/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::node {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<SharedMemory> Create(uint64_t bytes) {
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Create(bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

TEST(SharedMemory, IsZeroAndIsTheSameToWhoeverOpensIt) {
  const auto ours = Create(4096 * 4 + 4);
  EXPECT_EQ(ours->floats().size(), 4097u);
  EXPECT_EQ(ours->floats().back(), 0.0f);
  const auto theirs = SharedMemory::Open(ours->handle(), ours->bytes());
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  (*theirs)->floats().back() = 3;
  EXPECT_EQ(ours->floats().back(), 3.0f);
}

TEST(SharedMemory, IsSeenByAnotherProcessAndOutlivesIt) {
  const auto memory = Create(8);
  const Memory handle = memory->handle();
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = SharedMemory::Open(handle, 8);
    if (!opened.ok()) _exit(1);
    (*opened)->floats()[1] = 5;
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory->floats()[1], 5.0f);
}

TEST(SharedMemory, TakesNoPagesBeforeTheyAreWritten) {
  const auto memory = Create(uint64_t{1} << 40);
  memory->floats()[1 << 30] = 1;
  struct stat found = {};
  ASSERT_EQ(fstat(memory->handle().fd(), &found), 0);
  EXPECT_LE(found.st_blocks * 512, 4 << 20);
}

TEST(SharedMemory, CannotChangeItsSize) {
  const auto memory = Create(8192);
  EXPECT_NE(ftruncate(memory->handle().fd(), 4096), 0);
  EXPECT_NE(ftruncate(memory->handle().fd(), 16384), 0);
}

TEST(SharedMemory, OpensNothingOfAnotherSize) {
  const auto memory = Create(8192);
  const auto opened = SharedMemory::Open(memory->handle(), 4096);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("has 8192 bytes, wanted 4096"));
}

TEST(SharedMemory, OpensNothingThatCouldShrinkUnderItsReader) {
  const std::string on_disk = ::testing::TempDir() + "/shrinking";
  for (const int fd : {memfd_create("test", MFD_CLOEXEC),
                       open(on_disk.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)}) {
    ASSERT_EQ(ftruncate(fd, 4096), 0);
    struct stat found = {};
    ASSERT_EQ(fstat(fd, &found), 0);
    Memory handle;
    handle.set_pid(getpid());
    handle.set_fd(fd);
    handle.set_inode(found.st_ino);
    const auto opened = SharedMemory::Open(handle, 4096);
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr("not sealed"));
    close(fd);
  }
}

TEST(SharedMemory, SaysWhatToDoWhenItIsNotToBeSeen) {
  const auto memory = Create(8);
  Memory gone = memory->handle();
  gone.set_pid(1 << 30);
  Memory other = memory->handle();
  other.set_inode(other.inode() + 1);
  for (const Memory& handle : {gone, other}) {
    const auto opened = SharedMemory::Open(handle, 8);
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(opened.status().message()),
                AllOf(HasSubstr("cannot be seen at /proc/"), HasSubstr("one container")));
  }
}

TEST(SharedMemory, IsRefusedWhereThereIsNoAddressSpaceForIt) {
  const auto memory = SharedMemory::Create(uint64_t{1} << 62);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace signpost::node
