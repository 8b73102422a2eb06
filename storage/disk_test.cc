#include "storage/disk.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/block_vector.h"

// What the system is asked for, and refuses, in this process.
namespace {
std::vector<std::string>* synced = nullptr;  // paths, if anybody wants to know
const char* refused = nullptr;               // a directory that is not made...
int refused_with = 0;                        // ...for this reason
}  // namespace

extern "C" int fsync(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (synced != nullptr) synced->push_back(std::filesystem::read_symlink(link));
  return syscall(SYS_fsync, fd);
}

extern "C" int mkdir(const char* path, mode_t mode) {
  if (refused == nullptr || std::string(path) != refused)
    return syscall(SYS_mkdirat, AT_FDCWD, path, mode);
  errno = refused_with;
  return -1;
}

namespace signpost {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DirectoryTest : public ::testing::Test {
 protected:
  DirectoryTest() : path_(absl::StrCat(::testing::TempDir(), "/a/b")) {
    std::filesystem::remove_all(path_);
    EXPECT_TRUE(MakeDirectory(path_).ok());
    disk_ = OpenDirectory(path_);
  }

  const std::string path_;
  std::unique_ptr<Disk> disk_;
};

TEST_F(DirectoryTest, SubdirectoriesComeWithTheirFirstFileAndGoWithTheirLast) {
  ASSERT_TRUE(Replace(*disk_, "top", {"1"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/first", {"2", "3"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/second", {"4"}).ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("sub/first", "sub/second", "top"));
  EXPECT_EQ(*disk_->Read("sub/first"), "23");
  ASSERT_TRUE(disk_->Remove("sub/first").ok());
  EXPECT_TRUE(std::filesystem::exists(path_ + "/sub"));
  ASSERT_TRUE(disk_->Remove("sub/second").ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/sub"));
  EXPECT_TRUE(disk_->SyncDirectory().ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("top"));
}

// Whole blocks, and what is none: at its end, at its place in memory, or at that in the file.
TEST_F(DirectoryTest, PartsOfAnySizeAndPlaceComeOneAfterTheOther) {
  BlockVector<char> memory(130 * kBlockBytes);  // twice what is gathered, and more
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<char>(i * i / 7);
  const absl::string_view bytes(memory.data(), memory.size());
  for (const size_t first : {size_t{0}, size_t{1}, kBlockBytes - 1, kBlockBytes, 2 * kBlockBytes,
                             64 * kBlockBytes - 1, 65 * kBlockBytes}) {
    for (const size_t second : {size_t{0}, size_t{1}, kBlockBytes, 70 * kBlockBytes + 1}) {
      const std::vector<absl::string_view> parts = {bytes.substr(0, first), bytes.substr(0, second),
                                                    bytes.substr(1, second), bytes};
      ASSERT_TRUE(Replace(*disk_, "file", parts).ok());
      EXPECT_TRUE(*disk_->Read("file") == absl::StrJoin(parts, ""))
          << first << ", " << second << " bytes";
    }
  }
}

TEST_F(DirectoryTest, WholeBlocksAreNotLeftInTheSystemsCache) {
  struct statfs file_system;
  ASSERT_EQ(statfs(path_.c_str(), &file_system), 0);
  if (file_system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "its files are in memory";
  BlockVector<char> memory(4 << 20, 'x');
  ASSERT_TRUE(Replace(*disk_, "file", {absl::string_view(memory.data(), memory.size())}).ok());

  const int fd = open((path_ + "/file").c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0) GTEST_SKIP() << "the file system has no O_DIRECT";
  void* const mapped = mmap(nullptr, memory.size(), PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::vector<unsigned char> is_cached(memory.size() / kBlockBytes);
  ASSERT_EQ(mincore(mapped, memory.size(), is_cached.data()), 0);
  EXPECT_THAT(is_cached, Each(0));
  munmap(mapped, memory.size());
  close(fd);
}

TEST_F(DirectoryTest, AFileThatIsNotFilledLeavesTheOneBefore) {
  ASSERT_TRUE(Replace(*disk_, "file", {"before"}).ok());
  const absl::Status status = Replace(*disk_, "file", [](Disk::Append append) {
    EXPECT_TRUE(append("torn").ok());
    return absl::InternalError("no more");
  });
  EXPECT_EQ(status, absl::InternalError("no more"));
  EXPECT_THAT(*disk_->List(), ElementsAre("file"));
  EXPECT_EQ(*disk_->Read("file"), "before");
}

// Another rank may have made it a moment ago, and not have come to this yet.
TEST_F(DirectoryTest, ThatItIsThereSurvivesACrashWhoeverHasMadeIt) {
  std::vector<std::string> paths;
  synced = &paths;
  const absl::Status status = MakeDirectory(path_);
  synced = nullptr;
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(paths, ::testing::Contains(std::filesystem::canonical(path_).parent_path()));
}

TEST_F(DirectoryTest, NoRoomForADirectoryIsAFullDisk) {
  const std::string path = path_ + "/new";
  refused = path.c_str();
  refused_with = ENOSPC;
  const absl::Status status = MakeDirectory(path + "/inside");
  refused = nullptr;
  EXPECT_EQ(status, absl::ResourceExhaustedError(absl::StrCat("cannot create the directory ", path,
                                                              ": No space left on device")));
}

// Trying again helps only where the system may come to another answer by itself.
TEST_F(DirectoryTest, ThatItMayNotBeWrittenToDoesNotPassByItself) {
  const std::string path = path_ + "/sub";
  refused = path.c_str();
  std::vector<absl::StatusCode> codes;
  for (const int error : {EACCES, EPERM, EROFS, ENOTDIR, ENOSPC, EDQUOT, ENOENT, EIO, EMFILE}) {
    refused_with = error;
    const absl::Status status = Replace(*disk_, "sub/file", {"1"});
    codes.push_back(status.code());
    EXPECT_EQ(status.message(), absl::StrCat("cannot create ", path, ": ", std::strerror(error)));
  }
  refused = nullptr;
  using Code = absl::StatusCode;
  EXPECT_THAT(codes, ElementsAre(Code::kFailedPrecondition, Code::kFailedPrecondition,
                                 Code::kFailedPrecondition, Code::kFailedPrecondition,
                                 Code::kResourceExhausted, Code::kResourceExhausted,
                                 Code::kNotFound, Code::kUnavailable, Code::kUnavailable));
}

// Nobody but root can look into it, and whoever has the volume need not be root.
TEST_F(DirectoryTest, OfAFileSystemsRootIsListedWithoutItsLostFiles) {
  ASSERT_TRUE(Replace(*disk_, "lost+found/#12", {"1"}).ok());
  ASSERT_TRUE(Replace(*disk_, "top", {"2"}).ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("top"));
}

// What is not looked at must not look as if it were not there.
TEST_F(DirectoryTest, IsNotListedWhenSomethingInItCannotBeLookedAt) {
  std::filesystem::create_symlink("loop", path_ + "/loop");
  for (const absl::Status& status : {disk_->List().status(), disk_->SyncDirectory()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(status.message(),
              absl::StrCat("cannot look at ", path_, "/loop: Too many levels of symbolic links"));
  }
  std::filesystem::remove(path_ + "/loop");
  std::filesystem::create_symlink("nowhere", path_ + "/dangling");
  EXPECT_THAT(*disk_->List(), ElementsAre("dangling"));
}

TEST_F(DirectoryTest, WhatIsNotThereIsNotFoundAndNamed) {
  const absl::Status status = disk_->Read("sub/none").status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path_ + "/sub/none"));
  EXPECT_TRUE(absl::IsNotFound(disk_->Remove("sub/none")));
  EXPECT_TRUE(absl::IsNotFound(OpenDirectory(path_ + "/none")->List().status()));
  EXPECT_THAT(*disk_->List(), IsEmpty());
}

}  // namespace
}  // namespace signpost
